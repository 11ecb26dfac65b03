"""What one forward is made of: sequences, anchors, labels and their weights; all of it a function of seed and step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.training.shards import Chat

_PADDING = 128  # lengths are rounded up to a multiple of it, so that kernels meet few shapes


@dataclass(frozen=True)
class Batch:
    """Sequences of one forward, with blocks behind random anchors."""

    sequences: list[Tensor]  # each [n] int64
    names: list[int] | None  # numbers by which their features are kept
    length: int  # T, at least the longest
    roots: Tensor  # [B, A] int64, the tokens at the anchors
    anchors: Tensor  # [B, A] int64 positions; 0 where a sequence has fewer
    labels: Tensor  # [B, A, D] int64
    weights: Tensor  # [B, A, D] float32, 0 behind a sequence's end
    kept: Tensor  # int64, where the flat weights are not 0

    def to(self, device: torch.device) -> "Batch":
        """On a device; a GPU copies while the host goes on."""
        padded = torch.nn.utils.rnn.pad_sequence(self.sequences, batch_first=True)
        tensors = (padded, self.roots, self.anchors, self.labels, self.weights, self.kept)
        if device.type == "cuda":
            tensors = tuple(tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors)  # type: ignore[assignment]
        else:
            tensors = tuple(tensor.to(device) for tensor in tensors)  # type: ignore[assignment]
        sequences = [row[: len(ids)] for row, ids in zip(tensors[0], self.sequences, strict=True)]
        return Batch(sequences, self.names, self.length, *tensors[1:])

    def block_ids(self, block: int, mask: int) -> Tensor:
        """[B, A, b] int64: [root, MASK, ...]."""
        ids = self.roots.new_full((*self.roots.shape, block), mask)
        ids[..., 0] = self.roots
        return ids


def rounded(length: int) -> int:
    """What a forward of this longest sequence is padded to."""
    return -(-length // _PADDING) * _PADDING


def trainable(chats: Sequence[Chat]) -> list[Chat]:
    """Those with a root and a token behind it."""
    return [chat for chat in chats if chat.answer >= 2]


def order(count: int, step: int, batch: int, seed: int) -> list[int]:
    """Which sequences step `step` (from 0) takes: every pass over all of them has its own shuffle."""
    found: list[int] = []
    for place in range(step * batch, (step + 1) * batch):
        turn = place // count
        found.append(int(_shuffle(count, seed, turn)[place % count]))
    return found


_shuffles: dict[tuple[int, int, int], Tensor] = {}


def _shuffle(count: int, seed: int, turn: int) -> Tensor:
    key = (count, seed, turn)
    if key not in _shuffles:
        _shuffles.clear() if len(_shuffles) > 2 else None
        _shuffles[key] = torch.randperm(count, generator=_generator(seed, turn, 1))
    return _shuffles[key]


def make(
    chats: Sequence[Chat], weights: Tensor, anchors: int, seed: int, number: int, names: list[int] | None = None
) -> Batch:
    """Blocks of `chats`: up to `anchors` roots each, drawn from the answer; weights: [D], by depth.

    number: of the first of them among all that a fit ever sees; a sequence's anchors depend on its own alone.
    """
    depths = len(weights)
    longest = max(len(chat.ids) for chat in chats)
    sequences = [torch.from_numpy(chat.ids).long() for chat in chats]
    at = torch.zeros(len(chats), anchors, dtype=torch.int64)
    labels = torch.zeros(len(chats), anchors, depths, dtype=torch.int64)
    weighed = torch.zeros(len(chats), anchors, depths)
    roots = torch.zeros(len(chats), anchors, dtype=torch.int64)
    for row, (chat, ids) in enumerate(zip(chats, sequences, strict=True)):
        possible = torch.arange(max(chat.prompt, 1), len(ids) - 1)  # the root and at least one token behind it
        generator = _generator(seed, number + row, 2)
        chosen = possible[torch.randperm(len(possible), generator=generator)[:anchors]].sort().values
        behind = chosen.unsqueeze(1) + torch.arange(1, depths + 1)  # [a, D]
        n = len(chosen)
        at[row, :n], roots[row, :n] = chosen, ids[chosen]
        labels[row, :n] = ids[behind.clamp(max=len(ids) - 1)]
        weighed[row, :n] = weights * (behind < len(ids))
    kept = weighed.flatten().nonzero().squeeze(1)
    return Batch(sequences, names, rounded(longest), roots, at, labels, weighed, kept)


def _generator(seed: int, number: int, purpose: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + number) * 8 + purpose)
