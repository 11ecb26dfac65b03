# mypy: ignore-errors
"""One sequence's rows by one warp. See ddtree.kernels.build."""

import triton
import triton.language as tl

from ddtree.kernels.common_jit import DEAD, follow, order_of, value_of

FAR = tl.constexpr(1 << 20)  # the place of a row that is not laid yet


@triton.jit
def _at(depth, rank, ranks, paired: tl.constexpr):
    """Where the scores of a depth's candidates (from 0) lie: with pair scores behind the candidate of this rank."""
    if paired:  # noqa: SIM108 - known when it is compiled
        at = (depth * ranks + rank) * ranks
    else:
        at = depth * ranks
    return at


@triton.jit
def _frontier(
    edges, places, ranks, score, depth, rank, end, upcoming, node, count, reach, usable, paired: tl.constexpr
):  # fmt: skip
    """The best candidate: its score's order (DEAD if there is none), and where it grows and its rank, packed.

    Every laid row has one candidate, its first child that is not laid: `upcoming` is its place. Equal scores go to the
    smaller depth, then to the smaller path of places. Candidates of one depth have parents of one depth, so their order
    is that of the parents' places in pre-order, which `end` is as good as.
    """
    alive = (node < count) & (depth < reach) & (upcoming < usable)
    at = _at(depth, rank, ranks, paired) + upcoming
    sum_ = score + tl.load(edges + at, mask=alive, other=float("-inf"))
    child = upcoming
    if paired:
        child = tl.load(places + at, mask=alive, other=0).to(tl.int32)
    order = tl.where(sum_ > float("-inf"), order_of(sum_), DEAD)  # false for NaN
    best = tl.max(order, 0)
    tie = ((63 - depth) << 21) | ((256 - end) << 13) | (node << 5) | child
    return best, tl.max(tl.where(order == best, tie, -1), 0)


@triton.jit
def ancestor_bits(parent, node, word, steps: tl.constexpr):
    """Bits of a row and its ancestors within one word: every step doubles how far up a row sees."""
    bits = tl.where(node // 64 == word, tl.full(node.shape, 1, tl.int64) << (node % 64).to(tl.int64), 0)
    jump = parent
    for _ in tl.static_range(steps):
        above = tl.maximum(jump, 0)
        bits |= tl.where(jump >= 0, tl.gather(bits, above, 0), 0)
        jump = tl.where(jump >= 0, tl.gather(jump, above, 0), -1)
    return bits


@triton.jit(do_not_specialize=["pitch", "row_words", "width", "drafted", "ranks"])
def build(
    edges,
    places,
    candidates,
    settings,
    tokens,
    parents,
    depths,
    ancestors,
    member,
    tree,
    pitch,
    row_words,
    width,
    drafted,
    ranks,
    block: tl.constexpr,
    words: tl.constexpr,
    paired: tl.constexpr,
    chained: tl.constexpr,
    chain_first: tl.constexpr,
    overlap: tl.constexpr,
):
    """The spine, the best-first tree behind it, the rest of the chain behind that; then the tensors of the rows.

    edges: log_q, [D, K] each; with `paired` lines of scores [D, K, K], and places the ranks of each line: see pair.py.
    chained: the chain goes by the lines too; else by the first rank of every depth.
    chain_first: the tensors have the chain's rows before all others, which keep their order.
    """
    follow(overlap)
    batch = tl.program_id(0).to(tl.int64)
    edges += batch * _at(drafted, 0, ranks, paired)
    places += batch * _at(drafted, 0, ranks, paired)
    candidates += batch * drafted * ranks
    settings += batch * 7
    with_tree = tl.load(settings).to(tl.int32)
    with_chain = tl.load(settings + 1).to(tl.int32)
    budget = tl.load(settings + 2).to(tl.int32) * (with_tree != 0)
    spine = tl.load(settings + 3).to(tl.int32)
    usable = tl.minimum(tl.load(settings + 4).to(tl.int32), ranks)
    reach = tl.minimum(tl.load(settings + 5).to(tl.int32), drafted)

    node = tl.arange(0, block)
    score = tl.zeros([block], tl.float32)
    rank = tl.zeros([block], tl.int32)
    count = tl.full([], 1, tl.int32)
    total = tl.full([], 0.0, tl.float32)
    tip = tl.full([], 0, tl.int32)  # rank of the chain's last token so far
    last = tl.minimum(tl.minimum(spine, budget), reach)
    while count <= last:
        at = _at(count - 1, tip, ranks, paired)
        total += tl.load(edges + at)
        score = tl.where(node == count, total, score)
        if paired:
            tip = tl.load(places + at).to(tl.int32)
            rank = tl.where(node == count, tip, rank)
        # A missing token ends the spine.
        last = tl.where(total > float("-inf"), last, 0)
        count = tl.where(total > float("-inf"), count + 1, count)
    laid = node < count
    parent = tl.where(laid, node - 1, -1)
    depth = tl.where(laid, node, 0)
    upcoming = tl.where(node < count - 1, 1, 0)
    # Rows in pre-order: a row's subtree is begin .. end - 1.
    begin = tl.where(laid, node, FAR)
    end = tl.where(laid, count, 0)

    best, where = _frontier(
        edges, places, ranks, score, depth, rank, end, upcoming, node, count, reach, usable, paired
    )  # fmt: skip
    while (count <= budget) & (best > DEAD):
        above, r = (where >> 5) & 255, where & 31
        d, e = 63 - (where >> 21), 256 - ((where >> 13) & 255)
        # The new row is the last of its parent's subtree: at e. Its ancestors' subtrees grow, what is behind moves on.
        grows = (begin < e) & (end >= e) & (depth <= d)
        end = tl.where(grows | (begin >= e), end + 1, end)
        begin = tl.where(begin >= e, begin + 1, begin)
        new = node == count
        begin = tl.where(new, e, begin)
        end = tl.where(new, e + 1, end)
        score = tl.where(new, value_of(best), score)
        depth = tl.where(new, d + 1, depth)
        rank = tl.where(new, r, rank)
        parent = tl.where(new, above, parent)
        upcoming = tl.where(node == above, upcoming + 1, tl.where(new, 0, upcoming))
        count += 1
        best, where = _frontier(
            edges, places, ranks, score, depth, rank, end, upcoming, node, count, reach, usable, paired
        )  # fmt: skip
    in_tree = node < count

    on_chain = node == 0
    row = tl.full([], 0, tl.int32)
    d = tl.full([], 1, tl.int32)
    tip = tl.full([], 0, tl.int32)
    reach = reach * (with_chain != 0)
    while d <= reach:
        if chained:
            tip = tl.load(places + _at(d - 1, tip, ranks, paired)).to(tl.int32)
        found = tl.max(tl.where((parent == row) & (rank == tip) & (node > 0) & (node < count), node, -1), 0)
        new = (node == count) & (found < 0)
        parent = tl.where(new, row, parent)
        depth = tl.where(new, d, depth)
        rank = tl.where(new, tip, rank)
        row = tl.where(found < 0, count, found)
        count = tl.where(found < 0, count + 1, count)
        on_chain |= node == row
        d += 1

    place = node
    if chain_first:
        others = (on_chain == 0).to(tl.int32)
        place = tl.where(on_chain, depth, d - 1 + tl.cumsum(others, 0))  # d rows are the chain's, with the root
    real = place < width
    at = batch * pitch + place
    kept = (node > 0) & (node < count)
    token = tl.load(candidates + (depth - 1) * ranks + rank, mask=kept & real, other=0)
    tl.store(tokens + at, token, mask=real & (node > 0))
    parent = tl.where(kept, parent, -1)
    above = tl.where(kept, tl.gather(place, tl.maximum(parent, 0), 0), -1)
    tl.store(parents + at, above.to(tl.int64), mask=real)
    tl.store(depths + at, tl.where(kept, depth, 0).to(tl.int64), mask=real)
    shadows = (with_tree != 0) & (with_chain != 0)
    tl.store(member + at, (on_chain | (shadows == 0)).to(tl.uint8), mask=real)
    tl.store(tree + at, in_tree.to(tl.uint8), mask=real)
    for word in tl.static_range(words):
        tl.store(ancestors + at * row_words + word, ancestor_bits(parent, place, word, 6), mask=real)
