"""A kernel that shows what the attention kernels take for the edges of chunks."""

import triton
import triton.language as tl

from ddtree.kernels.attention_merge_jit import chunk_of, edge_of


@triton.jit
def chunks_kernel(positions, chunks, begins, FIRST: tl.constexpr, SIZE: tl.constexpr):  # noqa: N803
    i = tl.arange(0, SIZE)
    chunk = chunk_of(tl.load(positions + i), FIRST)
    tl.store(chunks + i, chunk)
    tl.store(begins + i, edge_of(chunk, FIRST))
