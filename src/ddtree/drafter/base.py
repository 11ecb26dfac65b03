"""What the engine asks of a drafter."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ddtree.drafter.config import DrafterConfig
from ddtree.drafter.pairwise import PairwiseHead
from ddtree.layers import KVCache


class Drafter(Protocol):
    """Keeps a context of target features, and proposes the depths behind a root."""

    config: DrafterConfig
    vocabulary: Tensor | None  # [V] int64, ascending: the tokens that logits stand for; None: all of the target's
    pairwise: PairwiseHead | None  # what follows each candidate; None: depths are scored by themselves

    def allocate(self, slots: int, length: int) -> KVCache:
        """A zeroed context cache; `length` must leave block_size scratch positions behind the longest context."""

    def append(self, cache: KVCache, features: Tensor, position: Tensor, counts: Sequence[int] | None = None) -> None:
        """Extend the context. features: [B, M, taps * H] of positions position .. position + M - 1; position: [B].

        counts: how many of its M each sequence has; M when None. What lies behind them is not read.
        """

    def propose(self, cache: KVCache, root: Tensor, position: Tensor, depths: int) -> Tensor:
        """Logits [B, depths, V] of the positions behind the roots; V: see `vocabulary`.

        root: [B] int64, at position [B] int64.
        """

    def states(self, cache: KVCache, root: Tensor, position: Tensor, depths: int) -> Tensor:
        """`propose` up to the head: the hidden states [B, depths, H] that a pairwise head reads too."""

    def score(self, states: Tensor) -> Tensor:
        """The head: [B, depths, H] -> logits [B, depths, V]."""
