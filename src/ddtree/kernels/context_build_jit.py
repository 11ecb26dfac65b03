# mypy: ignore-errors
"""One sequence's rows, with what its text says behind each of them. See ddtree.kernels.context."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ddtree.kernels.build_jit import FAR, ancestor_bits
from ddtree.kernels.common_jit import DEAD, INTERPRETED, follow, log_of, order_of, value_of
from ddtree.kernels.context_jit import LONGEST, ORDERS, search

MINUS = tl.constexpr(float("-inf"))
MIX = tl.constexpr(2)


@triton.jit
def _exp(x):
    if INTERPRETED:  # noqa: SIM108 - a conditional expression would be compiled on both sides
        result = tl.exp(x)
    else:
        result = libdevice.exp(x)
    return result


@triton.jit
def _at(values, node, row):
    """One row's value, as a scalar."""
    return tl.sum(tl.where(node == row, values, tl.zeros_like(values)), 0)


@triton.jit
def _best(order_plain, order_guess, tie_plain, tie_guess):
    """The best of two candidates a row, and its place."""
    best = tl.max(tl.maximum(order_plain, order_guess), 0)
    plain = tl.where(order_plain == best, tie_plain, -1)
    return best, tl.max(tl.maximum(plain, tl.where(order_guess == best, tie_guess, -1)), 0)


@triton.jit
def _frontier(
    log_q, ranks, score, depth, end, upcoming, g_rank, g_hit, g_rest, g_free, node, count, last, reach, usable,
):  # fmt: skip
    """The next row's score (its order; DEAD if there is none), its place, packed, and where the spine ends.

    A laid row has two candidates: its guess, and the first other child that is not laid. Equal scores go to the smaller
    depth, then to the smaller path of ranks: of one depth, to the parent that is first in pre-order, then to the rank.
    """
    alive = (node < count) & (depth < reach)
    open_ = alive & (upcoming < usable)
    edge = tl.load(log_q + depth * ranks + upcoming, mask=open_, other=MINUS)
    plain = score + tl.where(g_rank >= 0, edge + g_rest, edge)
    order_plain = tl.where(plain > MINUS, order_of(plain), DEAD)  # false for NaN
    guess = score + g_hit
    order_guess = tl.where(alive & (g_free != 0) & (guess > MINUS), order_of(guess), DEAD)
    place = ((63 - depth) << 23) | ((256 - end) << 14) | node
    tie_plain = place | ((63 - upcoming) << 8)
    tie_guess = place | ((63 - tl.maximum(g_rank, 0)) << 8)
    best = tl.full([], DEAD, tl.int32)
    where = tl.full([], -1, tl.int32)
    if count <= last:
        tip = node == count - 1
        first_plain = tl.where(tip & (upcoming == 0), order_plain, DEAD)
        best, where = _best(first_plain, tl.where(tip & (g_rank == 0), order_guess, DEAD), tie_plain, tie_guess)
        last = tl.where(best > DEAD, last, 0)  # a missing token ends the spine
    if best == DEAD:
        best, where = _best(order_plain, order_guess, tie_plain, tie_guess)
    return best, where, last


@triton.jit
def _insert(node, count, above, d, r, token_, parent, depth, rank, token, begin, end):
    """Row `count`, a child of row `above` (of depth d), behind its siblings of lower rank: all in pre-order."""
    elder = (parent == above) & (rank < r) & (node > 0) & (node < count)
    e = tl.maximum(tl.max(tl.where(elder, end, 0), 0), _at(begin, node, above) + 1)
    # Its ancestors' subtrees grow, what is behind moves on.
    grows = (begin < e) & (end >= e) & (depth <= d)
    end = tl.where(grows | (begin >= e), end + 1, end)
    begin = tl.where(begin >= e, begin + 1, begin)
    new = node == count
    return (
        tl.where(new, above, parent), tl.where(new, d + 1, depth), tl.where(new, r, rank),
        tl.where(new, token_, token), tl.where(new, e, begin), tl.where(new, e + 1, end),
    )  # fmt: skip


@triton.jit
def _match(
    kind, row, d, token_, above_position, above_length, above_token, on_path, depth, token, text, length, tables,
    factors, shift,
):  # fmt: skip
    """The match behind a new row of depth d: its parent's goes on where the row is what that said; else it is looked
    up by the row's own path (mix), or there is none (branch). Equals Matches and Branch.
    """
    position = tl.full([], 0, tl.int32)
    matched = tl.full([], 0, tl.int32)
    if (above_position > 0) & (above_token == token_):
        position = above_position + 1
        matched = above_length + 1
    elif kind == MIX:
        j = tl.arange(0, 8)
        mine = on_path[None, :] & (depth[None, :] == (d - j)[:, None]) & (depth > 0)[None, :]
        last = tl.sum(tl.where(mine, token[None, :], 0), 1)
        before = length - 1 - (j - d)
        last += tl.load(text + before, mask=(j >= d) & (before >= 0), other=0)
        position, matched = search(tables, text, factors, last, length + d, shift)
    return position, matched


@triton.jit
def _guess(
    d, position, matched, on_path, depth, token, text, length, log_q, candidates, ranks, usable, confidence, levels,
    rank_block: tl.constexpr,
):  # fmt: skip
    """What a match says behind a row of depth d: Guesses.behind. The token, its rank, log p, log (1 - c), the level of
    the confidence and the drafter's share; rank and level are -1 without a match.
    """
    said = tl.full([], -1, tl.int32)
    rank = tl.full([], -1, tl.int32)
    level = tl.full([], -1, tl.int32)
    hit = tl.full([], MINUS, tl.float32)
    rest = tl.full([], 0.0, tl.float32)
    share = tl.full([], 0.0, tl.float64)
    if position > 0:
        own = on_path & (depth == position - length + 1) & (depth > 0)
        said = tl.sum(tl.where(own, token, 0), 0)
        said += tl.load(text + position, mask=position < length, other=0)
        level = tl.load(levels + tl.minimum(matched, LONGEST))
        c = tl.load(confidence + 32 + level)
        k = tl.arange(0, rank_block)
        line = tl.load(candidates + d * ranks + k, mask=k < usable, other=-1)
        rank = tl.min(tl.where(line == said, k, usable), 0)
        edge = tl.load(log_q + d * ranks + rank, mask=rank < usable, other=MINUS)
        share = tl.where(edge > MINUS, _exp(edge.to(tl.float64)), 0.0)
        hit = tl.minimum(log_of(c + (1.0 - c) * share).to(tl.float32), 0.0)
        rest = log_of(1.0 - c).to(tl.float32)
    return said, rank, hit, rest, level, share


@triton.jit(do_not_specialize=["pitch", "row_words", "width", "drafted", "ranks", "capacity", "shift"])
def build(
    log_q,
    candidates,
    settings,
    slots,
    text,
    lengths,
    tables,
    matches,
    confidence,
    factors,
    levels,
    tokens,
    parents,
    depths,
    ancestors,
    member,
    tree,
    said_tokens,
    said_levels,
    said_shares,
    pitch,
    row_words,
    width,
    drafted,
    ranks,
    capacity,
    shift,
    block: tl.constexpr,
    words: tl.constexpr,
    rank_block: tl.constexpr,
    overlap: tl.constexpr,
):
    """As build_jit.build, each row with a guess beside its other children."""
    follow(overlap)
    batch = tl.program_id(0).to(tl.int64)
    log_q += batch * drafted * ranks
    candidates += batch * drafted * ranks
    settings += batch * 7
    with_tree = tl.load(settings).to(tl.int32)
    with_chain = tl.load(settings + 1).to(tl.int32)
    budget = tl.load(settings + 2).to(tl.int32) * (with_tree != 0)
    spine = tl.load(settings + 3).to(tl.int32)
    usable = tl.minimum(tl.load(settings + 4).to(tl.int32), ranks)
    reach = tl.minimum(tl.load(settings + 5).to(tl.int32), drafted)
    kind = tl.load(settings + 6).to(tl.int32)
    slot = tl.load(slots + batch)
    text += slot * capacity
    tables += slot * (ORDERS << (64 - shift))
    confidence += slot * 48
    length = tl.load(lengths + slot)
    said_tokens += batch * width
    said_levels += batch * width
    said_shares += batch * width

    node = tl.arange(0, block)
    score = tl.zeros([block], tl.float32)
    parent = tl.full([block], -1, tl.int32)
    depth = tl.zeros([block], tl.int32)
    rank = tl.zeros([block], tl.int32)
    token = tl.zeros([block], tl.int32)
    # Rows in pre-order: a row's subtree is begin .. end - 1.
    begin = tl.where(node == 0, 0, FAR)
    end = tl.where(node == 0, 1, 0)
    count = tl.full([], 1, tl.int32)

    position = tl.full([], 0, tl.int32)
    matched = tl.full([], 0, tl.int32)
    if (kind != 0) & (reach > 0):
        position = tl.load(matches + slot * 2)
        matched = tl.load(matches + slot * 2 + 1)
    said, r, hit, rest, level, share = _guess(
        0, position, matched, node < 0, depth, token, text, length, log_q, candidates, ranks, usable, confidence,
        levels, rank_block,
    )  # fmt: skip
    tl.store(said_tokens, said)
    tl.store(said_levels, level)
    tl.store(said_shares, share)
    root = node == 0
    g_token = tl.where(root, said, -1)
    g_rank = tl.where(root, r, -1)
    g_hit = tl.where(root, hit, MINUS)
    g_rest = tl.where(root, rest, 0.0)
    g_position = tl.where(root, position, 0)
    g_length = tl.where(root, matched, 0)
    g_free = tl.where(root & (r >= 0), 1, 0)
    upcoming = tl.where(root & (r == 0), 1, 0)  # the guess is not offered twice

    last = tl.minimum(tl.minimum(spine, budget), reach)
    on_chain = node == 0
    in_tree = node < 1
    row = tl.full([], 0, tl.int32)
    deep = tl.full([], 1, tl.int32)
    line = reach * (with_chain != 0)
    growing = tl.full([], 1, tl.int32)  # the tree first, then the chain
    going = tl.full([], 1, tl.int32)
    while going != 0:
        above = tl.full([], 0, tl.int32)
        taken = tl.full([], -1, tl.int32)  # the new row's rank; -1: there is none
        best = tl.full([], DEAD, tl.int32)
        if growing != 0:
            best, where, last = _frontier(
                log_q, ranks, score, depth, end, upcoming, g_rank, g_hit, g_rest, g_free, node, count, last, reach,
                usable,
            )  # fmt: skip
            if (best > DEAD) & (count <= budget):
                above = where & 255
                taken = 63 - ((where >> 8) & 63)
            else:
                growing = tl.full([], 0, tl.int32)
                in_tree = node < count
        elif deep <= line:
            # The likelier of the guess and the drafter's best.
            own = _at(g_rank, node, row)
            first = tl.load(log_q + (deep - 1) * ranks) + _at(g_rest, node, row)
            hit_ = tl.max(tl.where(node == row, g_hit, MINUS), 0)
            likelier = (own == 0) | ((own > 0) & ((first >= hit_) == 0))
            wanted = tl.where(likelier, own, 0)
            laid = (parent == row) & (rank == wanted) & (node > 0) & (node < count)
            found = tl.max(tl.where(laid, node, -1), 0)
            above = row
            taken = tl.where(found < 0, wanted, -1)
            row = tl.where(found < 0, count, found)
            on_chain |= node == row
            deep += 1
        else:
            going = tl.full([], 0, tl.int32)
        if taken >= 0:
            d = _at(depth, node, above)
            above_token = _at(g_token, node, above)
            guessed = _at(g_rank, node, above) == taken
            token_ = tl.load(candidates + d * ranks + taken, mask=guessed == 0, other=0).to(tl.int32)
            token_ = tl.where(guessed, above_token, token_)
            parent, depth, rank, token, begin, end = _insert(
                node, count, above, d, taken, token_, parent, depth, rank, token, begin, end
            )
            is_new = node == count
            score = tl.where(is_new, value_of(best), score)
            after = tl.where(taken + 1 == _at(g_rank, node, above), taken + 2, taken + 1)
            upcoming = tl.where((node == above) & (guessed == 0), after, upcoming)
            g_free = tl.where((node == above) & guessed, 0, g_free)
            d += 1
            on_path = (begin <= _at(begin, node, count)) & (end > _at(begin, node, count))
            position = tl.full([], 0, tl.int32)
            matched = tl.full([], 0, tl.int32)
            if (kind != 0) & (d < reach):
                position, matched = _match(
                    kind, count, d, token_, _at(g_position, node, above), _at(g_length, node, above), above_token,
                    on_path, depth, token, text, length, tables, factors, shift,
                )  # fmt: skip
            said, r, hit, rest, level, share = _guess(
                d, position, matched, on_path, depth, token, text, length, log_q, candidates, ranks, usable,
                confidence, levels, rank_block,
            )  # fmt: skip
            tl.store(said_tokens + count, said)
            tl.store(said_levels + count, level)
            tl.store(said_shares + count, share)
            g_token = tl.where(is_new, said, g_token)
            g_rank = tl.where(is_new, r, g_rank)
            g_hit = tl.where(is_new, hit, g_hit)
            g_rest = tl.where(is_new, rest, g_rest)
            g_position = tl.where(is_new, position, g_position)
            g_length = tl.where(is_new, matched, g_length)
            g_free = tl.where(is_new & (r >= 0), 1, g_free)
            upcoming = tl.where(is_new, tl.where(r == 0, 1, 0), upcoming)
            count += 1

    real = node < width
    at = batch * pitch + node
    kept = (node > 0) & (node < count)
    tl.store(tokens + at, tl.where(kept, token, 0).to(tl.int64), mask=real & (node > 0))
    parent = tl.where(kept, parent, -1)
    tl.store(parents + at, parent.to(tl.int64), mask=real)
    tl.store(depths + at, tl.where(kept, depth, 0).to(tl.int64), mask=real)
    shadows = (with_tree != 0) & (with_chain != 0)
    tl.store(member + at, (on_chain | (shadows == 0)).to(tl.uint8), mask=real)
    tl.store(tree + at, in_tree.to(tl.uint8), mask=real)
    for word in tl.static_range(words):
        tl.store(ancestors + at * row_words + word, ancestor_bits(parent, node, word, 6), mask=real)
