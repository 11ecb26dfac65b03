# ruff: noqa: N803 - compile-time parameters are in capitals
# mypy: ignore-errors
"""Triton kernel of `ddtree.kernels.qkv`. Import it only where triton is there."""

import triton
import triton.language as tl

from ddtree.kernels.common_jit import follow


@triton.jit(do_not_specialize=["n", "length", "depths_b"])
def heads_kernel(
    heads, turns, slots, starts, depths, query_scale, key_scale, cache, out, n, length, depths_b, floor,
    QUERIES: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr, HEADS: tl.constexpr,
    NORM_QUERY: tl.constexpr, NORM_KEY: tl.constexpr, BLOCK: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one row: norm, rotary turn, and out to the queries or into the cache.

    floor: head size times epsilon; BLOCK: the row's depth is its place, else it is read from depths.
    """
    follow(overlap)
    i, b = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + b)
    position = start + i
    if not BLOCK:
        position = start + tl.load(depths + b * depths_b + i)
    slot = tl.zeros([], tl.int64)
    if KV > 0:
        slot = tl.load(slots + b)
    head, d, pair = tl.program_id(0) * HEADS + tl.arange(0, HEADS), tl.arange(0, HDP), tl.arange(0, HDP // 2)
    row = b.to(tl.int64) * n + i
    ok = (head < QUERIES + 2 * KV)[:, None] & (d < HD)[None, :]
    x = tl.load(heads + (row * (QUERIES + 2 * KV) + head[:, None]) * HD + d[None, :], mask=ok, other=0.0)
    x = x.to(tl.float32)
    turn = turns + position * HD + pair * 2
    cos = tl.load(turn, mask=pair < HD // 2, other=0.0)[None, :]
    sin = tl.load(turn + 1, mask=pair < HD // 2, other=0.0)[None, :]
    is_query, is_value = head < QUERIES, head >= QUERIES + KV
    if NORM_QUERY or NORM_KEY:
        length_2 = tl.sum(x * x, 1)
        normed = tl.div_rn(x, tl.broadcast_to(tl.sqrt_rn(length_2 + floor)[:, None], [HEADS, HDP]))
        if NORM_QUERY:
            scale = tl.load(query_scale + d, mask=d < HD, other=0.0)
            x = tl.where(is_query[:, None], normed * scale[None, :], x)
        if NORM_KEY:
            scale = tl.load(key_scale + d, mask=d < HD, other=0.0)
            x = tl.where(is_query[:, None] | is_value[:, None], x, normed * scale[None, :])
    even, odd = tl.split(tl.reshape(x, [HEADS, HDP // 2, 2]))
    turned = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [HEADS, HDP])
    x = tl.where(is_value[:, None], x, turned)
    if QUERIES > 0:
        at = out + (row * QUERIES + head[:, None]) * HD + d[None, :]
        tl.store(at, x.to(out.dtype.element_ty), mask=is_query[:, None] & ok)
    if KV > 0:
        line = slot * (2 * KV) + head - QUERIES
        at = cache + (line[:, None] * length + start + i) * HD + d[None, :]
        tl.store(at, x.to(cache.dtype.element_ty), mask=(head >= QUERIES)[:, None] & ok)
