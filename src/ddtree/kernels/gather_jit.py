# mypy: ignore-errors
"""The Triton side of ddtree.kernels.gather."""

import triton
import triton.language as tl

from ddtree.kernels.common_jit import follow


@triton.jit(do_not_specialize=["m", "ids_b", "rows_b", "floors"])
def rows_kernel(ids, table, out, columns, m, ids_b, rows_b, floors, block: tl.constexpr, overlap: tl.constexpr):
    """block columns of one row; m ids of a sequence, rows_b rows of the table. floors: ids below 0 are 0."""
    follow(overlap)
    row = tl.program_id(1).to(tl.int64)
    b = row // m
    found = tl.load(ids + b * ids_b + row % m)
    found = b * rows_b + tl.where(floors != 0, tl.maximum(found, 0), found)
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < columns
    value = tl.load(table + found * columns + at, mask=inside)
    tl.store(out + row * columns + at, value.to(out.dtype.element_ty), mask=inside)
