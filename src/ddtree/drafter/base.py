"""What the engine asks of a drafter."""

from typing import Protocol

from torch import Tensor

from ddtree.drafter.config import DrafterConfig
from ddtree.layers import KVCache


class Drafter(Protocol):
    """Keeps a context of target features, and proposes the depths behind a root."""

    config: DrafterConfig

    def allocate(self, batch: int, slots: int) -> KVCache:
        """A zeroed context cache; `slots` must leave block_size scratch slots behind the longest context."""

    def append(self, cache: KVCache, features: Tensor, position: Tensor) -> None:
        """Extend the context. features: [B, M, taps * H] of positions position .. position + M - 1; position: [B].

        Sequences with fewer than M new tokens pass anything finite behind them: those slots are scratch.
        """

    def propose(self, cache: KVCache, root: Tensor, position: Tensor, depths: int) -> Tensor:
        """Logits [B, depths, V] of the positions behind the roots. root: [B] int64, at position [B] int64."""
