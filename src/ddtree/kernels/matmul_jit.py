# ruff: noqa: N803 - compile-time parameters are in capitals
# mypy: ignore-errors
"""The Triton side of ddtree.kernels.matmul."""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ddtree.kernels.common_jit import announce, await_forerunner, follow, sum_parts

__all__ = ["TensorDescriptor", "digits_kernel", "product_kernel"]

FINE = tl.constexpr(128)  # of a coarse digit


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
    x, w, weight, x_scale, w_scale, bias, out, parts, arrived, rows, columns, inner, splits, span, blocks, ahead,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    KIND: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr, BULK: tl.constexpr,
    WHOLE: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """One tile of columns, one block of rows, one span of the inner dimension. x [M, K] and w [N, K] are pointers
    or, with BULK, descriptors with blocks of [ROWS, DEPTH] and [COLUMNS, DEPTH]. KIND: see matmul.py.

    WHOLE: whole numbers of 8 bits and a scale for each row of the weight and of x, whose coarse digits [M, K] are
    followed by its fine ones, see digits_kernel; sums are exact.
    """
    place = tl.program_id(0)
    block, split, tile = place % blocks, (place // blocks) % splits, place // (blocks * splits)
    start = split * span
    end = tl.minimum(start + span, inner)
    announce(overlap)
    if overlap > 0:  # noqa: SIM102 - known when it is compiled
        if (ahead > 0) & (block == 0):
            _prefetch(weight, tile, start, tl.minimum(end - start, ahead), columns, inner, COLUMNS)
    await_forerunner(overlap)
    row = block * ROWS + tl.arange(0, ROWS)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    kind: tl.constexpr = tl.int32 if WHOLE else tl.float32
    acc = tl.zeros((COLUMNS, ROWS), kind)
    fine = tl.zeros((COLUMNS, ROWS), kind)
    for k in range(start, end, DEPTH):
        if BULK:
            left, right = w.load([tile * COLUMNS, k]), x.load([block * ROWS, k])
        else:
            left, right = _tile(w, column, columns, k, inner, DEPTH), _tile(x, row, rows, k, inner, DEPTH)
        acc = tl.dot(left, right.T, acc, out_dtype=kind)
        if WHOLE:
            if BULK:  # noqa: SIM108 - known when it is compiled
                low = x.load([rows + block * ROWS, k])
            else:
                low = _tile(x, rows + row, 2 * rows, k, inner, DEPTH)
            fine = tl.dot(left, low.T, fine, out_dtype=kind)
    if WHOLE:
        scale = tl.load(w_scale + column, mask=column < columns, other=0.0)
        digits = acc.to(tl.float32) * FINE + fine.to(tl.float32)
        y = (digits * scale[:, None]).T * tl.load(x_scale + row, mask=row < rows, other=0.0)[:, None]
    else:
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


@triton.jit(do_not_specialize=["rows"])
def digits_kernel(x, digits, scale, rows, inner, BLOCK: tl.constexpr, overlap: tl.constexpr):
    """A row of x [M, K] a program: x = scale * (FINE * coarse + fine), in digits [2 * M, K] int8: coarse, then fine."""
    follow(overlap)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < inner
    value = tl.load(x + row * inner + at, mask=inside, other=0.0).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(value), 0), 1e-30)
    whole = value * (FINE * 127.0 / most)
    coarse = tl.floor(whole / FINE + 0.5)
    fine = tl.floor(whole - coarse * FINE + 0.5)
    tl.store(digits + row * inner + at, coarse.to(tl.int8), mask=inside)
    tl.store(digits + (rows + row) * inner + at, fine.to(tl.int8), mask=inside)
    tl.store(scale + row, most / (FINE * 127.0))
