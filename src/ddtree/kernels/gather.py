"""Rows of a matrix by number: the embedding of tokens, and the features of an accepted path."""

import torch
from torch import Tensor

from ddtree.kernels.backend import jit, overlap

_BLOCK = 1024  # columns of a program


def embed(ids: Tensor, table: Tensor) -> Tensor:
    """Rows of `table` [V, H], any float dtype, by ids [...] int64 -> [..., H] float32, exact.

    Equals torch.nn.functional.embedding, widened. Ids must be in range.
    Raises ValueError for a table that is not dense.
    """
    if not table.is_contiguous() or ids.dtype != torch.int64:
        raise ValueError("the table must be dense, and ids int64")
    columns = table.shape[1]
    ids = ids.contiguous()
    out = torch.empty(*ids.shape, columns, dtype=torch.float32, device=ids.device)
    jit("gather").rows_kernel[(-(-columns // _BLOCK), max(ids.numel(), 1))](
        ids, table, out, columns, ids.numel(), 0, 0, 0, block=_BLOCK, num_warps=4, **overlap(ids.device)
    )
    return out


def take(rows: Tensor, path: Tensor) -> Tensor:
    """rows [B, N, F], any dtype, dense, by path [B, M] int64 (columns dense; below 0: row 0) -> [B, M, F]."""
    if not rows.is_contiguous() or path.stride(1) != 1:
        raise ValueError("rows and path must be dense")
    batch, n, columns = rows.shape
    m = path.shape[1]
    out = torch.empty(batch, m, columns, dtype=rows.dtype, device=rows.device)
    jit("gather").rows_kernel[(-(-columns // _BLOCK), m * batch)](
        path, rows, out, columns, m, path.stride(0), n, 1, block=_BLOCK, num_warps=4, **overlap(rows.device)
    )
    return out
