"""What follows the projection of queries, keys and values, in one launch: norm of heads, rotary turn, cache write.

The GPU's twin of RMSNorm over heads, Rope.apply_ and KVCache.write of `ddtree.layers`, computed in float32 as they are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.kernels.attention import AttentionRows
from ddtree.kernels.backend import jit, overlap, power_of_two

_HEADS = 8  # heads of a program


@dataclass(frozen=True)
class HeadNorms:
    """Root mean square norms of single heads, as Qwen3 and DFlash drafters have them."""

    query: Tensor | None  # [hd] float32: RMSNorm.scale = weight * sqrt(hd), in the order of interleaved pairs; or none
    key: Tensor | None
    eps: float


def write_heads(
    heads: Tensor,
    cache: Tensor | None,
    rows: AttentionRows,
    turns: Tensor,
    norms: HeadNorms | None = None,
    out: Tensor | None = None,
) -> Tensor | None:
    """Finish a projection of B * N rows: queries out, keys and values into the cache at (slot, start + row).

    Args:
        heads: [B * N, (queries + 2 * kv_heads) * hd], dense, as the projection gives them: interleaved rotary pairs.
        cache: [S, 2 * kv_heads, T, hd], one layer of KVCache.data, dense; None where all heads are queries. The number
            of query heads is what the cache's heads leave; it may be 0.
        rows: a row is turned by its position, start + depth (a block's: start + row). Rows that stand for nothing are
            written as well, to places behind the committed ones; start + N must not pass T.
        turns: [positions, 1, hd / 2] complex64, what Rope.turns gives for all positions from 0.
        out: [B, N, queries, hd], written and returned; None allocates it.
    Returns: the queries in the dtype of `heads`, or None where there are none.
    Raises ValueError for shapes that do not fit.
    """
    batch, dim = len(rows.slot), 2 * turns.shape[-1]
    kv = 0 if cache is None else cache.shape[1] // 2
    n, queries = heads.shape[0] // batch, heads.shape[1] // dim - 2 * kv
    if heads.shape != (batch * n, (queries + 2 * kv) * dim) or queries < 0 or not heads.is_contiguous():
        raise ValueError(f"heads {tuple(heads.shape)} are not dense rows of {batch} sequences and heads of {dim}")
    if cache is not None and (cache.shape[3] != dim or not cache.is_contiguous()):
        raise ValueError(f"the cache {tuple(cache.shape)} must be dense, with heads of {dim}")
    if not turns.is_contiguous() or turns.dtype != torch.complex64:
        raise ValueError("turns must be dense complex64")
    if queries and out is None:
        out = torch.empty(batch, n, queries, dim, dtype=heads.dtype, device=heads.device)
    norms = norms or HeadNorms(None, None, 0.0)
    table = torch.view_as_real(turns)
    depths = rows.depths if rows.depths is not None else rows.start.unsqueeze(1)
    jit("qkv").heads_kernel[(-(-(queries + 2 * kv) // _HEADS), n, batch)](
        heads, table, rows.slot, rows.start, depths,
        table if norms.query is None else norms.query, table if norms.key is None else norms.key,
        heads if cache is None else cache, heads if out is None else out,
        n, 0 if cache is None else cache.shape[2], depths.stride(0), dim * norms.eps,
        QUERIES=queries, KV=kv, HD=dim, HDP=power_of_two(dim), HEADS=_HEADS,
        NORM_QUERY=norms.query is not None, NORM_KEY=norms.key is not None, BLOCK=rows.depths is None,
        enable_fp_fusion=False, **overlap(heads.device),
    )  # fmt: skip
    return out if queries else None
