# ruff: noqa: N803 - compile-time parameters are in capitals
# mypy: ignore-errors
"""Where tails and chunks of `attention_jit` begin, and the answer of a row from the states of its keys."""

import triton
import triton.language as tl

from ddtree.kernels.common_jit import follow


@triton.jit
def floor_to(value, step: tl.constexpr):
    """The largest multiple of step that is not above value, and not below 0."""
    return tl.maximum(value, 0) // step * step


@triton.jit
def tail_begin(position, KEYS: tl.constexpr, DEEPEST: tl.constexpr):
    """Where a row's tail begins: on a tile's edge, and not after its root, which is less than DEEPEST before it."""
    return floor_to(position - (DEEPEST - 1), KEYS)


@triton.jit
def chunk_of(position, FIRST: tl.constexpr):
    """The chunk that holds a position: see chunk_bounds in ddtree.kernels.attention."""
    doubling = (tl.maximum(position // (16 * FIRST), 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    far = 16 + 8 * doubling + ((position // (2 * FIRST) >> doubling) - 8)
    return tl.where(position < 16 * FIRST, position // FIRST, far)


@triton.jit
def edge_of(chunk, FIRST: tl.constexpr):
    """Where a chunk begins."""
    behind = tl.maximum(chunk - 16, 0)
    far = ((behind % 8 + 8) * (2 * FIRST)) << (behind // 8)
    return tl.where(chunk < 16, chunk * FIRST, far)


@triton.jit
def merge_states(
    peak_in, total_in, acc_in, out, i, b, head, start, depth, n, chunks,
    G: tl.constexpr, GP: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr, KEYS: tl.constexpr,
    DEEPEST: tl.constexpr, FIRST: tl.constexpr, WINDOW: tl.constexpr, INSIDE: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """The answer of row i from its states: the chunks' in order, then the tail's, MERGE at once."""
    position = start + depth
    first_key = 0
    if WINDOW:
        first_key = tl.maximum(position - WINDOW + 1, 0)
    behind = start + n  # the keys in chunks
    if INSIDE == 0:
        behind = tail_begin(position, KEYS, DEEPEST)
    chunk_0 = tl.where(first_key < behind, chunk_of(first_key, FIRST), 0)
    chunk_1 = tl.where(first_key < behind, chunk_of(tl.maximum(behind - 1, 0), FIRST), -1)
    last = chunk_1
    if INSIDE == 0:
        last = chunk_1 + 1  # the tail's state lies behind those of all chunks
    g, d, c = tl.arange(0, GP), tl.arange(0, HDP), tl.arange(0, MERGE)
    line = (b.to(tl.int64) * KV + head) * (chunks + 1)
    peak = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, HDP], tl.float32)
    for first in tl.range(chunk_0 // MERGE * MERGE, last + 1, MERGE, num_stages=1):
        chunk = first + c
        ok = ((chunk >= chunk_0) & (chunk <= last))[:, None] & (g < G)[None, :]
        at = (line + tl.where(chunk > chunk_1, chunks, chunk))[:, None] * (n * G) + i * G + g[None, :]
        part = tl.load(
            acc_in + at[:, :, None] * HD + d[None, None, :], mask=ok[:, :, None] & (d < HD), other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        part_m = tl.load(peak_in + at, mask=ok, other=float("-inf"), cache_modifier=".cg")
        part_l = tl.load(total_in + at, mask=ok, other=0.0, cache_modifier=".cg")
        new = tl.maximum(peak, tl.max(part_m, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        weight = tl.exp2(part_m - safe[None, :])
        alpha = tl.exp2(peak - safe)
        total = tl.fma(total, alpha, tl.sum(weight * part_l, 0))
        acc = tl.fma(acc, tl.broadcast_to(alpha[:, None], [GP, HDP]), tl.sum(weight[:, :, None] * part, 0))
        peak = new
    at = (b.to(tl.int64) * n + i) * (KV * G) + head * G + g
    whole = tl.where(total == 0.0, 1.0, total)  # the lanes that fill up the group
    answer = (acc / whole[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * HD + d[None, :], answer, mask=(g < G)[:, None] & (d < HD)[None, :])


@triton.jit(do_not_specialize=["n", "chunks", "depths_b"])
def merge_kernel(
    starts, depths, peak_in, total_in, acc_in, out, n, chunks, depths_b,
    G: tl.constexpr, GP: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr, KEYS: tl.constexpr,
    DEEPEST: tl.constexpr, FIRST: tl.constexpr, WINDOW: tl.constexpr, INSIDE: tl.constexpr, MERGE: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """The answer of one row and key head."""
    follow(overlap)
    i, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + b).to(tl.int32)
    depth = i
    if INSIDE < 2:
        depth = tl.load(depths + b * depths_b + i).to(tl.int32)
    merge_states(
        peak_in, total_in, acc_in, out, i, b, head, start, depth, n, chunks,
        G, GP, KV, HD, HDP, KEYS, DEEPEST, FIRST, WINDOW, INSIDE, MERGE,
    )  # fmt: skip
