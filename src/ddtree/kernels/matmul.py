"""Products with weights for a few rows, at the speed at which the weights can be read.

A row's bits depend on that row and the weights alone: not on the number of rows, its place or its neighbours. For this
the inner dimension is cut at places that the weights' shape fixes, and parts are added in their order; the instructions
are the tensor cores' own, of one kind for every number of rows, with the weights on the side of 64.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ddtree.kernels.backend import jit, power_of_two

GRAIN = 256  # cuts of the inner dimension are multiples of it, and of every tile's depth
MOST_ROWS = 128  # of one program; more rows take more programs
_TARGET = 256  # programs of 64 columns that keep a large card busy
_MOST_SPLITS = 8


@dataclass(frozen=True)
class ProductTiles:
    """Shape of a program; it changes the time alone. benchmarks/kernels_matmul.py compares some."""

    columns: int = 64  # rows of the weight
    depth: int = 128
    stages: int = 5
    warps: int = 4


# By rows of a program and whether shared memory is as large as a Hopper's.
_TILES = {
    (16, True): ProductTiles(64, 128, 5, 4),
    (32, True): ProductTiles(64, 128, 4, 4),
    (64, True): ProductTiles(128, 64, 4, 4),
    (128, True): ProductTiles(128, 64, 6, 8),
    (16, False): ProductTiles(64, 128, 4, 4),
    (32, False): ProductTiles(64, 128, 4, 4),
    (64, False): ProductTiles(128, 64, 4, 4),
    (128, False): ProductTiles(128, 64, 3, 8),
}


@dataclass(frozen=True)
class Chain:
    """Programmatic dependent launch (Hopper and newer): the kernel starts while the one before it ends."""

    ahead: int = 0  # weights of each row that are brought into the L2 cache before the wait


def pick_splits(columns: int, inner: int) -> int:
    """In how many parts the inner dimension is summed up: a matter of the weight's shape alone."""
    splits = power_of_two(-(-_TARGET // -(-columns // 64)))
    if splits * 64 * -(-columns // 64) > 64 * _TARGET * 3 // 2:
        splits //= 2
    return max(1, min(splits, _MOST_SPLITS, -(-inner // GRAIN)))


def rows_of(rows: int) -> int:
    """Rows of a program."""
    return max(16, min(MOST_ROWS, power_of_two(rows)))


@lru_cache
def pick_tiles(rows: int, large: bool) -> ProductTiles:
    """For programs of so many rows (see rows_of). large: shared memory of a block is at least 200 KiB."""
    return _TILES[rows, large]


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
    """Whether the kernels take this weight: half precision, rows of 16 bytes each."""
    return weight.dtype in (torch.float16, torch.bfloat16) and weight.shape[1] % 8 == 0 and weight.is_contiguous()


@dataclass(frozen=True)
class _Launch:
    kind: str  # "plain", "gated" or "parts"
    splits: int | None = None
    tiles: ProductTiles | None = None
    chain: Chain | None = None


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    tiles: ProductTiles | None = None,
    splits: int | None = None,
    chain: Chain | None = None,
) -> Tensor:
    """x @ weight^T + bias, summed in float32. Equals F.linear but for the order of the sum.

    Args:
        x: [M, K], the weight's dtype, dense; weight: [N, K] float16 or bfloat16, dense, K a multiple of 8.
        bias: [N], any float dtype, or None.
        splits: parts of the sum, for measurements; it changes the bits.
    Returns: [M, N] in the weight's dtype. Raises ValueError for shapes and dtypes that do not fit.
    """
    out = torch.empty(len(x), len(weight), dtype=weight.dtype, device=x.device)
    _launch(x, weight, bias, out, _Launch("plain", splits, tiles, chain))
    return out


def gated(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    tiles: ProductTiles | None = None,
    splits: int | None = None,
    chain: Chain | None = None,
) -> Tensor:
    """silu(gate) * up of a product with gate and up in turns (see interleave_gate_up): [M, N / 2].

    Equals layers.swiglu(F.linear(...)) with its roundings. See `product`.
    """
    if len(weight) % 2:
        raise ValueError(f"{len(weight)} rows are not gate and up in turns")
    out = torch.empty(len(x), len(weight) // 2, dtype=weight.dtype, device=x.device)
    _launch(x, weight, bias, out, _Launch("gated", splits, tiles, chain))
    return out


def product_parts(
    x: Tensor,
    weight: Tensor,
    tiles: ProductTiles | None = None,
    splits: int | None = None,
    chain: Chain | None = None,
) -> Tensor:
    """A product as the parts of its sum [S, M, N] float32, for add_parts_norm: spares it a reduction."""
    splits = pick_splits(*weight.shape) if splits is None else splits
    parts = torch.empty(_real_splits(splits, weight.shape[1]), len(x), len(weight), device=x.device)
    _launch(x, weight, None, parts, _Launch("parts", splits, tiles, chain))
    return parts


def add_parts_norm(
    x: Tensor, parts: Tensor, scale: Tensor, floor: float, dtype: torch.dtype, chain: Chain | None = None
) -> Tensor:
    """norm.add_norm with the parts of a product: x += their sum in float32, in order, and the norm of x.

    Args: x: [M, H] float32, dense; parts: [S, M, H] float32, dense. The others as in norm.add_norm.
    """
    rows, columns = x.shape
    if parts.shape[1:] != x.shape or not parts.is_contiguous() or not x.is_contiguous():
        raise ValueError(f"parts {tuple(parts.shape)} do not fit the stream {tuple(x.shape)}")
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    block = power_of_two(columns)
    jit("matmul").add_norm_kernel[(rows,)](
        x, parts, scale, scale, out, rows, columns, len(parts), floor,
        BLOCK=block, BIAS=False, num_warps=max(1, min(16, block // 256)), **_chained(chain, x.device),
    )  # fmt: skip
    return out


def _chained(chain: Chain | None, device: torch.device) -> dict[str, bool]:
    if chain is None or device.type != "cuda" or not _card(device)[0]:
        return {"CHAINED": False}
    return {"CHAINED": True, "launch_pdl": True}


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


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, how: _Launch) -> None:
    (rows, inner), columns = x.shape, len(weight)
    if not suits(weight) or x.dtype != weight.dtype or weight.shape[1] != inner or not x.is_contiguous():
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} and weight {tuple(weight.shape)} {weight.dtype} do not fit")
    splits = pick_splits(columns, inner) if how.splits is None else how.splits
    span = _span(splits, inner)
    splits = -(-inner // span)
    height = rows_of(rows)
    bulk, large = _card(x.device)
    tiles = how.tiles or pick_tiles(height, large)
    blocks, across = -(-rows // height), -(-columns // tiles.columns)
    parts, arrived = out, out
    if how.kind != "parts" and splits > 1:
        parts = torch.empty(splits, rows, columns, device=x.device)
        arrived = _counter(across * blocks, x.device)
    kernels = jit("matmul")
    x_source, w_source = x, weight
    if bulk:
        x_source = kernels.TensorDescriptor(x, [rows, inner], [inner, 1], [height, tiles.depth])
        w_source = kernels.TensorDescriptor(weight, [columns, inner], [inner, 1], [tiles.columns, tiles.depth])
    kernels.product_kernel[(across * splits * blocks,)](
        x_source, w_source, weight, weight if bias is None else bias, out, parts, arrived,
        rows, columns, inner, splits, span, blocks, 0 if how.chain is None else how.chain.ahead,
        ROWS=height, COLUMNS=tiles.columns, DEPTH=tiles.depth, KIND=how.kind, SPLIT=splits > 1,
        BIAS=bias is not None, BULK=bulk,
        num_warps=tiles.warps, num_stages=tiles.stages, **_chained(how.chain, x.device),
    )  # fmt: skip
