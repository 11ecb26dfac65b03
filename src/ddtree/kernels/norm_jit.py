# mypy: ignore-errors
"""The Triton side of ddtree.kernels.norm."""

import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(x, delta, scale, out, columns, floor, block: tl.constexpr, adds: tl.constexpr):
    """One program a row: x += delta; out = x * scale / sqrt(sum(x^2) + floor)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < columns
    value = tl.load(x + row * columns + at, mask=inside, other=0.0)
    if adds:
        value += tl.load(delta + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + row * columns + at, value, mask=inside)
    length = tl.sqrt_rn(tl.sum(value * value, 0) + floor)
    weight = tl.load(scale + at, mask=inside, other=0.0)
    tl.store(out + row * columns + at, (value / length * weight).to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_kernel(gate_up, out, columns, block: tl.constexpr):
    """block columns of a row."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < columns
    gate = tl.load(gate_up + row * 2 * columns + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * columns + columns + at, mask=inside, other=0.0).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * columns + at, (opened * up).to(out.dtype.element_ty), mask=inside)
