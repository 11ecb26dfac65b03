# ruff: noqa: N803 - compile-time parameters are in capitals
# mypy: ignore-errors
"""Triton kernel of `ddtree.kernels.commit`. Import it only where triton is there."""

import triton
import triton.language as tl

from ddtree.kernels.common_jit import follow


@triton.jit(do_not_specialize=["m", "length", "slots_all", "path_b"])
def commit_kernel(
    data, slots, path, positions, m, length, slots_all, path_b,
    LINES: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr, MP: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Move the accepted rows of one layer, one head of keys or values and one sequence. LINES: 2 * kv_heads."""
    follow(overlap)
    line, layer, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i, d = tl.arange(0, MP), tl.arange(0, HDP)
    row = tl.load(path + b * path_b + i, mask=i < m, other=-1)
    moved = (row >= 0) & (row != i)
    position = tl.load(positions + b)
    base = data + ((layer.to(tl.int64) * slots_all + tl.load(slots + b)) * LINES + line) * length * HD
    mask = moved[:, None] & (d < HD)[None, :]
    kept = tl.load(base + (position + row)[:, None] * HD + d[None, :], mask=mask)
    tl.debug_barrier()  # all rows are read before the first is overwritten
    tl.store(base + (position + i)[:, None] * HD + d[None, :], kept, mask=mask)
