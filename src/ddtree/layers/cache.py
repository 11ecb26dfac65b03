"""Keys and values of the committed context of many sequences, with the rows of the current forward behind it."""

import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from ddtree import kernels
from ddtree.kernels.backend import usable


@dataclass(frozen=True)
class Segment:
    """One sequence's rows in a forward whose rows lie one sequence after another, without padding."""

    slot: int  # where in the cache
    start: int  # position of its first row = its committed length
    first: int  # index of its first row in the forward
    size: int

    @property
    def span(self) -> int:
        """Keys its rows can see: the committed ones and their own."""
        return self.start + self.size

    @property
    def rows(self) -> slice:
        """Its rows in the forward."""
        return slice(self.first, self.first + self.size)


@dataclass
class KVCache:
    """One tensor for all layers and sequences; a view of it, for a batch, names the slots of the batch's sequences.

    Position j of a slot holds absolute position j of its sequence; positions past the committed length are scratch: a
    forward writes its rows there, and a commit moves the accepted ones to the front. It is zeroed once, since a masked
    NaN in never-written memory would still poison attention.
    """

    data: Tensor  # [L, S, 2 * kv_heads, T, head_dim]: keys' heads, then values'; dense per head, as attention reads
    slots: tuple[int, ...] = field(default=())  # the slots of this view's sequences, in the batch's order
    index: Tensor | None = field(default=None)  # the same [B] int64 on the device, made when it is first asked for

    def __post_init__(self) -> None:
        self.slots = self.slots or tuple(range(self.data.shape[1]))

    @property
    def slot(self) -> Tensor:
        """The slots as a device tensor [B] int64."""
        if self.index is None:
            self.index = torch.tensor(self.slots, device=self.data.device)
        return self.index

    @classmethod
    def allocate(
        cls,
        layers: int,
        slots: int,
        length: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "KVCache":
        """length: positions per slot, scratch included. On a CPU, memory is taken page by page as it is written.

        Raises MemoryError, which says how much was asked for.
        """
        shape = (layers, slots, 2 * kv_heads, length, head_dim)
        try:
            return cls(_zeros(shape, dtype, device))
        except (OSError, MemoryError, RuntimeError) as error:
            asked = prod(shape) * dtype.itemsize / 2**30
            raise MemoryError(f"{asked:.1f} GiB on {device}: {error}") from error

    @property
    def length(self) -> int:
        """Positions per slot, scratch included."""
        return self.data.shape[3]

    def view(self, slots: Sequence[int]) -> "KVCache":
        """The same memory for a batch whose sequences lie in these slots of this view."""
        return KVCache(self.data, tuple(self.slots[slot] for slot in slots))

    def segments(self, starts: Sequence[int], sizes: Sequence[int]) -> list[Segment]:
        """Where the rows of a forward go: sizes[b] rows of sequence b behind its starts[b] committed positions."""
        found, first = [], 0
        for slot, start, size in zip(self.slots, starts, sizes, strict=True):
            found.append(Segment(slot, start, first, size))
            first += size
        return found

    def write(self, layer: int, segments: Sequence[Segment], heads: Tensor) -> None:
        """heads: [M, 2 * kv_heads, hd], any float dtype, the segments' rows one after another."""
        for s in segments:
            self.data[layer, s.slot, :, s.start : s.span].copy_(heads[s.rows].transpose(0, 1))

    def read(self, layer: int, segment: Segment) -> tuple[Tensor, Tensor]:
        """Keys and values that a segment's rows may see: two views [1, kv_heads, span, hd]."""
        keys, values = self.data[layer, segment.slot : segment.slot + 1, :, : segment.span].chunk(2, dim=1)
        return keys, values

    def commit(self, path: Tensor, position: Tensor) -> None:
        """Keep the rows on a path, in order, from `position`; rows off it stay as scratch.

        path: [B, M] int64 rows of the last forward, the root (row 0) first, -1 behind them; position: [B] int64.
        """
        if usable(path.device):
            kernels.commit(self.data, self.slot, path, position)
            return
        order = torch.arange(path.shape[1], device=path.device)
        kept = path >= 0
        if path.device.type == "cpu" and bool(((path == order) | ~kept).all()):
            return  # the rows already lie where they belong: a chain, or no accepted row
        slot = self.slot.unsqueeze(1)  # [B, 1]
        source = position.unsqueeze(1) + path.clamp(min=0)
        target = position.unsqueeze(1) + order * kept  # what is not on the path moves the root onto itself
        tokens = self.data.transpose(2, 3)  # [L, S, T, 2 * kv_heads, hd]
        tokens[:, slot, target] = tokens[:, slot, source]

    def copy(self, source: int, target: int, count: int) -> None:
        """Give slot `target` the first `count` positions of slot `source` (slots of the whole cache)."""
        self.data[:, target, :, :count] = self.data[:, source, :, :count]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeroed memory. torch.zeros writes every page; of a cache planned for the longest context most are never used."""
    if device.type != "cpu" or not prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize)  # zeroed by the system, page by page
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would take the memory of thousands of positions at once
    return torch.frombuffer(memory, dtype=dtype).view(shape)
