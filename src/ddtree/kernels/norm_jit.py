# mypy: ignore-errors
"""The Triton side of ddtree.kernels.norm."""

import triton
import triton.language as tl

from ddtree.kernels.common_jit import announce, await_forerunner, follow, sum_parts


@triton.jit(do_not_specialize=["rows", "parts"])
def add_norm_kernel(
    x, delta, bias, scale, out, kept, rows, columns, parts, floor, kept_row,
    block: tl.constexpr, adds: tl.constexpr, biased: tl.constexpr, keeps: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """One program a row: x += the parts of delta, in their order, and the bias; kept = x;
    out = x * scale / sqrt(sum(x^2) + floor)."""
    announce(overlap)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < columns
    weight = tl.load(scale + column, mask=inside, other=0.0)  # nobody's output: it may be read before the wait
    await_forerunner(overlap)
    at = row * columns + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if adds:
        total = sum_parts(delta, at, rows.to(tl.int64) * columns, parts, inside)
        if biased:
            total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        value += total
        tl.store(x + at, value, mask=inside)
    if keeps:
        tl.store(kept + row * kept_row + column, value.to(kept.dtype.element_ty), mask=inside)
    length = tl.sqrt_rn(tl.sum(value * value, 0) + floor)
    tl.store(out + at, (value / length * weight).to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_kernel(gate_up, out, columns, block: tl.constexpr, turns: tl.constexpr, overlap: tl.constexpr):
    """block columns of a row. turns: gate and up lie in turns, not one after the other."""
    follow(overlap)
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < columns
    first = gate_up + row * 2 * columns
    gate = tl.load(first + (2 * at if turns else at), mask=inside, other=0.0).to(tl.float32)
    up = tl.load(first + (2 * at + 1 if turns else columns + at), mask=inside, other=0.0).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * columns + at, (opened * up).to(out.dtype.element_ty), mask=inside)
