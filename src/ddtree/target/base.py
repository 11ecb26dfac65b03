"""What the engine asks of a target model."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ddtree.layers import KVCache
from ddtree.tree import Rows


@dataclass(frozen=True)
class TargetSpec:
    """Facts about a loaded target that others must fit."""

    vocab_size: int  # rows of the embedding, padding included
    hidden_size: int
    num_layers: int
    max_position: int  # tokens of context the model was made for
    end_ids: tuple[int, ...]  # end-of-sequence tokens
    dtype: torch.dtype
    device: torch.device


class Target(Protocol):
    """A target model: prefill, verify rows under an ancestor mask, commit a path; lends its embedding and its head."""

    spec: TargetSpec
    feature_layers: tuple[int, ...]  # taps: a layer id stands for the hidden state after that layer

    def tap(self, layers: tuple[int, ...]) -> None:
        """Choose the feature layers; features have len(layers) * hidden_size columns, in this order."""

    def allocate(self, slots: int, length: int) -> KVCache:
        """A zeroed cache for `slots` sequences of `length` positions each, scratch included."""

    def prefill(
        self, cache: KVCache, ids: Tensor, position: Tensor, last: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Append a chunk of one prompt. cache: a view of one sequence; ids: [1, T] int64; position: [1] int64, tokens
        already in the cache.

        last: [1] int64 on a device of the kernels, the chunk's last row; rows behind it are padding, which leaves
        scratch in the cache. The host reads nothing then, so that a CUDA graph can hold the forward.
        Returns: features [1, T, F] and the last row's logits [1, V].
        """

    def verify(self, cache: KVCache, rows: Rows, position: Tensor) -> tuple[Tensor, Tensor]:
        """One forward over rows [B, N] behind `position` [B] committed tokens; padding lies behind a sequence's rows.

        Returns: logits [B, N, V] and features [B, N, F]. Keys and values stay in scratch slots until commit.
        """

    def commit(self, cache: KVCache, path: Tensor, position: Tensor) -> None:
        """Keep keys and values of the rows on path [B, M] (-1 padded, the root first), in order, from `position`."""

    def embed(self, ids: Tensor) -> Tensor:
        """ids [...] int64 -> embeddings [..., hidden_size], in a float dtype that holds them exactly."""

    def head(self, hidden: Tensor) -> Tensor:
        """Normalised hidden states [M, hidden_size] -> logits [M, V]."""
