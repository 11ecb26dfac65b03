"""Rounds as CUDA graphs: one where the device chooses by itself, two with the host's part in between where it cannot.

A round that the host has a part in is cut where the host knows enough: the rows of the next round are drafted and built
behind this round's commit, in the same graph. So one copy brings this round's report and the next round's rows, the
other graph, `verify`, is launched at once, and the host follows grammars while the target verifies:

    device   | settle r: choose, accept, commit; draft, build r+1 | verify r+1          | settle r+1 ...
    host                                               report r, rows r+1 -> text, masks |

Nothing is committed by `verify`, so one that was launched for sequences that left meanwhile is simply dropped.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ddtree.engine.consult import read_trees, tree_table
from ddtree.engine.observer import Unobserved
from ddtree.engine.ops import DeviceOps
from ddtree.engine.round import Batch, Verdict, propose, run_round, settle, verify

log = logging.getLogger("ddtree.engine")
T = TypeVar("T")


@contextmanager
def recording(graph: "torch.cuda.CUDAGraph", pool: Any = None) -> Iterator[None]:
    """Launches within it become the graph. Nothing is freed meanwhile: a tensor or a graph that Python collects in the
    middle of a recording would invalidate it.
    """
    collects = gc.isenabled()
    before = torch.cuda.current_stream() if torch.cuda.is_available() else None
    # Where a recording cannot be ended either, torch would leave its stream the current one.
    with torch.cuda.stream(before), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        gc.disable()  # after torch's own collection, which comes first
        try:
            yield
        finally:
            if collects:
                gc.enable()


class Recorded(Generic[T]):
    """A captured graph, and the tensors that every replay writes."""

    def __init__(self, step: Callable[[], T], pool: Any) -> None:
        """step: launches it, without waiting for anything; pool: of memory, shared with graphs that take turns."""
        self._graph = torch.cuda.CUDAGraph()
        with recording(self._graph, pool):
            self.result = step()

    def replay(self) -> None:
        """Launch it."""
        self._graph.replay()


class Letter:
    """A tensor's way to the host: one copy into pinned memory, and an event behind it."""

    def __init__(self) -> None:
        self._there: Tensor | None = None
        self._ready: torch.cuda.Event | None = None

    def send(self, tensor: Tensor) -> None:
        """Behind everything that was launched; what was sent before is lost. tensor: int64, of one shape always."""
        if tensor.device.type != "cuda":
            self._there = tensor.clone()
            return
        if self._there is None:
            self._there, self._ready = torch.empty(tensor.shape, dtype=torch.int64, pin_memory=True), torch.cuda.Event()
        assert self._ready is not None
        self._there.copy_(tensor, non_blocking=True)
        self._ready.record()

    def read(self) -> list[list[int]]:
        """Wait for it; its rows."""
        if self._ready is not None:
            self._ready.synchronize()
        assert self._there is not None
        rows: list[list[int]] = self._there.tolist()
        return rows


class WholeRound:
    """A round in one graph."""

    def __init__(self, batch: Batch, pool: Any) -> None:
        """Capture it."""
        with rehearsed(batch) as quiet:
            self._graph: Recorded[Verdict] = Recorded(lambda: run_round(quiet), pool)
        self._letters = [Letter(), Letter()]  # one is read while the other is written
        self._turn = 0
        self.logits = self._graph.result.logits  # valid until the next launch

    def launch(self) -> Letter:
        """Launch it, and the copy of its report."""
        self._graph.replay()
        self._turn = 1 - self._turn
        letter = self._letters[self._turn]
        letter.send(self._graph.result.report)
        return letter


class SplitRound:
    """A round in two graphs, and a third one that lays the first rows of a batch."""

    def __init__(self, batch: Batch, pool: Any) -> None:
        """Capture them. The batch's ops are told by the host."""
        assert isinstance(batch.ops, DeviceOps)
        assert batch.ops.host is not None
        self._host = batch.ops.host
        with rehearsed(batch) as quiet:
            self._first: Recorded[Tensor] = Recorded(lambda: _lay(quiet), pool)
            self._verify = Recorded(lambda: verify(quiet), pool)
            self._settle: Recorded[Tensor] = Recorded(self._settles(quiet), pool)
        self._columns = self._first.result.shape[1]  # of the rows; the report lies behind them
        self._rows, self._both = Letter(), Letter()
        self._latest = self._rows
        self.laid = False  # the rows of the next round are there
        self.logits = self._verify.result.logits  # valid until the next launch

    def _settles(self, batch: Batch) -> Callable[[], Tensor]:
        verified = self._verify.result

        def step() -> Tensor:
            report = settle(batch, verified).report
            return torch.cat([_lay(batch), report], 1)

        return step

    def launch(self) -> None:
        """Verify: the rows that the last `settle` left, or a batch's first ones."""
        if not self.laid:
            self._first.replay()
            self._rows.send(self._first.result)
            self._latest, self.laid = self._rows, True
        self._verify.replay()

    def settle(self, batch: Batch) -> None:
        """The host's part, then the rest of the round and the rows of the next one."""
        trees = read_trees([row[: self._columns] for row in self._latest.read()])
        self._host.fill(batch.lanes, trees)
        self._settle.replay()
        self._both.send(self._settle.result)
        self._latest = self._both

    def report(self) -> list[list[int]]:
        """Of the round that was settled last; waits for it."""
        return [row[self._columns :] for row in self._both.read()]


def _lay(batch: Batch) -> Tensor:
    propose(batch)
    return tree_table(batch.state)


@contextmanager
def rehearsed(batch: Batch) -> Iterator[Batch]:
    """The batch after two rounds without the host's part, which compile kernels and allocate what stays. All sequences
    are finished meanwhile, so nothing is committed; what a round moves is put back at the end. Nobody observes it.
    """
    quiet, started = replace(batch, observer=Unobserved()), time.perf_counter()
    with at_rest(quiet):
        with aside():
            for _ in range(2):
                rehearse(quiet)
        yield quiet
    log.debug("captured in %.3f s", time.perf_counter() - started)


def rehearse(batch: Batch) -> None:
    """A round that asks nobody."""
    propose(batch)
    settle(batch, verify(batch))


@contextmanager
def at_rest(batch: Batch) -> Iterator[None]:
    """All sequences are finished; everything that a round moves is put back."""
    state = batch.state
    moved = (state.tokens, state.position, state.remaining, state.done)
    saved = [tensor.clone() for tensor in moved]
    state.done.fill_(True)
    try:
        yield
    finally:
        for tensor, value in zip(moved, saved, strict=True):
            tensor.copy_(value)


@contextmanager
def aside() -> Iterator[None]:
    """On a stream of its own, as a capture's forerunners have to be. What comes after it waits for all that was
    launched there, also where it ends in an error: state, workspaces and counters are those of the next round.
    """
    if not torch.cuda.is_available():
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        torch.cuda.current_stream().wait_stream(stream)
