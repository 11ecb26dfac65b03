# mypy: ignore-errors
"""The Triton side of ddtree.kernels.norm."""

import triton
import triton.language as tl

from ddtree.kernels.common_jit import follow


@triton.jit
def add_norm_kernel(
    x,
    delta,
    scale,
    out,
    kept,
    columns,
    floor,
    kept_row,
    block: tl.constexpr,
    adds: tl.constexpr,
    keeps: tl.constexpr,
    overlap: tl.constexpr,
):
    """One program a row: x += delta; kept = x; out = x * scale / sqrt(sum(x^2) + floor)."""
    follow(overlap)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < columns
    value = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(scale + at, mask=inside, other=0.0)  # here, so that it comes along with x
    if adds:
        value += tl.load(delta + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + row * columns + at, value, mask=inside)
    if keeps:
        tl.store(kept + row * kept_row + at, value.to(kept.dtype.element_ty), mask=inside)
    length = tl.sqrt_rn(tl.sum(value * value, 0) + floor)
    tl.store(out + row * columns + at, (value / length * weight).to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_kernel(gate_up, out, columns, block: tl.constexpr, overlap: tl.constexpr):
    """block columns of a row."""
    follow(overlap)
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < columns
    gate = tl.load(gate_up + row * 2 * columns + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * columns + columns + at, mask=inside, other=0.0).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * columns + at, (opened * up).to(out.dtype.element_ty), mask=inside)
