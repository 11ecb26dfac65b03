"""Every row's own token: equals engine.sampling's greedy, and its argmax of logits plus temperature times noise."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.kernels.backend import jit, overlap, power_of_two


@dataclass(frozen=True)
class Allowed:
    """Which tokens may be chosen, as the host wrote it down."""

    masks: Tensor  # [B, N, W] int32, 32 W >= V: bit t % 32 of word t // 32 is set where token t may follow
    limited: Tensor  # [B] bool: whose masks count; the others may choose anything


@dataclass(frozen=True)
class ChooseTiles:
    """Shapes of the first launch's programs; they change the time alone. benchmarks/kernels_round.py compares some."""

    block: int = 4096  # columns, a power of two
    warps: int = 4


DEFAULT = ChooseTiles()


def choose(
    logits: Tensor,
    seed: Tensor,
    position: Tensor,
    depths: Tensor,
    temperature: Tensor,
    tiles: ChooseTiles = DEFAULT,
    allowed: Allowed | None = None,
) -> Tensor:
    """The token that follows each row: argmax(logits + temperature * gumbel(seed, position + depth + 1, token)).

    Args:
        logits: [B, N, V] float16, bfloat16 or float32; columns are contiguous.
        seed: [B] int64, of each request.
        position: [B] int64, absolute, of the roots.
        depths: [B, N] int64.
        temperature: [B] float64 (float32 gives the same but for the rounding of its inverse); 0: the highest logit.
        allowed: the logit of a token that may not be chosen counts as -inf, whatever it is; None: all may be.
    Returns: [B, N] int64, the lowest id on ties; -1 where a logit is NaN, or none is above -inf.
    The noise has the bits of the engine's where the logarithms do, as on a GPU torch's and libdevice's have; it depends
    on nothing but seed, position and token.
    Raises ValueError for columns that are not contiguous, and for masks that are too narrow.
    """
    batch, rows, columns = logits.shape
    if logits.stride(2) != 1 or depths.stride(1) != 1:
        raise ValueError(f"column strides {logits.stride(2)} and {depths.stride(1)}: both must be 1")
    if allowed is not None and (allowed.masks.stride(2) != 1 or 32 * allowed.masks.shape[2] < columns):
        words = allowed.masks.shape[2]
        raise ValueError(f"masks of {words} words: {columns} tokens need {-(-columns // 32)}, contiguous")
    kernels, block = jit("choose"), min(tiles.block, max(power_of_two(columns), 128))
    segments = -(-columns // block)
    keys = torch.empty((batch, rows, segments), dtype=torch.int64, device=logits.device)
    own = torch.empty((batch, rows), dtype=torch.int64, device=logits.device)
    kernels.scan[segments, rows, batch](
        logits,
        logits.stride(0),
        logits.stride(1),
        seed,
        position,
        depths,
        depths.stride(0),
        temperature,
        keys if allowed is None else allowed.masks,
        0 if allowed is None else allowed.masks.stride(0),
        0 if allowed is None else allowed.masks.stride(1),
        keys if allowed is None else allowed.limited.view(torch.uint8),
        keys,
        rows,
        columns,
        segments,
        block=block,
        masked=allowed is not None,
        num_warps=tiles.warps,
        **overlap(logits.device),
    )
    kernels.merge[(batch * rows,)](
        keys, own, segments, block=power_of_two(segments), num_warps=1, **overlap(logits.device)
    )
    return own
