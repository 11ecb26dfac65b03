"""The element-wise parts of a layer, one launch each: residual addition with norm, and the gated unit."""

import torch
from torch import Tensor

from ddtree.kernels.backend import jit, overlap, power_of_two

_MOST = 16384  # columns that one program holds


def add_norm(
    x: Tensor,
    delta: Tensor | None,
    scale: Tensor,
    floor: float,
    dtype: torch.dtype,
    kept: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Add `delta` to the residual stream `x`, in place, and give its root mean square norm. Equals layers.add_norm.

    Args:
        x: [M, H] float32, dense; of any float dtype where there is no delta.
        delta: [M, H] of any float dtype, dense; or the parts of one, [S, M, H], see matmul.product_parts.
        scale: [H] float32, RMSNorm.scale = weight * sqrt(H); floor: H * eps.
        kept: [M, H] of any float dtype, dense in the last dimension: the stream after the addition is written there.
        bias: [H] of any float dtype, added along with delta.
    Returns: [M, H] in `dtype`.
    Raises ValueError for shapes or strides that do not fit.
    """
    rows, columns = x.shape
    if columns > _MOST or not x.is_contiguous():
        raise ValueError(f"the stream {tuple(x.shape)} must be dense, with at most {_MOST} columns")
    if delta is not None and (delta.shape[-2:] != x.shape or not delta.is_contiguous()):
        raise ValueError(f"what is added {tuple(delta.shape)} must be dense and fit the stream {tuple(x.shape)}")
    if kept is not None and (kept.shape != x.shape or kept.stride(1) != 1):
        raise ValueError(f"what is kept must have the stream's shape {tuple(x.shape)}, and dense rows")
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    block = power_of_two(columns)
    jit("norm").add_norm_kernel[(rows,)](
        x, x if delta is None else delta, scale if bias is None else bias, scale, out, out if kept is None else kept,
        rows, columns, len(delta) if delta is not None and delta.ndim == 3 else 1, floor,
        0 if kept is None else kept.stride(0), block=block, adds=delta is not None, biased=bias is not None,
        keeps=kept is not None, num_warps=max(1, min(16, block // 256)), **overlap(x.device),
    )  # fmt: skip
    return out


def swiglu(gate_up: Tensor, turns: bool = False) -> Tensor:
    """silu(gate) * up, rounded as torch rounds it. Equals layers.swiglu.

    gate_up: [M, 2 * I], dense: gate, then up; or, where `turns`, one of each in turns. Returns: [M, I].
    """
    rows, columns = gate_up.shape
    if not gate_up.is_contiguous():
        raise ValueError("gate and up must be dense")
    out = torch.empty(rows, columns // 2, dtype=gate_up.dtype, device=gate_up.device)
    block = 1024
    grid = (-(-columns // 2 // block), rows)
    jit("norm").swiglu_kernel[grid](
        gate_up, out, columns // 2, block=block, turns=turns, num_warps=4, **overlap(gate_up.device)
    )
    return out
