"""Whole sequences of a batch through a target in one forward: its launches once, instead of once for each prompt."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree.layers import HostPlace, KVCache, Segment
from ddtree.target import LlamaTarget


class Held:
    """In a cache's stead: keys and values of the layer that is being computed."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.heads = torch.empty(0)

    def write(self, layer: int, segments: Sequence[Segment], heads: Tensor) -> None:
        """heads: [M, 2 * kv_heads, hd] float32; see KVCache.write."""
        self.heads = heads.to(self.dtype)


class WholePlace(HostPlace):
    """B sequences of T rows, each from position 0 on; what is padded stands behind and is seen by no other row."""

    def attend(self, cache: Any, layer: int, query: Tensor, window: int | None, causal: bool) -> Tensor:
        """See Place.attend; cache: Held."""
        if window is not None:
            raise NotImplementedError("a target's layers with a window")  # no adapter has any: a guard
        batch = len(self.segments)
        query, key, value = (
            heads.unflatten(0, (batch, -1)).transpose(1, 2) for heads in (query, *cache.heads.chunk(2, 1))
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.groups > 1)
        return mixed.transpose(1, 2).flatten(2).flatten(0, 1)


@torch.inference_mode()
def whole(target: LlamaTarget, ids: Tensor) -> tuple[Tensor, Tensor]:
    """ids [B, T] int64 -> normed hidden states [B, T, H] and features [B, T, F], in the target's dtype.

    The target has `prefill` and `verify` for the engine; this is its forward (`LlamaTarget._forward`) at another place.
    """
    batch, length = ids.shape
    segments = [Segment(row, 0, row * length, length) for row in range(batch)]
    positions = torch.arange(length, device=ids.device).repeat(batch)
    config = target.config
    place = WholePlace(segments, positions, target.rope, None, config.num_heads // config.num_kv_heads)
    held: Any = Held(target.spec.dtype)
    cache: KVCache = held
    hidden, features = target._forward(cache, ids.flatten(), place)
    return hidden.unflatten(0, (batch, length)), features.unflatten(0, (batch, length))
