"""Products with weights for a few rows, at the speed at which the weights can be read.

A row's bits depend on that row and the weights alone: not on the number of rows, its place or its neighbours. For this
the inner dimension is cut at places that the weights' shape fixes, and parts are added in their order; the instructions
are the tensor cores' own, of one kind for every number of rows, with the weights on the side of 64.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ddtree.kernels.backend import jit, overlap, power_of_two

GRAIN = 256  # cuts of the inner dimension are multiples of it, and of every tile's depth
MOST_ROWS = 128  # of one program; more rows take more programs
_TARGET = 256  # programs of 64 columns that keep a large card busy
_MOST_SPLITS = 8
_PIECE = 8192  # rows of a weight that are rounded at once
_CARD, _FEW = 132, 64  # programs that fill a card, and half of one
_ENOUGH = 96  # programs of 64 columns that need no parts where somebody must wait for the last one,
_SHORT = 1024  # nor does so short a sum
_OVERLAPPING = 32  # programs of more rows take so much of a card that those launched early are in the way (docs/log.md)
_AHEAD = 256  # weights of each row that an overlapped launch brings into the L2 cache before its wait,
_SMALL = 4 << 20  # of matrices below so many bytes: of larger ones it costs more than it brings


@dataclass(frozen=True)
class ProductTiles:
    """Shape of a program; it changes the time alone. benchmarks/kernels_matmul.py compares some."""

    columns: int = 64  # rows of the weight
    depth: int = 128
    stages: int = 5
    warps: int = 4
    rows: int = 0  # of x; 0: as many as there are, see rows_of


def pick_splits(columns: int, inner: int, parts: bool) -> int:
    """In how many parts the inner dimension is summed up: a matter of the weight's shape and use alone.

    parts: the parts are the result, so that nobody waits for the last one.
    """
    across = -(-columns // 64)
    if not parts and (across >= _ENOUGH or inner <= _SHORT):
        return 1
    splits = power_of_two(-(-_TARGET // across))
    if splits * across > _TARGET * 3 // 2:
        splits //= 2
    return max(1, min(splits, _MOST_SPLITS, -(-inner // GRAIN)))


def rows_of(rows: int) -> int:
    """Rows of a program that takes as many as it can."""
    return max(16, min(MOST_ROWS, power_of_two(rows)))


@lru_cache
def pick_tiles(rows: int, columns: int, splits: int, large: bool) -> ProductTiles:
    """The best of those measured on an H200 (docs/log.md). large: shared memory of a block is at least 200 KiB.

    Few programs leave most of a card idle: then they share the rows, though each reads the weights for itself.
    """
    height = rows_of(rows)
    programs = splits * -(-columns // 64)
    if height == 16:
        return ProductTiles(64, 128, 5 if large else 4, 4, 16)
    if height == 32 or programs <= _FEW or (height == 64 and programs <= _CARD):
        return ProductTiles(64, 128, 4, 4, 32)
    if programs <= _CARD or (height == 64 and programs <= 2 * _CARD):
        return ProductTiles(64, 128, 3, 4, 64)
    if height == 64 or programs <= 2 * _CARD:
        return ProductTiles(128, 64, 4, 4, 64)
    return ProductTiles(128, 64, 6 if large else 3, 8, 128)


def pick_whole_tiles(rows: int) -> ProductTiles:
    """Of products with weights in 8 bits, whose programs keep two sums: at most 32 rows."""
    return ProductTiles(64, 256, 3, 4, 16) if rows <= 16 else ProductTiles(64, 128, 4, 4, 32)


@lru_cache
def _card(device: torch.device) -> tuple[bool, bool]:
    """Whether it has the bulk copies of Hopper and newer, and 200 KiB of shared memory for a block."""
    if device.type != "cuda":
        return True, True  # the interpreter
    major, minor = torch.cuda.get_device_capability(device)
    return major >= 9, (major, minor) in ((9, 0), (10, 0), (10, 3))


def interleave_gate_up(weight: Tensor) -> Tensor:
    """Rows (or a bias) of gate, then up -> gate and up in turns, as `gated` wants them. weight: [2 * I, ...]."""
    gate, up = weight.chunk(2)
    return torch.stack((gate, up), 1).flatten(0, 1)


def suits(weight: Tensor) -> bool:
    """Whether the kernels take this weight: half precision or 8 bits, rows of whole 16 bytes."""
    fits = weight.is_contiguous() and weight.shape[1] * weight.element_size() % 16 == 0
    return fits and weight.dtype in (torch.float16, torch.bfloat16, torch.int8)


@dataclass(frozen=True)
class Rounded:
    """A weight in 8 bits: values * scale, at 0.9% of noise a weight. Half of the bytes of a product for few rows.

    What it is multiplied with is taken as 15 bits in two digits of 8, so the tensor cores' own whole numbers do, which
    need no conversion of the weights, and whose sums are exact.
    """

    values: Tensor  # [N, K] int8
    scale: Tensor  # [N] float32

    @classmethod
    def of(cls, weight: Tensor) -> "Rounded":
        """The nearest of a weight [N, K], each row with its own scale."""
        values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        scale = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
        for first in range(0, len(weight), _PIECE):  # a vocabulary in float32 would fill a small card
            rows = slice(first, first + _PIECE)
            exact = weight[rows].float()
            scale[rows] = (exact.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
            values[rows] = (exact / scale[rows, None]).round().to(torch.int8)
        return cls(values, scale)

    def __getitem__(self, rows: slice) -> "Rounded":
        """Some rows, in the same memory."""
        return Rounded(self.values[rows], self.scale[rows])

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class _Launch:
    kind: str  # "plain", "gated" or "parts"
    splits: int | None = None
    tiles: ProductTiles | None = None


def product(
    x: Tensor,
    weight: Tensor | Rounded,
    bias: Tensor | None = None,
    tiles: ProductTiles | None = None,
    splits: int | None = None,
) -> Tensor:
    """x @ weight^T + bias, summed in float32. Equals F.linear but for the order of the sum.

    Args:
        x: [M, K] float16 or bfloat16, dense; weight: [N, K] of the same dtype, dense, K a multiple of 8; or Rounded,
            K a multiple of 16.
        bias: [N], any float dtype, or None.
        splits: parts of the sum, for measurements; it changes the bits.
    Returns: [M, N] in the dtype of x. Raises ValueError for shapes and dtypes that do not fit.
    """
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, out, _Launch("plain", splits, tiles))
    return out


def gated(
    x: Tensor,
    weight: Tensor | Rounded,
    bias: Tensor | None = None,
    tiles: ProductTiles | None = None,
    splits: int | None = None,
) -> Tensor:
    """silu(gate) * up of a product with gate and up in turns (see interleave_gate_up): [M, N / 2].

    Equals layers.swiglu(F.linear(...)) with its roundings. See `product`.
    """
    if len(weight) % 2:
        raise ValueError(f"{len(weight)} rows are not gate and up in turns")
    out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, out, _Launch("gated", splits, tiles))
    return out


def product_parts(x: Tensor, weight: Tensor, tiles: ProductTiles | None = None, splits: int | None = None) -> Tensor:
    """A product as the parts of its sum [S, M, N] float32, for norm.add_norm: spares it a reduction."""
    splits = pick_splits(len(weight), x.shape[1], True) if splits is None else splits
    parts = torch.empty(_real_splits(splits, x.shape[1]), len(x), len(weight), device=x.device)
    _launch(x, weight, None, parts, _Launch("parts", splits, tiles))
    return parts


def _span(splits: int, inner: int) -> int:
    return -(-inner // (splits * GRAIN)) * GRAIN


def _real_splits(splits: int, inner: int) -> int:
    return -(-inner // _span(splits, inner))


_counters: dict[torch.device, Tensor] = {}


def _counter(count: int, device: torch.device) -> Tensor:
    """Zeros, which every launch leaves as zeros; launches that share them follow one another in one stream."""
    found = _counters.get(device)
    if found is None or len(found) < count:
        found = torch.zeros(max(count, 4096), dtype=torch.int32, device=device)
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():  # else it is the graph's own
            _counters[device] = found
    return found


def _launch(x: Tensor, weight: Tensor | Rounded, bias: Tensor | None, out: Tensor, how: _Launch) -> None:
    (rows, inner), columns = x.shape, len(weight)
    whole = isinstance(weight, Rounded)
    matrix, w_scale = (weight.values, weight.scale) if isinstance(weight, Rounded) else (weight, x)
    _check(x, matrix, whole)
    x, x_scale = _digits(x) if whole else (x, x)
    splits = pick_splits(columns, inner, how.kind == "parts") if how.splits is None else how.splits
    span = _span(splits, inner)
    splits = -(-inner // span)
    bulk, large = _card(x.device)
    picked = pick_whole_tiles(rows) if whole else pick_tiles(rows, columns, splits, large)
    tiles = how.tiles or picked
    height = tiles.rows or rows_of(rows)
    blocks, across = -(-rows // height), -(-columns // tiles.columns)
    parts, arrived = out, out
    if how.kind != "parts" and splits > 1:
        parts = torch.empty(splits, rows, columns, device=x.device)
        arrived = _counter(across * blocks, x.device)
    kernels = jit("matmul")
    x_source, w_source = x, matrix
    if bulk:
        x_source = kernels.TensorDescriptor(x, list(x.shape), [inner, 1], [height, tiles.depth])
        w_source = kernels.TensorDescriptor(matrix, [columns, inner], [inner, 1], [tiles.columns, tiles.depth])
    kernels.product_kernel[(across * splits * blocks,)](
        x_source, w_source, matrix, x_scale, w_scale, out if bias is None else bias, out, parts, arrived,
        rows, columns, inner, splits, span, blocks, _AHEAD if matrix.nbytes < _SMALL else 0,
        ROWS=height, COLUMNS=tiles.columns, DEPTH=tiles.depth, KIND=how.kind, SPLIT=splits > 1,
        BIAS=bias is not None, BULK=bulk, WHOLE=whole,
        num_warps=tiles.warps, num_stages=tiles.stages, **overlap(x.device, height <= _OVERLAPPING),
    )  # fmt: skip


def _digits(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] -> its coarse digits, then its fine ones [2 * M, K] int8, and the scale of each row [M] float32."""
    rows, inner = x.shape
    digits = torch.empty(2 * rows, inner, dtype=torch.int8, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = power_of_two(inner)
    jit("matmul").digits_kernel[(rows,)](
        x, digits, scale, rows, inner, BLOCK=block, num_warps=max(1, min(16, block // 512)), **overlap(x.device)
    )
    return digits, scale


def _check(x: Tensor, matrix: Tensor, whole: bool) -> None:
    dtype = torch.int8 if whole else x.dtype
    halves = x.dtype in (torch.float16, torch.bfloat16)
    if not (halves and suits(matrix) and matrix.dtype == dtype and matrix.shape[1] == x.shape[1] and x.is_contiguous()):
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} and weight {tuple(matrix.shape)} {matrix.dtype} do not fit")
