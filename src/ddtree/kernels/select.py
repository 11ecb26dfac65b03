"""The best candidates of every depth: equals ddtree.tree.top_k."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.kernels.backend import jit, overlap, power_of_two
from ddtree.tree import Proposal

MOST = 32  # ranks
CHUNK = 128  # columns whose largest is kept by the first launch


@dataclass(frozen=True)
class SelectTiles:
    """Shapes of the programs; they change the time alone. benchmarks/kernels_round.py compares some."""

    segment: int = 32  # chunks of a program of the first launch
    scan_warps: int = 4
    merge_warps: int = 8
    bitonic: bool = False  # the second launch sorts instead of searching for one maximum after another


DEFAULT = SelectTiles()


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `k` largest of every row, best first, ties to the lowest id, and the row's logsumexp.

    Args:
        logits: [M, V] float16, bfloat16 or float32; rows may be a pitch apart, columns are contiguous.
        k: 1 to 32; fewer are kept where V is smaller.
    Returns: values [M, k] float32, ids [M, k] int64, norm [M] float32. NaN counts as larger than any number.
    Raises ValueError for k or a layout out of range.
    Two launches: the maxima of chunks of 128 columns, then the k chunks of largest maximum, which hold the k largest.
    """
    found = select(logits, k)
    return found.values, found.ids, found.norm


def propose(logits: Tensor, k: int, vocabulary: Tensor | None = None) -> Proposal:
    """What ddtree.tree.top_k gives, in the same two launches.

    logits: [B, D, V]; vocabulary: [V] int64, dense: the tokens that the columns stand for.
    """
    batch, depth, columns = logits.shape
    found = select(logits.reshape(batch * depth, columns), k, vocabulary=vocabulary)
    return Proposal(tokens=found.ids.view(batch, depth, -1), log_q=found.log_q.view(batch, depth, -1))


@dataclass(frozen=True)
class Selected:
    """The k best of M rows."""

    values: Tensor  # [M, k] float32
    ids: Tensor  # [M, k] int64: columns, or what a vocabulary has for them
    log_q: Tensor  # [M, k] float32: value - norm, at most 0
    norm: Tensor  # [M] float32: logsumexp of the whole row


def select(logits: Tensor, k: int, tiles: SelectTiles = DEFAULT, vocabulary: Tensor | None = None) -> Selected:
    """top_k with everything it finds. vocabulary: [V] int64, dense: the tokens that the columns stand for."""
    rows, columns = logits.shape
    if not 1 <= k <= MOST or logits.stride(1) != 1:
        raise ValueError(f"k = {k} (1 to {MOST}), column stride {logits.stride(1)} (1)")
    if vocabulary is not None and (vocabulary.shape != (columns,) or not vocabulary.is_contiguous()):
        raise ValueError(f"a vocabulary of shape {tuple(vocabulary.shape)} for {columns} columns")
    kernels, k = jit("select"), min(k, columns)
    chunks = -(-columns // CHUNK)
    segments = -(-chunks // tiles.segment)
    k_block = power_of_two(k)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    maxima = empty(rows, chunks, dtype=torch.int32)
    peaks, sums = empty(rows, segments), empty(rows, segments)
    found = Selected(empty(rows, k), empty(rows, k, dtype=torch.int64), empty(rows, k), empty(rows))
    kernels.scan[segments, rows](
        logits,
        logits.stride(0),
        maxima,
        peaks,
        sums,
        columns,
        chunks,
        segments,
        width=CHUNK,
        per_segment=tiles.segment,
        num_warps=tiles.scan_warps,
        **overlap(logits.device),
    )
    kernels.merge[(rows,)](
        logits,
        logits.stride(0),
        maxima,
        peaks,
        sums,
        found.values,
        found.ids,
        found.log_q,
        found.norm,
        found.ids if vocabulary is None else vocabulary,
        columns,
        chunks,
        segments,
        k,
        width=CHUNK,
        chunk_block=max(power_of_two(chunks), k_block),
        segment_block=power_of_two(segments),
        k_block=k_block,
        bitonic=tiles.bitonic,
        named=vocabulary is not None,
        num_warps=tiles.merge_warps,
        **overlap(logits.device),
    )
    return found
