"""Where the rows of a forward stand, and what depends on it: rotary turns, cache writes, attention.

Two kinds: on a CPU sequences lie one after another without padding, and the host knows their lengths; on a GPU they are
padded to one number of rows, and everything is read from device tensors, so that a CUDA graph can hold it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ddtree import kernels
from ddtree.kernels import AttentionRows, AttentionWorkspace, HeadNorms
from ddtree.layers.attention import attend_segments, attention_mask
from ddtree.layers.cache import KVCache, Segment
from ddtree.layers.norm import RMSNorm
from ddtree.layers.rope import Rope


@dataclass(frozen=True)
class Heads:
    """The heads of a projection's columns: queries first, then keys, then values."""

    queries: int
    kv: int
    dim: int
    query_norm: RMSNorm | None = None
    key_norm: RMSNorm | None = None


class Place(Protocol):
    """What a layer asks of the place of its rows."""

    @property
    def few(self) -> bool:
        """Whether they are the rows of a round, see Linear."""

    def project(self, cache: KVCache | None, layer: int, columns: Tensor, heads: Heads) -> Tensor | None:
        """Norm and turn the heads in `columns` [M, (queries + 2 kv) * hd], and write keys and values into the cache.

        Returns: the queries in the dtype of `columns` (shape of its own), None where there are none.
        """

    def attend(self, cache: KVCache, layer: int, query: Tensor, window: int | None, causal: bool) -> Tensor:
        """Attention of the rows to the context and each other -> [M, heads * hd]. causal counts for blocks alone."""


@dataclass
class HostPlace:
    """Sequences one after another; their lengths are known to the host."""

    few: ClassVar[bool] = False
    segments: Sequence[Segment]
    positions: Tensor  # [M] int64
    rope: Rope
    visible: Sequence[Tensor] | None  # [1, size, size] bool per segment: which rows a row sees; None: a block
    groups: int
    _turns: Tensor | None = None
    _masks: dict[tuple[int | None, bool], list[Tensor | None]] = field(default_factory=dict)

    def project(self, cache: KVCache | None, layer: int, columns: Tensor, heads: Heads) -> Tensor | None:
        """See Place.project. The queries: [M, heads, hd]."""
        if self._turns is None:
            self._turns = self.rope.turns(self.positions)
        states = columns.float().unflatten(-1, (-1, heads.dim))  # [M, queries + 2 kv, hd]
        turned = heads.queries + heads.kv
        states = _normed(states, heads)
        self.rope.apply_(states[:, :turned], self._turns)
        if cache is not None:
            cache.write(layer, self.segments, states[:, heads.queries :])
        return states[:, : heads.queries].to(columns.dtype) if heads.queries else None

    def attend(self, cache: KVCache, layer: int, query: Tensor, window: int | None, causal: bool) -> Tensor:
        """See Place.attend."""
        if (window, causal) not in self._masks:
            self._masks[window, causal] = [
                self._mask(index, query.dtype, window, causal) for index in range(len(self.segments))
            ]
        return attend_segments(query, cache, layer, self.segments, self._masks[window, causal])

    def _mask(self, index: int, dtype: torch.dtype, window: int | None, causal: bool) -> Tensor | None:
        segment, device = self.segments[index], self.positions.device
        if self.visible is not None:
            visible = self.visible[index]
        else:
            visible = torch.ones(1, segment.size, segment.size, dtype=torch.bool, device=device)
            visible = visible.tril() if causal else visible
        start = torch.tensor([segment.start], device=device)
        return attention_mask(start, visible, segment.span, dtype, self.groups, window)


def _normed(states: Tensor, heads: Heads) -> Tensor:
    """states: [M, queries + 2 kv, hd] float32, with the norms of queries and keys applied."""
    if heads.query_norm is None and heads.key_norm is None:
        return states
    query, key, value = states.split([heads.queries, heads.kv, heads.kv], 1)
    query = query if heads.query_norm is None else heads.query_norm(query, torch.float32)
    key = key if heads.key_norm is None else heads.key_norm(key, torch.float32)
    return torch.cat([query, key, value], 1)


@dataclass(kw_only=True)
class PromptPlace(HostPlace):
    """A piece of one sequence's prompt on a GPU: what follows a projection is one launch, as it is in a round."""

    rows: AttentionRows
    turns: Tensor  # [positions, 1, hd/2] complex64, of all positions

    def project(self, cache: KVCache | None, layer: int, columns: Tensor, heads: Heads) -> Tensor | None:
        """See Place.project. The queries: [M, heads, hd]."""
        query = _write_heads(columns, None if cache is None else cache.data[layer], self.rows, self.turns, heads)
        return None if query is None else query.flatten(0, 1)


@dataclass
class DevicePlace:
    """Padded sequences, told in device tensors; a row that stands for nothing is computed and written as scratch."""

    rows: AttentionRows
    turns: Tensor  # [positions, 1, hd/2] complex64, of all positions
    work: AttentionWorkspace | None  # None where nothing attends
    few: bool = True

    def project(self, cache: KVCache | None, layer: int, columns: Tensor, heads: Heads) -> Tensor | None:
        """See Place.project. The queries: [B, N, heads, hd]."""
        return _write_heads(columns, None if cache is None else cache.data[layer], self.rows, self.turns, heads)

    def attend(self, cache: KVCache, layer: int, query: Tensor, window: int | None, causal: bool) -> Tensor:
        """See Place.attend."""
        assert self.work is not None
        rows = self.rows
        if rows.ancestors is None and causal:
            rows = AttentionRows(rows.slot, rows.start, causal=True)
        return kernels.tree_attention(query, cache.data[layer], rows, self.work, window)


def _write_heads(
    columns: Tensor, data: Tensor | None, rows: AttentionRows, turns: Tensor, heads: Heads
) -> Tensor | None:
    """Place.project by the kernel; the queries: [B, N, heads, hd]. data: one layer of KVCache.data."""
    eps = 0.0
    for norm in (heads.query_norm, heads.key_norm):
        eps = norm.squares / heads.dim if norm is not None else eps
    norms = HeadNorms(
        None if heads.query_norm is None else heads.query_norm.scale,
        None if heads.key_norm is None else heads.key_norm.scale,
        eps,
    )
    return kernels.write_heads(columns, data, rows, turns, norms)


@dataclass
class Workspaces:
    """Attention memory by shape, kept: a captured graph goes on using it.

    Forwards run one after another, so all shapes lie in one piece of memory. For a shape that is too large for it there
    is a new one of at least twice the size: so all pieces, which graphs go on using, are less than twice the last.
    """

    invariant: bool = True
    _made: dict[tuple[int, ...], AttentionWorkspace] = field(default_factory=dict)
    _memory: Tensor | None = None  # [numbers] float32, the largest piece

    def get(self, batch: int, rows: int, heads: Heads, cache: KVCache) -> AttentionWorkspace:
        """The workspace of B sequences of N rows over this cache."""
        key = (batch, rows, heads.queries, cache.length)
        if key not in self._made:
            query = torch.empty(batch, rows, heads.queries, heads.dim, dtype=cache.data.dtype, device="meta")
            memory = self._piece(AttentionWorkspace.floats(query, cache.data[0]), cache.data.device)
            self._made[key] = AttentionWorkspace.allocate(query, cache.data[0], invariant=self.invariant, memory=memory)
        return self._made[key]

    def _piece(self, count: int, device: torch.device) -> Tensor:
        """Memory for so many numbers."""
        least = 0 if self._memory is None else len(self._memory)
        if self._memory is None or count > least:
            self._memory = torch.empty(max(count, 2 * least), dtype=torch.float32, device=device)
        return self._memory
