# mypy: ignore-errors
"""The Triton side of ddtree.kernels.report."""

import triton
import triton.language as tl

from ddtree.kernels.common_jit import follow


@triton.jit(do_not_specialize=["pitch", "rows", "columns", "width"])
def report_kernel(
    parents,
    depths,
    committed,
    n_accepted,
    n_committed,
    tree_count,
    tree_tokens,
    out,
    pitch,
    rows,
    columns,
    width,
    block: tl.constexpr,
    column_block: tl.constexpr,
    has_tree: tl.constexpr,
    overlap: tl.constexpr,
):
    """The row of one sequence. pitch: of parents and depths; width: columns of the report."""
    follow(overlap)
    b = tl.program_id(0).to(tl.int64)
    node, column = tl.arange(0, block), tl.arange(0, column_block)
    parent = tl.load(parents + b * pitch + node, mask=node < rows, other=-1)
    depth = tl.load(depths + b * pitch + node, mask=node < rows, other=0)
    kept = tl.load(committed + b * columns + column, mask=column < columns, other=-1)
    line = out + b * width
    tl.store(line, tl.load(n_accepted + b))
    tl.store(line + 1, tl.load(n_committed + b))
    tl.store(line + 2, tl.sum((parent >= 0).to(tl.int64), 0))
    tl.store(line + 3, tl.max(depth, 0))
    tl.store(line + 4 + column, kept, mask=column < columns)
    if has_tree:
        tokens = tl.load(tree_tokens + b * columns + column, mask=column < columns, other=-1)
        tl.store(line + 4 + columns, tl.load(tree_count + b))
        tl.store(line + 5 + columns + column, tokens, mask=column < columns)
