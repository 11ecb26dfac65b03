"""A kernel that shows what the attention kernels take for the edges of chunks."""

import triton
import triton.language as tl

from ddtree.kernels.attention_jit import _chunk_of, _edge


@triton.jit
def chunks_kernel(positions, chunks, begins, FIRST: tl.constexpr, SIZE: tl.constexpr):  # noqa: N803
    i = tl.arange(0, SIZE)
    chunk = _chunk_of(tl.load(positions + i), FIRST)
    tl.store(chunks + i, chunk)
    tl.store(begins + i, _edge(chunk, FIRST))
