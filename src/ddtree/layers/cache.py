"""Keys and values of the committed context, with the rows of the current forward behind it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class KVCache:
    """One tensor for all layers. Slot j of a sequence holds absolute position j; slots past the committed length are
    scratch: a forward writes its rows there, and a commit moves the accepted ones to the front.

    It is zeroed once, since a masked NaN in never-written memory would still poison attention.
    """

    data: Tensor  # [L, B, 2 * kv_heads, T, head_dim]: keys' heads, then values'; dense per head, as attention reads

    @classmethod
    def allocate(
        cls, layers: int, batch: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> "KVCache":
        """slots: positions per sequence, scratch included."""
        return cls(torch.zeros(layers, batch, 2 * kv_heads, slots, head_dim, dtype=dtype, device=device))

    @property
    def slots(self) -> int:
        """Positions per sequence, scratch included."""
        return self.data.shape[3]

    def sequence(self, index: int) -> "KVCache":
        """A view of one sequence, as a cache of batch size 1."""
        return KVCache(self.data[:, index : index + 1])

    def place(self, start: Tensor, count: int) -> tuple[Tensor, Tensor] | int:
        """Where `count` new rows of each sequence go: computed once a forward, used by every layer.

        start: [B] int64. A single sequence on a CPU is a plain slice, several times cheaper than an index.
        """
        if self.data.shape[1] == 1 and start.device.type == "cpu":
            return int(start[0])
        batch = torch.arange(self.data.shape[1], device=start.device).unsqueeze(1)
        return batch, start.unsqueeze(1) + torch.arange(count, device=start.device)

    def write(self, layer: int, place: tuple[Tensor, Tensor] | int, heads: Tensor) -> None:
        """heads: [B, N, 2 * kv_heads, hd], any float dtype."""
        if isinstance(place, int):
            self.data[layer, :, :, place : place + heads.shape[1]].copy_(heads.transpose(1, 2))
        else:
            self.data[layer].transpose(1, 2).index_put_(place, heads.to(self.data.dtype))

    def read(self, layer: int, span: int) -> tuple[Tensor, Tensor]:
        """Keys and values of slots 0 .. span-1: two views [B, kv_heads, span, hd]."""
        keys, values = self.data[layer, :, :, :span].chunk(2, dim=1)
        return keys, values

    def commit(self, path: Tensor, position: Tensor) -> None:
        """Keep the rows on a path, in order, from `position`; rows off it stay as scratch.

        path: [B, M] int64 rows of the last forward, the root (row 0) first, -1 behind them; position: [B] int64.
        """
        order = torch.arange(path.shape[1], device=path.device)
        kept = path >= 0
        if path.device.type == "cpu" and bool(((path == order) | ~kept).all()):
            return  # the rows already lie where they belong: a chain, or no accepted row
        batch = torch.arange(path.shape[0], device=path.device).unsqueeze(1)
        source = position.unsqueeze(1) + path.clamp(min=0)
        target = position.unsqueeze(1) + order * kept  # what is not on the path moves the root onto itself
        tokens = self.data.transpose(2, 3)  # [L, B, T, 2 * kv_heads, hd]
        tokens[:, batch, target] = tokens[:, batch, source]
