# ruff: noqa: N803 - compile-time parameters are in capitals
# mypy: ignore-errors
"""The Triton side of ddtree.kernels.matmul."""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ddtree.kernels.common_jit import announce, await_forerunner, sum_parts

__all__ = ["TensorDescriptor", "product_kernel"]


@triton.jit
def _swiglu(y, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr):
    """y [ROWS, COLUMNS] float32, gate and up side by side -> [ROWS, COLUMNS / 2], rounded as norm.swiglu does."""
    gate, up = tl.split(tl.reshape(y.to(DTYPE).to(tl.float32), (ROWS, COLUMNS // 2, 2)))
    return (gate / (1.0 + tl.exp(-gate))).to(DTYPE).to(tl.float32) * up


@triton.jit
def _prefetch(weight, tile, start, size, columns, inner, COLUMNS: tl.constexpr):
    """Ask for `size` weights of each row of a tile, from `start`, to be brought into the L2 cache."""
    size = size * (weight.dtype.element_ty.primitive_bitwidth // 8)
    row = tl.minimum(tile * COLUMNS + tl.arange(0, COLUMNS), columns - 1).to(tl.int64)
    sizes = tl.zeros((COLUMNS,), tl.int32) + size
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [weight + row * inner + start, sizes], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _tile(data, row, rows, k, inner, DEPTH: tl.constexpr):
    """Rows of a matrix from column k on; zeros outside."""
    column = k + tl.arange(0, DEPTH)
    mask = (row < rows)[:, None] & (column < inner)[None, :]
    return tl.load(data + row.to(tl.int64)[:, None] * inner + column[None, :], mask=mask, other=0.0)


@triton.jit
def _finish(
    y, row, column, tile, rows, columns, bias, out,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Bias, the gated unit where asked, and the store of a tile's sums y [ROWS, COLUMNS]."""
    if BIAS:
        y += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if KIND == "gated":
        half = tile * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        opened = _swiglu(y, ROWS, COLUMNS, out.dtype.element_ty)
        at = row.to(tl.int64)[:, None] * (columns // 2) + half[None, :]
        inside = (row < rows)[:, None] & (half < columns // 2)[None, :]
        tl.store(out + at, opened.to(out.dtype.element_ty), mask=inside)
    else:
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "splits", "blocks", "ahead"])
def product_kernel(
    x, w, weight, scale, bias, out, parts, arrived, rows, columns, inner, splits, span, blocks, ahead,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    KIND: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr, BULK: tl.constexpr,
    SCALED: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """One tile of columns, one block of rows, one span of the inner dimension. x [M, K] and w [N, K] are pointers
    or, with BULK, descriptors with blocks of [ROWS, DEPTH] and [COLUMNS, DEPTH]. KIND: see matmul.py. SCALED: the
    weights are whole numbers, times one number a row of the matrix."""
    place = tl.program_id(0)
    block, split, tile = place % blocks, (place // blocks) % splits, place // (blocks * splits)
    start = split * span
    end = tl.minimum(start + span, inner)
    announce(overlap)
    if overlap > 0:  # noqa: SIM102 - known when it is compiled
        if (ahead > 0) & (block == 0):
            _prefetch(weight, tile, start, tl.minimum(end - start, ahead), columns, inner, COLUMNS)
    await_forerunner(overlap)
    acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    row = block * ROWS + tl.arange(0, ROWS)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    for k in range(start, end, DEPTH):
        if BULK:
            left, right = w.load([tile * COLUMNS, k]), x.load([block * ROWS, k])
        else:
            left, right = _tile(w, column, columns, k, inner, DEPTH), _tile(x, row, rows, k, inner, DEPTH)
        if SCALED:
            left = left.to(tl.float32).to(right.dtype)  # exact: whole numbers below 128
        acc = tl.dot(left, right.T, acc)
    if SCALED:
        acc = acc * tl.load(scale + column, mask=column < columns, other=0.0)[:, None]
    y = acc.T
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    size = rows.to(tl.int64) * columns
    if KIND == "parts":
        tl.store(parts + split * size + at, y, mask=mask)
    elif SPLIT:
        tl.store(parts + split * size + at, y, mask=mask)
        tl.debug_barrier()  # the whole tile is stored before it is told
        before = tl.atomic_add(arrived + tile * blocks + block, 1, sem="acq_rel")
        if before == splits - 1:
            tl.store(arrived + tile * blocks + block, 0)  # for the next launch
            y = sum_parts(parts, at, size, splits, mask)
            _finish(y, row, column, tile, rows, columns, bias, out, ROWS, COLUMNS, KIND, BIAS)
    else:
        _finish(y, row, column, tile, rows, columns, bias, out, ROWS, COLUMNS, KIND, BIAS)
