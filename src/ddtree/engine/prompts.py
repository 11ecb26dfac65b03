"""Computes pieces of prompts; on a GPU short ones as graphs, since their launches would take longer than the work."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ddtree.drafter import Drafter
from ddtree.engine.device import deliver
from ddtree.engine.graphs import Recorded, aside
from ddtree.engine.slots import SlotStore
from ddtree.layers import KVCache
from ddtree.target import Target

log = logging.getLogger("ddtree.engine")

PADDED = (16, 32, 64, 128)  # rows that short pieces are padded to on a GPU
SHORT = 256  # tokens; longer pieces are launched as they are: one forward is then as fast as several (docs/log.md)
_KINDS = (1, 2, 16)  # a kernel is compiled for a number of rows that is 1, one that 16 divides, and any other


class Prompts:
    """Pieces as they come, as many rows as there are."""

    def __init__(self, target: Target, drafter: Drafter | None, store: SlotStore) -> None:
        self._target, self._drafter, self._store = target, drafter, store

    def sizes(self, chunk: int) -> list[int]:
        """Pieces that, computed once, leave no kernel to be compiled for others of up to `chunk` tokens."""
        return [size for size in sorted({*_KINDS, chunk}) if size <= self._store.length]

    def forward(self, slot: int, tokens: Sequence[int], start: int) -> Tensor:
        """Part of a prompt, from position `start`, into both caches of a slot. Returns: the last row's logits [1, V],
        valid until the next call.
        """
        device, slots, store = self._target.spec.device, [slot], self._store
        ids, position = torch.tensor([list(tokens)], device=device), torch.tensor([start], device=device)
        features, logits = self._target.prefill(store.cache.view(slots), ids, position)
        if self._drafter is not None and store.drafter_cache is not None:
            self._drafter.append(store.drafter_cache.view(slots), features, position)
        return logits


@dataclass
class _Padded:
    """The static tensors of one number of rows, and the graph over them."""

    told: Tensor  # [3 + rows] int64: slot, position, last row, token ids
    cache: KVCache
    drafter_cache: KVCache | None
    graph: Recorded[Tensor] | None = None  # gives the logits [1, V]


class DevicePrompts(Prompts):
    """Short pieces are padded, so that a graph can hold them; rows behind a piece are scratch in both caches."""

    def __init__(self, target: Target, drafter: Drafter | None, store: SlotStore, graphs: bool) -> None:
        """graphs: whether to capture; else the same kernels are launched one by one."""
        super().__init__(target, drafter, store)
        self._graphs = graphs
        self._made: dict[int, _Padded] = {}
        self._pool: Any = None  # of what a forward takes beside its logits; the graphs share it

    def sizes(self, chunk: int) -> list[int]:
        """See Prompts.sizes. The largest comes first: smaller graphs find their memory there."""
        kinds = sorted({size + more for size in (PADDED[-1], SHORT) for more in _KINDS[1:]} | {chunk})
        longer = [size for size in kinds if PADDED[-1] < size <= chunk and not self._is_cut(size, 0)]
        return [size for size in [*reversed(PADDED), *longer] if size <= self._store.length]

    def forward(self, slot: int, tokens: Sequence[int], start: int) -> Tensor:
        """See Prompts.forward."""
        most = PADDED[-1]
        if self._is_cut(len(tokens), start):
            for begin in range(0, len(tokens) - most, most):
                self.forward(slot, tokens[begin : begin + most], start + begin)
            begin = (len(tokens) - 1) // most * most
            return self.forward(slot, tokens[begin:], start + begin)
        rows = next((rows for rows in PADDED if rows >= len(tokens) and start + rows <= self._store.length), None)
        if rows is None:
            return super().forward(slot, tokens, start)
        if rows not in self._made:
            self._made[rows] = self._allocate(rows)
        padded = self._made[rows]
        if self._graphs and padded.graph is None:
            self._capture(padded)
        padding = [0] * (rows - len(tokens))
        deliver(padded.told, torch.tensor([slot, start, len(tokens) - 1, *tokens, *padding]))
        if padded.graph is None:
            return self._run(padded)
        padded.graph.replay()
        return padded.graph.result

    def _is_cut(self, size: int, start: int) -> bool:
        """Whether a piece goes as several padded ones, the last of which has room behind it."""
        return PADDED[-1] < size <= SHORT and start + size <= self._store.length - PADDED[-1]

    def _allocate(self, rows: int) -> _Padded:
        store = self._store
        told = torch.zeros(3 + rows, dtype=torch.int64, device=self._target.spec.device)
        told[0] = store.spare
        caches = [
            None if cache is None else replace(cache, slots=(store.spare,), index=told[:1])
            for cache in (store.cache, store.drafter_cache)
        ]
        assert caches[0] is not None
        return _Padded(told, caches[0], caches[1] if self._drafter is not None else None)

    def _run(self, padded: _Padded) -> Tensor:
        position, last, ids = padded.told[1:2], padded.told[2:3], padded.told[3:].unsqueeze(0)
        features, logits = self._target.prefill(padded.cache, ids, position, last)
        if self._drafter is not None and padded.drafter_cache is not None:
            self._drafter.append(padded.drafter_cache, features, position)
        return logits

    def _capture(self, padded: _Padded) -> None:
        """Record a forward, after some that compile kernels and allocate what stays. All of it in the spare slot."""
        log.debug("a prompt's piece of %d rows is captured", len(padded.told) - 3)
        with aside():
            for _ in range(2):
                self._run(padded)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        padded.graph = Recorded(lambda: self._run(padded), self._pool)
