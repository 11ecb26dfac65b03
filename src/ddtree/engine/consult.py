"""What the host adds to a choice that the device cannot make alone: masks of grammars and of `min_tokens`.

It lies between a round's verify and accept. The host reads the trees (one copy) and writes what follows from them into
tensors that stay where they are: so what comes behind is the same launches, or the same CUDA graph, in every round.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ddtree.engine.rows import HostRows
from ddtree.kernels import Allowed
from ddtree.tree import RoundState

if TYPE_CHECKING:
    from ddtree.engine.round import Lane

Tree = tuple[int, HostRows]  # the root's position, and the rows


def tree_table(state: RoundState) -> Tensor:
    """All that a sampler asks of a round's rows, in one tensor: see `read_trees`. Returns: [B, 1 + 3 N] int64."""
    n = state.width
    parts = [state.position.unsqueeze(1), state.tokens[:, :n], state.parents[:, :n], state.depths[:, :n]]
    return torch.cat(parts, 1)


def read_trees(table: Sequence[Sequence[int]]) -> list[Tree]:
    """The rows of `tree_table`, without padding."""
    found = []
    for position, *columns in table:
        n = len(columns) // 3
        size = 1 + sum(parent >= 0 for parent in columns[n : 2 * n])
        tokens, parents, depths = (columns[start : start + size] for start in (0, n, 2 * n))
        found.append((position, HostRows(tokens, parents, depths)))
    return found


@dataclass
class HostPart:
    """Tensors of one batch that the host writes between verify and accept.

    The masks are written to pinned memory first. Whoever calls `fill` has waited for the round's trees, and those were
    sent behind the last masks on the same stream: so these have been copied, and may be overwritten.
    """

    allowed: Allowed  # [B, N, W] int32 and [B] bool
    _staged: Tensor  # [B, N, W] int32, on the host

    @classmethod
    def allocate(cls, batch: int, width: int, vocab: int, device: torch.device) -> "HostPart":
        """For `batch` sequences of `width` rows over a vocabulary of so many tokens."""
        shape = batch, width, mask_words(vocab)
        limited = torch.zeros(batch, dtype=torch.bool, device=device)
        return cls(
            allowed=Allowed(torch.zeros(shape, dtype=torch.int32, device=device), limited),
            _staged=torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda"),
        )

    def begin(self, lanes: Sequence["Lane"]) -> None:
        """Other sequences take part from now on."""
        masked = [lane.sampler.masked for lane in lanes]
        masked += [False] * (len(self.allowed.limited) - len(lanes))
        self.allowed.limited.copy_(torch.tensor(masked))

    def fill(self, lanes: Sequence["Lane"], trees: Sequence[Tree]) -> None:
        """What the samplers say of these rows.

        Rows that are padding keep what was there: none of them is ever accepted.
        """
        for index, (lane, (_, rows)) in enumerate(zip(lanes, trees, strict=False)):
            size, sampler = len(rows), lane.sampler
            if sampler.masked:
                staged = self._staged[index, :size]
                staged.copy_(torch.from_numpy(sampler.mask(rows)[:, : staged.shape[1]]))
                self.allowed.masks[index, :size].copy_(staged, non_blocking=True)


def mask_words(vocab: int) -> int:
    """int32 numbers of a mask of a bit a token."""
    return -(-vocab // 32)
