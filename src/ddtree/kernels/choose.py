"""Every row's own token: equals engine.sampling's greedy, its argmax of logits plus temperature times noise, and that
argmax among the tokens that engine.filters keeps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddtree.kernels.backend import jit, overlap, power_of_two
from ddtree.kernels.penalty import Changed

OFF = 1 << 40  # a top_k that keeps every token
WIDTH = 128  # columns whose largest is kept for the last launch
STEPS = 6  # distances to the best at which filters' cuts are looked for first: see filter_jit


@dataclass(frozen=True)
class Allowed:
    """Which tokens may be chosen, as the host wrote it down."""

    masks: Tensor  # [B, N, W] int32, 32 W >= V: bit t % 32 of word t // 32 is set where token t may follow
    limited: Tensor  # [B] bool: whose masks count; the others may choose anything


@dataclass(frozen=True)
class Kept:
    """Which tokens each sequence's filters keep, as engine.filters.Filters has it: every launch reads them anew."""

    active: Tensor  # [B] bool: whether anything is filtered; no temperature of such a sequence is 0
    top_k: Tensor  # [B] int64, at least 1; OFF keeps all
    top_p: Tensor  # [B] float64, above 0; 1: off
    drop: Tensor  # [B] float64: temperature * log(min_p), at most 0; -inf: off

    @classmethod
    def allocate(cls, batch: int, device: torch.device) -> "Kept":
        """For so many sequences, none of which filters anything."""
        wide = torch.ones(batch, dtype=torch.float64, device=device)
        active = torch.zeros(batch, dtype=torch.bool, device=device)
        return cls(active, torch.full((batch,), OFF, device=device), wide, torch.full_like(wide, -torch.inf))

    def write(self, filters: Sequence[tuple[int, float, float] | None]) -> None:
        """Of the first sequences top_k, top_p and drop, None for one without a filter; the others have none."""
        rows = [*filters, *[None] * (len(self.active) - len(filters))]
        numbers = [row or (OFF, 1.0, -math.inf) for row in rows]
        self.active.copy_(torch.tensor([row is not None for row in rows]))
        self.top_k.copy_(torch.tensor([row[0] for row in numbers], dtype=torch.int64))
        self.top_p.copy_(torch.tensor([row[1] for row in numbers], dtype=torch.float64))
        self.drop.copy_(torch.tensor([row[2] for row in numbers], dtype=torch.float64))


@dataclass(frozen=True)
class ChooseTiles:
    """Shapes of the programs; they change the time alone. benchmarks/kernels_round.py compares some."""

    block: int = 4096  # columns of the first launches' programs, a power of two
    warps: int = 4
    weigh_warps: int = 16  # of the launches for filters; with fewer registers spill
    pick_warps: int = 8
    tile: int = 8  # chunks of columns that the last one looks at together, a power of two


DEFAULT = ChooseTiles()


def choose(
    logits: Tensor,
    seed: Tensor,
    position: Tensor,
    depths: Tensor,
    temperature: Tensor,
    tiles: ChooseTiles = DEFAULT,
    allowed: Allowed | None = None,
    kept: Kept | None = None,
    changed: Changed | None = None,
) -> Tensor:
    """The token that follows each row: argmax(logits + temperature * gumbel(seed, position + depth + 1, token)).

    Args:
        logits: [B, N, V] float16, bfloat16 or float32; columns are contiguous.
        seed: [B] int64, of each request.
        position: [B] int64, absolute, of the roots.
        depths: [B, N] int64.
        temperature: [B] float64 (float32 gives the same but for the rounding of its inverse); 0: the highest logit.
        allowed: the logit of a token that may not be chosen counts as -inf, whatever it is; None: all may be.
        kept: the filters of each sequence; None: there are none, and there is one launch less.
        changed: what stands for the logits of the sequences that change theirs; None: none does.
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
    block = min(tiles.block, max(power_of_two(columns), WIDTH))
    segments = -(-columns // block)
    keys = torch.empty((batch, rows, segments), dtype=torch.int64, device=logits.device)
    own = torch.empty((batch, rows), dtype=torch.int64, device=logits.device)
    asked = (
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
        logits if changed is None else changed.scores,
        keys if changed is None else changed.active.view(torch.uint8),
    )
    jit("choose").scan[segments, rows, batch](
        *asked,
        keys if kept is None else kept.active.view(torch.uint8),
        keys,
        rows,
        columns,
        segments,
        block=block,
        masked=allowed is not None,
        filtered=kept is not None,
        penalized=changed is not None,
        num_warps=tiles.warps,
        **overlap(logits.device),
    )
    if kept is not None:
        _filter(asked, kept, keys, own, columns, block, tiles)
        return own
    jit("choose").merge[(batch * rows,)](
        keys, own, segments, block=power_of_two(segments), num_warps=1, **overlap(logits.device)
    )
    return own


def _filter(
    asked: tuple[Any, ...], kept: Kept, keys: Tensor, own: Tensor, columns: int, block: int, tiles: ChooseTiles
) -> None:
    """The tokens into `own`, where filters count. asked: the first arguments of all three kernels; keys: `scan`'s."""
    (batch, rows, segments), chunks, device = keys.shape, -(-columns // WIDTH), keys.device
    parts = [
        torch.empty((batch, rows, segments, STEPS), dtype=dtype, device=device)
        for dtype in (torch.int64, torch.int32, torch.float64, torch.int32)
    ]
    maxima, chosen = (torch.empty((batch, rows, chunks), dtype=torch.int32, device=device) for _ in range(2))
    active, unit = kept.active.view(torch.uint8), 2.0 ** (62 - columns.bit_length())  # as Filters has it
    shape = {"width": WIDTH, "segment_block": power_of_two(segments), "steps": STEPS, "unit": unit}
    shape |= {"masked": asked[8] is not keys, "penalized": asked[13] is not keys} | overlap(device)
    kernels, sizes = jit("filter"), (rows, columns, segments, chunks)
    kernels.weigh[segments, rows, batch](
        *asked, active, kept.drop, keys, maxima, *parts, *sizes,
        block=block, num_warps=tiles.weigh_warps, **shape,
    )  # fmt: skip
    kernels.pick[rows, batch](
        *asked, active, kept.drop, kept.top_k, kept.top_p, keys, maxima, *parts, chosen, own, *sizes,
        chunk_block=power_of_two(chunks), tile=tiles.tile, step_block=power_of_two(STEPS),
        num_warps=tiles.pick_warps, **shape,
    )  # fmt: skip
