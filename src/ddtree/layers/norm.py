"""Root mean square normalisation."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree import kernels
from ddtree.kernels.backend import usable


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32.

    Written as x / hypot(|x|, sqrt(H eps)) * (weight sqrt(H)): four operators where torch's own takes nine on a CPU.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        """weight: [H], any float dtype; it is kept in float32."""
        size = weight.shape[-1]
        self.squares = size * eps  # what is added to the sum of squares
        self.scale = weight.float() * math.sqrt(size)
        self.floor = torch.tensor(math.sqrt(size * eps), dtype=torch.float32, device=weight.device)

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x: [..., H] float32 -> [..., H] in `dtype`."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        return torch.mul(x / torch.hypot(length, self.floor), self.scale, out=out)


def add_norm(x: Tensor, delta: Tensor | None, norm: RMSNorm, dtype: torch.dtype, kept: Tensor | None = None) -> Tensor:
    """Add `delta` to the residual stream, in place, and give its norm: the seam between two halves of a layer.

    Args:
        x: [M, H] float32; delta: [M, H] of any float dtype, or None.
        kept: [M, H] of any float dtype: the stream after the addition is copied there.
    Returns: [M, H] in `dtype`.
    """
    if usable(x.device):
        return kernels.add_norm(x, delta, norm.scale, norm.squares, dtype, kept)
    if delta is not None:
        x += delta
    if kept is not None:
        kept.copy_(x)
    return norm(x, dtype)


def swiglu(gate_up: Tensor, turns: bool = False) -> Tensor:
    """silu(gate) * up -> [M, I]. gate_up: [M, 2 * I], gate, then up; on a GPU also one of each in turns."""
    if usable(gate_up.device):
        return kernels.swiglu(gate_up, turns)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
