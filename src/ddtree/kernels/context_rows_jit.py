# mypy: ignore-errors
"""What `context_build_jit.build` does with one row. See ddtree.kernels.context."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ddtree.kernels.common_jit import DEAD, INTERPRETED, follow, log_of, order_of
from ddtree.kernels.context_jit import LEAST, LONGEST, MOST, int_at

MINUS = tl.constexpr(float("-inf"))
LEVELS = tl.constexpr(16)  # room for the levels of confidence


@triton.jit
def _exp(x):
    if INTERPRETED:  # noqa: SIM108 - a conditional expression would be compiled on both sides
        result = tl.exp(x)
    else:
        result = libdevice.exp(x)
    return result


@triton.jit
def float_at(values, node, row):
    """One row's float32, as a scalar: by its bits, since whole numbers are summed over a warp in one instruction."""
    return int_at(values.to(tl.int32, bitcast=True), node, row).to(tl.float32, bitcast=True)


@triton.jit
def living(score):
    """A score's order; DEAD where it is -inf or NaN."""
    return tl.where(score > MINUS, order_of(score), DEAD)


@triton.jit
def befores_of(ranks, paired: tl.constexpr):
    """How many lines of scores a depth has: with pair scores one behind each candidate, and one behind none."""
    if paired:  # noqa: SIM108 - known when it is compiled
        befores = ranks + 1
    else:
        befores = 1
    return befores


@triton.jit
def edge_of(log_q, edges, depth, before, place, ranks, mask, paired: tl.constexpr):
    """The score of the candidate at a place among those of a depth, behind the candidate `before`; its number is
    `ranks` where it is none: there, and without pair scores, log_q holds.
    """
    if paired:
        own = before < ranks
        behind = tl.load(edges + (depth * ranks + before) * ranks + place, mask=mask & own, other=MINUS)
        plain = tl.load(log_q + depth * ranks + place, mask=mask & (own == 0), other=MINUS)
        edge = tl.where(own, behind, plain)
    else:
        edge = tl.load(log_q + depth * ranks + place, mask=mask, other=MINUS)
    return edge


@triton.jit
def rank_of(places, depth, before, place, ranks, mask, paired: tl.constexpr):
    """Which candidate that is; see edge_of."""
    rank = place
    if paired:
        own = before < ranks
        found = tl.load(places + (depth * ranks + before) * ranks + place, mask=mask & own, other=0).to(tl.int32)
        rank = tl.where(own, found, place)
    return rank


@triton.jit(do_not_specialize=["drafted", "ranks"])
def weigh(
    log_q, scores, settings, slots, confidence, hits, rests, shares, drafted, ranks, rank_block: tl.constexpr,
    paired: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Guesses.behind for every candidate of one line of scores, and for none of them, at every level: for `build`.

    Lines: see befores_of; of the first depth there is one.

    Written: hits, the log p of a guess; rests, log (1 - c); shares, the drafter's own.
    """
    follow(overlap)
    befores = befores_of(ranks, paired)
    batch, depth, before = tl.program_id(0).to(tl.int64), tl.program_id(1) // befores, tl.program_id(1) % befores
    if (tl.load(settings + batch * 7 + 6) == 0) | ((depth == 0) & (before > 0)):
        return
    level = tl.arange(0, LEVELS)
    # Every level that is used lies between these; the others have no logarithm.
    c = tl.minimum(tl.maximum(tl.load(confidence + tl.load(slots + batch) * 48 + 32 + level), LEAST), MOST)
    k = tl.arange(0, rank_block)
    line = batch * drafted + depth
    edge = tl.load(log_q + line * ranks + k, mask=k < ranks, other=MINUS)
    if paired:  # noqa: SIM102 - known when it is compiled
        if (depth > 0) & (before < ranks):
            own = (batch * (drafted - 1) + depth - 1) * ranks + before
            edge = tl.load(scores + own * ranks + k, mask=k < ranks, other=MINUS)
    share = tl.where(edge > MINUS, _exp(edge.to(tl.float64)), 0.0)
    # Rounding must not lift a score above 0.
    hit = tl.minimum(log_of(c[None, :] + (1.0 - c)[None, :] * share[:, None]).to(tl.float32), 0.0)
    at = (line * befores + before) * (ranks + 1) + k
    tl.store(hits + at[:, None] * LEVELS + level[None, :], hit, mask=(k <= ranks)[:, None])
    tl.store(shares + at, share, mask=k <= ranks)
    if depth == 0:
        tl.store(rests + batch * LEVELS + level, log_of(1.0 - c).to(tl.float32))


@triton.jit
def insert(node, count, above, d, r, token_, parent, depth, rank, token, begin, end):
    """Row `count`, a child of row `above` (of depth d), behind its siblings of lower rank: all in pre-order."""
    elder = (parent == above) & (rank < r) & (node > 0) & (node < count)
    e = tl.maximum(tl.max(tl.where(elder, end, 0), 0), int_at(begin, node, above) + 1)
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
def frontier(order_plain, order_guess, depth, end, upcoming, g_rank, node, count, last):
    """The next row's score (its order; DEAD if there is none), its place, packed, and where the spine ends.

    A laid row has two candidates: its guess, and the first other child that is not laid. Equal scores go to the smaller
    depth, then to the smaller path of ranks: of one depth, to the parent that is first in pre-order, then to the rank.
    """
    place = ((63 - depth) << 23) | ((256 - end) << 14) | node
    tie_plain = place | ((63 - upcoming) << 8)
    tie_guess = place | ((63 - tl.maximum(g_rank, 0)) << 8)
    if count <= last:
        tip = node == count - 1
        plain = tl.where(tip & (upcoming == 0), order_plain, DEAD)
        guess = tl.where(tip & (g_rank == 0), order_guess, DEAD)
        best, where = _best(plain, guess, tie_plain, tie_guess)
        last = tl.where(best > DEAD, last, 0)  # a missing token ends the spine
        if best == DEAD:
            best, where = _best(order_plain, order_guess, tie_plain, tie_guess)
    else:
        best, where = _best(order_plain, order_guess, tie_plain, tie_guess)
    return best, where, last


@triton.jit
def _best(order_plain, order_guess, tie_plain, tie_guess):
    """The best of two candidates a row, and its place."""
    order = tl.maximum(order_plain, order_guess)
    tie = tl.maximum(tl.where(order_plain == order, tie_plain, -1), tl.where(order_guess == order, tie_guess, -1))
    best = tl.max(order, 0)
    return best, tl.max(tl.where(order == best, tie, -1), 0)


@triton.jit
def guess_of(
    d, before, position, matched, said, line, order, k, hits, rests, levels, ranks, usable, paired: tl.constexpr
):  # fmt: skip
    """What a match says behind a row of depth d, which is the candidate `before`: its place, log p, log (1 - c), and
    where its log p is among the hits, which tells its level too; place and that are -1 without a match.

    line: the tokens that may follow, by rank; order: their ranks, best first.
    """
    place = tl.full([], -1, tl.int32)
    at = tl.full([], -1, tl.int32)
    hit = tl.full([], MINUS, tl.float32)
    rest = tl.full([], 0.0, tl.float32)
    if position > 0:
        level = tl.load(levels + tl.minimum(matched, LONGEST))
        rank = tl.min(tl.where(line == said, k, usable), 0)
        place = rank
        if paired:
            found = tl.min(tl.where(order == rank, k, usable), 0)
            place = tl.where((before < ranks) & (rank < usable), found, rank)
        none = tl.where(rank < usable, rank, ranks)
        at = ((d * befores_of(ranks, paired) + before) * (ranks + 1) + none) * LEVELS + level
        hit = tl.load(hits + at)
        rest = tl.load(rests + level)
    return place, hit, rest, at
