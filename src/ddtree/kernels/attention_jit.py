# ruff: noqa: N803 - compile-time parameters are in capitals
# mypy: ignore-errors
"""Triton kernels of `ddtree.kernels.attention`. Import it only where triton is there.

A state (peak, total, acc) stands for some keys. In the row-invariant form (INSIDE 0) a row at position p has one for
its tail, the keys from `tail_begin(p)` on, gathered in the order of its path, and one for what each chunk holds before
that: chunks are at fixed absolute positions, and all their keys are committed whatever the row's depth. So which states
a row has, and how each is made, depends on its position alone.
States are joined in a fixed order: each two chunks, then MERGE pairs at once, then the tail. Who joins is free: with
few rows every chunk has a program, so that there are enough of them; with many rows a program takes two chunks and
joins them itself (UNITS 2), which halves what is written and read, and the merge makes the tails (TAILS 0).
What adds up in an order that a layout of threads could change happens in tiles of one shape whose rows are whole within
a warp, or under one number of warps; the rest goes element by element.
Numbers that differ between rounds are never specialised: one binary serves every batch and every number of rows.
Multiplications and additions are not fused by the compiler (`enable_fp_fusion=False` at launch): it would choose place
by place.
"""

import triton
import triton.language as tl

from ddtree.kernels.attention_fold_jit import fold_run, fold_tail, store_state
from ddtree.kernels.attention_merge_jit import answer, kept_tail, merge_kernel, merge_states
from ddtree.kernels.attention_places_jit import chunk_of, edge_of, floor_to, tail_begin
from ddtree.kernels.common_jit import announce, await_forerunner, follow

__all__ = ["attend_kernel", "merge_kernel", "paths_kernel"]

_ROUND = ["n", "length", "chunks", "blocks", "spaces", "depths_b", "ancestors_b", "ancestors_n"]


@triton.jit(do_not_specialize=["n", "depths_b", "ancestors_b", "ancestors_n"])
def paths_kernel(
    ancestors, depths, paths, n, depths_b, ancestors_b, ancestors_n, NP: tl.constexpr, overlap: tl.constexpr
):
    """paths[b, i, d] = the row at depth d on the path of row i. One program per row and sequence."""
    follow(overlap)
    i, b = tl.program_id(0), tl.program_id(1)
    j = tl.arange(0, NP)
    word = tl.load(ancestors + b * ancestors_b + i * ancestors_n + j // 64, mask=j < n, other=0)
    on = (((word >> (j % 64)) & 1) != 0) & (j < n)
    depth = tl.load(depths + b * depths_b + j, mask=on, other=0)
    tl.store(paths + (b * n + i) * n + depth, j, mask=on & (depth < n))


@triton.jit
def _prefetch(base, begin, count, HD: tl.constexpr):
    """Ask for `count` keys or values of a head, dense in memory, to be brought into the L2 cache. Not before Hopper."""
    piece = count * HD // 128  # of every thread; whole tiles make multiples of 16 bytes
    size = tl.zeros([128], tl.int32) + piece * (base.dtype.element_ty.primitive_bitwidth // 8)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [base + begin * HD + tl.arange(0, 128) * piece, size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _ask_for_keys(
    cache, slots, starts, spaces, b, head, place, n, length, chunks, blocks,
    KV: tl.constexpr, HD: tl.constexpr, KEYS: tl.constexpr, DEEPEST: tl.constexpr, FIRST: tl.constexpr,
    WINDOW: tl.constexpr, INSIDE: tl.constexpr, UNITS: tl.constexpr, TAILS: tl.constexpr, ASK: tl.constexpr,
):  # fmt: skip
    """Fetch the first ASK committed keys and values of a program of attend_kernel before the launch before it is done,
    and those of the tails: no more, since what waits too long in the cache is gone when it is read.

    Places and lengths may be out of date: they are kept within the cache, and nothing depends on what is fetched.
    """
    start = tl.load(starts + b, cache_modifier=".cg").to(tl.int32)
    start = tl.minimum(tl.maximum(start, 0), length) // KEYS * KEYS
    slot = tl.minimum(tl.maximum(tl.load(slots + b, cache_modifier=".cg"), 0), spaces - 1)
    keys = cache + (slot * (2 * KV) + head) * length * HD
    values = keys + tl.cast(length, tl.int64) * (KV * HD)
    tails = 0
    if TAILS:
        tails = n
    which = tl.maximum(place - tails, 0)
    chunk = (chunks + UNITS - 1) // UNITS * UNITS - UNITS - which // blocks * UNITS
    begin, end = edge_of(chunk, FIRST), tl.minimum(edge_of(chunk + UNITS, FIRST), start)
    if WINDOW:
        begin = tl.maximum(begin, floor_to(start - WINDOW + 1, KEYS))
    count = tl.minimum(end - begin, ASK)
    if (place >= tails) & (which % blocks == 0) & (count > 0):
        _prefetch(keys, begin, count, HD)
        _prefetch(values, begin, count, HD)
    if INSIDE == 0:
        begin = tail_begin(start, KEYS, DEEPEST)
        if (place == 0) & (begin < start):
            _prefetch(keys, begin, start - begin, HD)
            _prefetch(values, begin, start - begin, HD)


@triton.jit(do_not_specialize=_ROUND)
def attend_kernel(
    query, cache, slots, starts, depths, ancestors, paths, peak_io, total_io, acc_io, arrived, out,
    n, length, chunks, blocks, spaces, depths_b, ancestors_b, ancestors_n,
    SCALE: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL_ROWS: tl.constexpr, DEEPEST: tl.constexpr, FIRST: tl.constexpr,
    WINDOW: tl.constexpr, INSIDE: tl.constexpr, MERGE: tl.constexpr, WHOLE: tl.constexpr,
    UNITS: tl.constexpr, TAILS: tl.constexpr, ASK: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """One state: of a row's tail (TAILS), or of UNITS chunks for ROWS packed query rows (row * G + head of the group).

    WHOLE: all rows are in one block, and the program that is the last of its sequence and key head merges their states.
    """
    line = tl.program_id(1)
    b, head, place = line // KV, line % KV, tl.program_id(0)
    announce(overlap)
    if overlap > 0:
        _ask_for_keys(
            cache, slots, starts, spaces, b, head, place, n, length, chunks, blocks,
            KV, HD, KEYS, DEEPEST, FIRST, WINDOW, INSIDE, UNITS, TAILS, ASK,
        )  # fmt: skip
    await_forerunner(overlap)
    tails = 0
    if TAILS:
        tails = n
    start = tl.load(starts + b).to(tl.int32)
    slot = tl.load(slots + b)
    keys = cache + (slot * (2 * KV) + head) * length * HD
    values = keys + tl.cast(length, tl.int64) * (KV * HD)
    which = tl.maximum(place - tails, 0)
    runs = (chunks + UNITS - 1) // UNITS
    run, block = runs - 1 - which // blocks, which % blocks  # the largest chunks first
    r = block * ROWS + tl.arange(0, ROWS)
    row = r // G
    depth = row
    if INSIDE < 2:
        depth = tl.load(depths + b * depths_b + row, mask=row < n, other=0).to(tl.int32)
    position = start + depth
    tail, last, committed = position, start + n, start // KEYS * KEYS
    if INSIDE == 0:
        tail = tail_begin(position, KEYS, DEEPEST)
        last = tl.max(tail, 0)
        committed = tail_begin(start, KEYS, DEEPEST)
    left = 0
    if WINDOW:
        left = floor_to(start - WINDOW + 1, KEYS)  # no row stands before start
    chunk = run * UNITS
    begin, end = tl.maximum(edge_of(chunk, FIRST), left), tl.minimum(edge_of(chunk + UNITS, FIRST), last)
    states = line.to(tl.int64) * (runs + 1)
    if TAILS:  # noqa: SIM102 - compile-time: without tails, none of this is compiled
        if place < tails:
            g = tl.arange(0, TAIL_ROWS)
            own = start + tl.load(depths + b * depths_b + place).to(tl.int32)
            peak, total, acc = fold_tail(
                query, keys, values, paths, place, b, head, start, own, n,
                SCALE, G, GP, KV, HD, HDP, TAIL_ROWS, KEYS, DEEPEST, WINDOW,
            )  # fmt: skip
            copies: tl.constexpr = TAIL_ROWS // GP
            at = (states + runs) * (n * G) + place * G + g // copies
            ok = (g % copies == 0) & (g // copies < G)
            store_state(peak_io, total_io, acc_io, at, ok, peak, total, acc, HD, HDP)
    if (place >= tails) & (begin < end):
        peak, total, acc = fold_run(
            query, keys, values, depths, ancestors, chunk, left, committed, last,
            row, r, b, head, start, position, tail, n, depths_b, ancestors_b, ancestors_n,
            SCALE, G, KV, HD, HDP, FIRST, ROWS, KEYS, WINDOW, INSIDE, UNITS,
        )  # fmt: skip
        store_state(peak_io, total_io, acc_io, (states + run) * (n * G) + r, row < n, peak, total, acc, HD, HDP)
    if WHOLE and ((place < tails) | (begin < end)):
        full = 0
        if left < last:
            full = chunk_of(last - 1, FIRST) // UNITS - chunk_of(left, FIRST) // UNITS + 1
        tl.debug_barrier()  # this program's state is written before it is announced
        before = tl.atomic_add(arrived + line, 1, sem="acq_rel")
        if before == tails + full - 1:
            tl.store(arrived + line, 0)  # for the next launch
            for i in range(n):
                own = start + i
                if INSIDE < 2:
                    own = start + tl.load(depths + b * depths_b + i).to(tl.int32)
                peak, total, acc = merge_states(
                    peak_io, total_io, acc_io, i, b, head, start, own, n, chunks,
                    G, GP, KV, HD, HDP, KEYS, DEEPEST, FIRST, WINDOW, INSIDE, MERGE, UNITS,
                )  # fmt: skip
                tail_peak, tail_total, tail_acc = peak, total, acc
                if INSIDE == 0:
                    tail_peak, tail_total, tail_acc = kept_tail(
                        peak_io, total_io, acc_io, i, b, head, n, chunks, G, GP, KV, HD, HDP, UNITS
                    )
                answer(
                    peak, total, acc, tail_peak, tail_total, tail_acc, out, i, b, head, n, G, KV, HD, HDP, GP, INSIDE
                )
