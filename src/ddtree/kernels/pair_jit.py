# mypy: ignore-errors
"""The candidates of a depth behind one candidate of the depth before: a program each. See ddtree.kernels.pair."""

import triton
import triton.language as tl

from ddtree.kernels.common_jit import follow, log_of, order_of, sum_parts

MINUS = tl.constexpr(float("-inf"))
LEAST = tl.constexpr(1e-6)  # as ddtree.drafter.pairwise has it


@triton.jit(do_not_specialize=["drafted", "ranks", "splits"])
def pair(
    log_q,
    candidates,
    settings,
    before,
    behind,
    rest,
    table,
    parts,
    scores,
    edges,
    places,
    drafted,
    ranks,
    rank,
    splits,
    rank_block: tl.constexpr,
    factor_block: tl.constexpr,
    gated: tl.constexpr,
    overlap: tl.constexpr,
):
    """table: the row of each token in the factors; parts: [splits, B * D, r], what a gate adds to 1."""
    follow(overlap)
    depth, own, batch = tl.program_id(0) // ranks, tl.program_id(0) % ranks, tl.program_id(1).to(tl.int64)
    usable = tl.minimum(tl.load(settings + batch * 7 + 4).to(tl.int32), ranks)
    line = batch * drafted + depth
    k = tl.arange(0, rank_block)
    real = k < ranks
    known = tl.load(log_q + line * ranks + k, mask=k < usable, other=MINUS)
    known = tl.where(known > MINUS, known, MINUS)  # NaN counts as missing
    score = known
    if depth > 0:
        f = tl.arange(0, factor_block)
        column = f < rank
        row = tl.load(table + tl.load(candidates + (line - 1) * ranks + own))
        rows = tl.load(table + tl.load(candidates + line * ranks + k, mask=real, other=0), mask=real, other=0)
        z = tl.load(before + row * rank + f, mask=column, other=0.0).to(tl.float32)
        if gated:
            size = tl.num_programs(1).to(tl.int64) * drafted * rank
            z *= 1.0 + sum_parts(parts, line * rank + f, size, splits, column)
        others = tl.load(behind + rows[:, None] * rank + f[None, :], mask=real[:, None] & column[None, :], other=0.0)
        score = known + tl.sum(others.to(tl.float32) * z[None, :], 1)
        mass = tl.sum(tl.exp(known), 0)
        outside = log_of(1.0 - tl.minimum(mass, 1.0 - LEAST))
        outside += tl.sum(z * tl.load(rest + f, mask=column, other=0.0), 0)
        peak = tl.maximum(tl.max(score, 0), outside)  # never -inf: outside is a number
        norm = log_of(tl.sum(tl.exp(score - peak), 0) + tl.exp(outside - peak)) + peak
        score -= norm
        # Rounding may lift a near-certain token above probability 1. NaN stays: a comparison with it is false.
        score = tl.where(score > 0.0, 0.0, score)
        at = ((batch * (drafted - 1) + depth - 1) * ranks + own) * ranks
        tl.store(scores + at + k, score, mask=real)
        # Read back: a compiler may work sums out anew for each layout of the comparisons below, in another order, and
        # places of scores that differ by rounding are no permutation.
        tl.debug_barrier()
        score = tl.load(scores + at + k, mask=real, other=MINUS)
    score = tl.where(score > MINUS, score, MINUS)
    # A candidate's place is the number of those before it.
    mine = tl.where(real, order_of(score), 0)
    ahead = (mine[None, :] > mine[:, None]) | ((mine[None, :] == mine[:, None]) & (k[None, :] < k[:, None]))
    place = tl.sum((ahead & real[None, :]).to(tl.int32), 1)
    if depth == 0:
        place = k  # the order of log_q holds
    at = (line * ranks + own) * ranks + place
    wanted = real & ((depth > 0) | (own == 0))
    tl.store(edges + at, score, mask=wanted)
    tl.store(places + at, k.to(tl.uint8), mask=wanted)
