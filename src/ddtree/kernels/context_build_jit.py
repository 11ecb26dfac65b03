# mypy: ignore-errors
"""One sequence's rows, with what its text says behind each of them. See ddtree.kernels.context."""

import triton
import triton.language as tl

from ddtree.kernels.build_jit import FAR, ancestor_bits
from ddtree.kernels.common_jit import DEAD, follow, value_of
from ddtree.kernels.context_jit import ORDERS, int_at, look_up
from ddtree.kernels.context_rows_jit import (
    LEVELS,
    MINUS,
    befores_of,
    edge_of,
    float_at,
    frontier,
    guess_of,
    insert,
    living,
    rank_of,
)

MIX = tl.constexpr(2)


@triton.jit(do_not_specialize=["pitch", "row_words", "width", "drafted", "ranks", "capacity", "shift"])
def build(
    log_q,
    edges,
    places,
    candidates,
    settings,
    slots,
    text,
    lengths,
    tables,
    matches,
    factors,
    levels,
    hits,
    rests,
    shares,
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
    paired: tl.constexpr,
    overlap: tl.constexpr,
):
    """As build_jit.build, each row with a guess beside its other children. Children are told by their places.

    A row's scores are made when it is laid, as scalars: what is read for them is on its way while others are compared.
    """
    follow(overlap)
    batch = tl.program_id(0).to(tl.int64)
    log_q += batch * drafted * ranks
    candidates += batch * drafted * ranks
    if paired:
        edges += batch * drafted * ranks * ranks
        places += batch * drafted * ranks * ranks
    befores = befores_of(ranks, paired)
    hits += batch * drafted * befores * (ranks + 1) * LEVELS
    rests += batch * LEVELS
    shares += batch * drafted * befores * (ranks + 1)
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
    length = tl.load(lengths + slot)
    f0, f1, f2 = tl.load(factors), tl.load(factors + 1), tl.load(factors + 2)
    f3, f4, f5 = tl.load(factors + 3), tl.load(factors + 4), tl.load(factors + 5)

    node = tl.arange(0, block)
    k = tl.arange(0, rank_block)
    root = node == 0
    score = tl.zeros([block], tl.float32)
    parent = tl.full([block], -1, tl.int32)
    depth = tl.zeros([block], tl.int32)
    rank = tl.zeros([block], tl.int32)  # its place among its siblings
    before = tl.zeros([block], tl.int32)  # with pair scores: the line that its children have, see edge_of
    # A row's token and the four before it, for what is looked up behind its children.
    ends = text + length - 1
    token = tl.where(root, tl.load(ends, mask=length > 0, other=0), 0)
    tail1 = tl.where(root, tl.load(ends - 1, mask=length > 1, other=0), 0)
    tail2 = tl.where(root, tl.load(ends - 2, mask=length > 2, other=0), 0)
    tail3 = tl.where(root, tl.load(ends - 3, mask=length > 3, other=0), 0)
    tail4 = tl.where(root, tl.load(ends - 4, mask=length > 4, other=0), 0)
    # Rows in pre-order: a row's subtree is begin .. end - 1.
    begin = tl.where(root, 0, FAR)
    end = tl.where(root, 1, 0)
    count = tl.full([], 1, tl.int32)

    position = tl.full([], 0, tl.int32)
    matched = tl.full([], 0, tl.int32)
    if (kind != 0) & (reach > 0):
        position = tl.load(matches + slot * 2)
        matched = tl.load(matches + slot * 2 + 1)
    said = tl.load(text + position, mask=position > 0, other=-1)
    line = tl.load(candidates + k, mask=(k < usable) & (reach > 0), other=-1)
    # Of the first depth the order is that of the ranks.
    r, hit, rest, at = guess_of(
        0, 0, position, matched, said, line, k, k, hits, rests, levels, ranks, usable, paired
    )  # fmt: skip
    skips = tl.where(r == 0, 1, 0)  # the guess is not offered twice
    edge = tl.load(log_q + skips, mask=(skips < usable) & (reach > 0), other=MINUS)
    g_token = tl.where(root, said, -1)
    g_rank = tl.where(root, r, -1)
    g_at = tl.where(root, at, -1)
    g_hit = tl.where(root, hit, MINUS)
    g_rest = tl.where(root, rest, 0.0)
    g_position = tl.where(root, position, 0)
    g_length = tl.where(root, matched, 0)
    upcoming = tl.where(root, skips, 0)
    order_plain = tl.where(root, living(tl.where(r >= 0, edge + rest, edge)), DEAD)
    order_guess = tl.where(root, living(hit), DEAD)

    last = tl.minimum(tl.minimum(spine, budget), reach)
    on_chain = root
    in_tree = node < 1
    row = tl.full([], 0, tl.int32)
    deep = tl.full([], 1, tl.int32)
    length_of_chain = reach * (with_chain != 0)
    growing = tl.full([], 1, tl.int32)  # the tree first, then the chain
    going = tl.full([], 1, tl.int32)
    while going != 0:
        above = tl.full([], 0, tl.int32)
        taken = tl.full([], -1, tl.int32)  # the new row's rank; -1: there is none
        best = tl.full([], DEAD, tl.int32)
        if growing != 0:
            best, where, last = frontier(order_plain, order_guess, depth, end, upcoming, g_rank, node, count, last)
            if (best > DEAD) & (count <= budget):
                above = where & 255
                taken = 63 - ((where >> 8) & 63)
            else:
                growing = tl.full([], 0, tl.int32)
                in_tree = node < count
        elif deep <= length_of_chain:
            # The likelier of the guess and the drafter's best.
            own = int_at(g_rank, node, row)
            line_of_row = tl.full([], 0, tl.int32)
            if paired:
                line_of_row = int_at(before, node, row)
            first = edge_of(log_q, edges, deep - 1, line_of_row, 0, ranks, deep <= reach, paired)
            first += float_at(g_rest, node, row)
            likelier = (own == 0) | ((own > 0) & ((first >= float_at(g_hit, node, row)) == 0))
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
            d = int_at(depth, node, above)
            above_rank = int_at(g_rank, node, above)
            above_token = int_at(g_token, node, above)
            guessed = above_rank == taken
            above_before = tl.full([], 0, tl.int32)
            if paired:
                above_before = int_at(before, node, above)
            own = rank_of(places, d, above_before, taken, ranks, taken < usable, paired)
            token_ = tl.load(candidates + d * ranks + own, mask=guessed == 0, other=0).to(tl.int32)
            token_ = tl.where(guessed, above_token, token_)
            # Read ahead: what the next child of the row above scores, and the new row's own candidates.
            after = tl.where(taken + 1 == above_rank, taken + 2, taken + 1)
            edge = edge_of(log_q, edges, d, above_before, after, ranks, after < usable, paired)
            new_before = tl.full([], 0, tl.int32)
            if paired:
                new_before = tl.where(taken < usable, own, ranks)
            d += 1
            deeper = d < reach
            line = tl.load(candidates + d * ranks + k, mask=(k < usable) & deeper, other=-1)
            first = edge_of(log_q, edges, d, new_before, 0, ranks, deeper & (usable > 0), paired)
            second = edge_of(log_q, edges, d, new_before, 1, ranks, deeper & (usable > 1), paired)
            order = rank_of(places, d, new_before, k, ranks, (k < usable) & deeper, paired)
            order = tl.where(k < usable, order, -1)
            t1, t2 = int_at(token, node, above), int_at(tail1, node, above)
            t3, t4 = int_at(tail2, node, above), int_at(tail3, node, above)
            t5 = int_at(tail4, node, above)

            other = float_at(score, node, above) + tl.where(above_rank >= 0, edge + float_at(g_rest, node, above), edge)
            order_plain = tl.where((node == above) & (guessed == 0), living(other), order_plain)
            order_guess = tl.where((node == above) & guessed, DEAD, order_guess)
            upcoming = tl.where((node == above) & (guessed == 0), after, upcoming)
            parent, depth, rank, token, begin, end = insert(
                node, count, above, d - 1, taken, token_, parent, depth, rank, token, begin, end
            )
            # The match behind the new row: its parent's goes on where the row is what that said; else it is looked up
            # by the row's own path (mix), or there is none (branch). Equals Matches and Branch.
            position = tl.full([], 0, tl.int32)
            matched = tl.full([], 0, tl.int32)
            said = tl.full([], -1, tl.int32)
            if (kind != 0) & deeper:
                above_position = int_at(g_position, node, above)
                if (above_position > 0) & (above_token == token_):
                    position = above_position + 1
                    matched = int_at(g_length, node, above) + 1
                    if position < length:
                        said = tl.load(text + position)
                    else:  # behind the text's own end it goes round by the row's path
                        here = int_at(begin, node, count)
                        back = (begin <= here) & (end > here) & (depth == position - length + 1) & (node > 0)
                        said = tl.sum(tl.where(back, token, 0), 0)
                elif kind == MIX:
                    position, matched, said = look_up(
                        tables, text, f0, f1, f2, f3, f4, f5, token_, t1, t2, t3, t4, t5, length + d, shift
                    )
            r, hit, rest, at = guess_of(
                d, new_before, position, matched, said, line, order, k, hits, rests, levels, ranks, usable, paired
            )  # fmt: skip
            new = node == count
            before = tl.where(new, new_before, before)
            reached = value_of(best)
            edge = tl.where(r == 0, second, first)
            score = tl.where(new, reached, score)
            order_plain = tl.where(new, living(reached + tl.where(r >= 0, edge + rest, edge)), order_plain)
            order_guess = tl.where(new, living(reached + hit), order_guess)
            upcoming = tl.where(new, tl.where(r == 0, 1, 0), upcoming)
            tail1, tail2 = tl.where(new, t1, tail1), tl.where(new, t2, tail2)
            tail3, tail4 = tl.where(new, t3, tail3), tl.where(new, t4, tail4)
            g_token, g_rank = tl.where(new, said, g_token), tl.where(new, r, g_rank)
            g_at = tl.where(new, at, g_at)
            g_hit, g_rest = tl.where(new, hit, g_hit), tl.where(new, rest, g_rest)
            g_position, g_length = tl.where(new, position, g_position), tl.where(new, matched, g_length)
            count += 1

    real = node < width
    kept = (node > 0) & (node < count)
    share = tl.load(shares + g_at // LEVELS, mask=(g_at >= 0) & (node < count), other=0.0)
    tl.store(said_tokens + batch * width + node, g_token, mask=real)
    tl.store(said_levels + batch * width + node, tl.where(g_at >= 0, g_at % LEVELS, -1), mask=real)
    tl.store(said_shares + batch * width + node, share, mask=real)
    at = batch * pitch + node
    tl.store(tokens + at, tl.where(kept, token, 0).to(tl.int64), mask=real & (node > 0))
    parent = tl.where(kept, parent, -1)
    tl.store(parents + at, parent.to(tl.int64), mask=real)
    tl.store(depths + at, tl.where(kept, depth, 0).to(tl.int64), mask=real)
    shadows = (with_tree != 0) & (with_chain != 0)
    tl.store(member + at, (on_chain | (shadows == 0)).to(tl.uint8), mask=real)
    tl.store(tree + at, in_tree.to(tl.uint8), mask=real)
    for word in tl.static_range(words):
        tl.store(ancestors + at * row_words + word, ancestor_bits(parent, node, word, 6), mask=real)
