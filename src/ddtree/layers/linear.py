"""Matrix products with weights laid out once for the machine."""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree import kernels
from ddtree.errors import InvalidOption
from ddtree.kernels import Rounded
from ddtree.kernels.backend import usable
from ddtree.layers.norm import RMSNorm, add_norm, swiglu

# The layout is tuned for this many rows; any other number of rows uses it too. 16 is a tree of 15 nodes and its root.
_ROWS_HINT = 16


@lru_cache
def packs(device_type: str, dtype: torch.dtype) -> bool:
    """Whether oneDNN's blocked weight layout works here: up to twice the speed of F.linear on AVX-512 processors."""
    if device_type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    try:
        weight = torch.ones(32, 32, dtype=dtype)
        product = _packed_product(torch.ones(2, 32, dtype=dtype), _pack(weight), None)
    except (RuntimeError, AttributeError, NotImplementedError):  # this torch lacks the operators: info() says "plain"
        return False
    return bool((product == 32).all())


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
    return packed


def _packed_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


class Linear:
    """y = x W^T + b for x [M, in] -> [M, out] in the weight's dtype.

    `few` says that x are the rows of a round, whose bits must not depend on how many there are: on a GPU they go, in
    half precision, through ddtree.kernels' products. Without it, as in a prompt, through the vendor's.
    """

    def __init__(self, weight: Tensor | Rounded, bias: Tensor | None = None) -> None:
        """weight: [out, in]; bias: [out] or None. The weight is packed where the machine gains by it (see `packs`).

        A Rounded weight, in 8 bits, is for drafts: it goes through ddtree.kernels' products, however many rows there
        are. Raises InvalidOption for one where these cannot be used.
        """
        self.rounded = isinstance(weight, Rounded)
        matrix = weight.values if isinstance(weight, Rounded) else weight
        self.out_features, self.in_features = matrix.shape
        self.kernel = usable(matrix.device) and kernels.suits(matrix)
        if self.rounded and not self.kernel:
            raise InvalidOption(
                f"a drafter's weight {tuple(matrix.shape)} has no product in 8 bits on {matrix.device}: it takes a GPU"
                " and columns that are a multiple of 16; leave draft_dtype at auto",
                param="draft_dtype",
            )
        self.packed = not self.kernel and packs(matrix.device.type, matrix.dtype)
        self.weight: Any = _pack(matrix) if self.packed else weight
        self.bias = bias

    def __call__(self, x: Tensor, few: bool = False) -> Tensor:
        if self.rounded or (few and self.kernel):
            return kernels.product(x, self.weight, self.bias)
        if self.packed:
            return _packed_product(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    def rows(self, index: Tensor) -> Tensor:
        """Rows [n, in] of the weight by number, in its dtype: a copy. index: [n] int64. Not of a Rounded weight."""
        whole: Tensor = self.weight.to_dense() if self.packed else self.weight
        return whole[index.to(whole.device)]

    def add_norm(
        self, x: Tensor, states: Tensor, norm: RMSNorm, dtype: torch.dtype, kept: Tensor | None, few: bool = False
    ) -> Tensor:
        """Add this product of `states` to the residual stream x, in place, and give the stream's norm: `add_norm`."""
        if few and self.kernel:
            parts = kernels.product_parts(states, self.weight)  # [S, M, out]: the norm's kernel adds them up
            return kernels.add_norm(x, parts, norm.scale, norm.squares, dtype, kept, self.bias)
        return add_norm(x, self(states), norm, dtype, kept)


class FewRows:
    """A product that is only ever asked for the rows of a round: see Linear."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, in] -> [M, out]."""
        return self.linear(x, few=True)


class GatedLinear:
    """silu(gate(x)) * up(x) for x [M, in] -> [M, out]."""

    def __init__(self, gate: Tensor, up: Tensor, bias: Tensor | None = None, rounded: bool = False) -> None:
        """gate, up: [out, in]; bias: [2 * out], gate's, then up's, or None; rounded: keep the weights in 8 bits."""
        weight = torch.cat([gate, up])
        self.turns = usable(weight.device) and kernels.suits(weight)  # gate and up lie in turns
        if self.turns:
            weight = kernels.interleave_gate_up(weight)
            bias = None if bias is None else kernels.interleave_gate_up(bias)
        self.linear = Linear(Rounded.of(weight) if rounded else weight, bias)

    def __call__(self, x: Tensor, few: bool = False) -> Tensor:
        """See Linear."""
        if self.turns and (few or self.linear.rounded):
            return kernels.gated(x, self.linear.weight, self.linear.bias)
        return swiglu(self.linear(x), self.turns)
