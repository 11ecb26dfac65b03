# ruff: noqa: N803 - compile-time parameters are in capitals
# mypy: ignore-errors
"""The answer of a row from the states of its keys, for `attention_jit`."""

import triton
import triton.language as tl

from ddtree.kernels.attention_fold_jit import fold_tail
from ddtree.kernels.attention_places_jit import chunk_of, join, tail_begin
from ddtree.kernels.common_jit import follow


@triton.jit
def _state(peak_in, total_in, acc_in, at, ok, HD: tl.constexpr, HDP: tl.constexpr):
    """States at `at`, of any shape; empty where not ok."""
    d = tl.arange(0, HDP)
    peak = tl.load(peak_in + at, mask=ok, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(total_in + at, mask=ok, other=0.0, cache_modifier=".cg")
    where = tl.expand_dims(at, -1) * HD + d
    acc = tl.load(acc_in + where, mask=tl.expand_dims(ok, -1) & (d < HD), other=0.0, cache_modifier=".cg")
    return peak, total, acc


@triton.jit
def merge_states(
    peak_in, total_in, acc_in, i, b, head, start, position, n, chunks,
    G: tl.constexpr, GP: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr, KEYS: tl.constexpr,
    DEEPEST: tl.constexpr, FIRST: tl.constexpr, WINDOW: tl.constexpr, INSIDE: tl.constexpr, MERGE: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    """The state of what row i sees in chunks: every two chunks joined, then MERGE pairs at once, in order.

    UNITS: 2: the programs have joined the pairs.
    """
    first_key = 0
    if WINDOW:
        first_key = tl.maximum(position - WINDOW + 1, 0)
    behind = start + n  # the keys in chunks
    if INSIDE == 0:
        behind = tail_begin(position, KEYS, DEEPEST)
    chunk_0 = tl.where(first_key < behind, chunk_of(first_key, FIRST), 0)
    chunk_1 = tl.where(first_key < behind, chunk_of(tl.maximum(behind - 1, 0), FIRST), -1)
    g, c = tl.arange(0, GP), tl.arange(0, MERGE)
    slots = (chunks + UNITS - 1) // UNITS + 1
    line = (b.to(tl.int64) * KV + head) * slots
    peak = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, HDP], tl.float32)
    for first in tl.range(chunk_0 // (2 * MERGE) * MERGE, (chunk_1 + 2) // 2, MERGE, num_stages=1):
        chunk = 2 * (first + c)
        if UNITS == 2:
            ok = ((chunk + 1 >= chunk_0) & (chunk <= chunk_1))[:, None] & (g < G)[None, :]
            at = (line + first + c)[:, None] * (n * G) + i * G + g[None, :]
            part_m, part_l, part = _state(peak_in, total_in, acc_in, at, ok, HD, HDP)
        else:
            ok = ((chunk >= chunk_0) & (chunk <= chunk_1))[:, None] & (g < G)[None, :]
            at = (line + chunk)[:, None] * (n * G) + i * G + g[None, :]
            part_m, part_l, part = _state(peak_in, total_in, acc_in, at, ok, HD, HDP)
            ok = ((chunk + 1 >= chunk_0) & (chunk + 1 <= chunk_1))[:, None] & (g < G)[None, :]
            next_m, next_l, next_part = _state(peak_in, total_in, acc_in, at + n * G, ok, HD, HDP)
            part_m, part_l, part = join(part_m, part_l, part, next_m, next_l, next_part)
        new = tl.maximum(peak, tl.max(part_m, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        weight = tl.exp2(part_m - safe[None, :])
        alpha = tl.exp2(peak - safe)
        total = tl.fma(total, alpha, tl.sum(weight * part_l, 0))
        acc = tl.fma(acc, tl.broadcast_to(alpha[:, None], [GP, HDP]), tl.sum(weight[:, :, None] * part, 0))
        peak = new
    return peak, total, acc


@triton.jit
def answer(
    peak, total, acc, tail_peak, tail_total, tail_acc, out, i, b, head, n,
    G: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr, GP: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """Write the answer of row i: its chunks' state, joined by its tail's (INSIDE 0)."""
    g, d = tl.arange(0, GP), tl.arange(0, HDP)
    if INSIDE == 0:
        peak, total, acc = join(peak, total, acc, tail_peak, tail_total, tail_acc)
    at = (b.to(tl.int64) * n + i) * (KV * G) + head * G + g
    whole = tl.where(total == 0.0, 1.0, total)  # the lanes that fill up the group
    result = (acc / whole[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * HD + d[None, :], result, mask=(g < G)[:, None] & (d < HD)[None, :])


@triton.jit
def kept_tail(
    peak_in, total_in, acc_in, i, b, head, n, chunks,
    G: tl.constexpr, GP: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """The state of row i's tail, which lies behind those of all chunks."""
    slots = (chunks + UNITS - 1) // UNITS + 1
    g = tl.arange(0, GP)
    at = ((b.to(tl.int64) * KV + head) * slots + slots - 1) * (n * G) + i * G + g
    return _state(peak_in, total_in, acc_in, at, g < G, HD, HDP)


@triton.jit(do_not_specialize=["n", "length", "chunks", "depths_b"])
def merge_kernel(
    query, cache, slots, starts, depths, paths, peak_in, total_in, acc_in, out, n, length, chunks, depths_b,
    SCALE: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr,
    KEYS: tl.constexpr, TAIL_ROWS: tl.constexpr, DEEPEST: tl.constexpr, FIRST: tl.constexpr, WINDOW: tl.constexpr,
    INSIDE: tl.constexpr, MERGE: tl.constexpr, UNITS: tl.constexpr, TAILS: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """The answer of one row and key head. TAILS: the tails' states are kept; else the row's is made here."""
    follow(overlap)
    i, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + b).to(tl.int32)
    position = start + i
    if INSIDE < 2:
        position = start + tl.load(depths + b * depths_b + i).to(tl.int32)
    peak, total, acc = merge_states(
        peak_in, total_in, acc_in, i, b, head, start, position, n, chunks,
        G, GP, KV, HD, HDP, KEYS, DEEPEST, FIRST, WINDOW, INSIDE, MERGE, UNITS,
    )  # fmt: skip
    tail_peak, tail_total, tail_acc = peak, total, acc
    if INSIDE == 0:
        if TAILS:
            tail_peak, tail_total, tail_acc = kept_tail(
                peak_in, total_in, acc_in, i, b, head, n, chunks, G, GP, KV, HD, HDP, UNITS
            )
        else:
            keys = cache + (tl.load(slots + b) * (2 * KV) + head) * length * HD
            values = keys + tl.cast(length, tl.int64) * (KV * HD)
            lone_peak, lone_total, lone_acc = fold_tail(
                query, keys, values, paths, i, b, head, start, position, n,
                SCALE, G, GP, KV, HD, HDP, TAIL_ROWS, KEYS, DEEPEST, WINDOW,
            )  # fmt: skip
            tail_peak = tl.max(tl.reshape(lone_peak, [GP, TAIL_ROWS // GP]), 1)  # of equal numbers
            tail_total = tl.max(tl.reshape(lone_total, [GP, TAIL_ROWS // GP]), 1)
            tail_acc = tl.max(tl.reshape(lone_acc, [GP, TAIL_ROWS // GP, HDP]), 1)
    answer(peak, total, acc, tail_peak, tail_total, tail_acc, out, i, b, head, n, G, KV, HD, HDP, GP, INSIDE)
