"""Runs rounds of a batch: at once on a CPU; as a captured graph, one round ahead of the host, on a GPU."""

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ddtree.drafter import Drafter
from ddtree.engine.context import DeviceTexts, SequenceContext
from ddtree.engine.observer import Observer, StageTimer, Unobserved
from ddtree.engine.ops import DeviceOps, HostOps
from ddtree.engine.request import Request
from ddtree.engine.round import Batch, Lane, Verdict, run_round
from ddtree.engine.shapes import Shape, prepared_shapes
from ddtree.engine.slots import SlotStore
from ddtree.layers import KVCache
from ddtree.target import Target
from ddtree.tree import RoundState

log = logging.getLogger("ddtree.engine")

NO_TOKEN = -2  # fills the lists of end ids


@dataclass
class Pending:
    """A round that was launched; on a GPU it may still run."""

    logits: Tensor  # [B, N, V]; of a captured round valid until the next launch
    path: Tensor  # [B, D + 1] int64, likewise
    _report: Tensor
    _ready: "torch.cuda.Event | None" = None

    def report(self) -> list[list[int]]:
        """Waits for the round's end; see `read_report`."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._report.tolist()


class HostRunner:
    """A new batch for every set of sequences, rounds run at once."""

    def __init__(self, target: Target, drafter: Drafter | None, store: SlotStore) -> None:
        self._target, self._drafter, self._store = target, drafter, store

    def make(self, requests: Sequence[Request], observer: Observer) -> Batch:
        """The running sequences as tensors."""
        device, lanes = self._target.spec.device, [request.lane for request in requests]
        rows, depth = max(lane.rows for lane in lanes), max(lane.depth for lane in lanes)
        most = max(len(request.ends) for request in requests)
        slots = [request.slot.index for request in requests if request.slot is not None]
        store = self._store
        batch = Batch(
            target=self._target,
            target_cache=store.cache.view(slots),
            drafter=self._drafter,
            drafter_cache=store.drafter_cache.view(slots) if self._drafter and store.drafter_cache else None,
            lanes=lanes,
            state=RoundState.allocate(len(requests), rows, depth, device),
            ends=torch.full((len(requests), most), NO_TOKEN, dtype=torch.int64, device=device),
            observer=observer,
            ops=HostOps(),
        )
        fill(batch, requests)
        return batch

    def runs_ahead(self, batch: Batch) -> bool:
        """Whether a round may be launched before the one before it was read."""
        return False

    def prepare(self, lane: Lane, most: int) -> None:
        """Nothing: a host's rounds take nothing that could be made before."""

    def follow(self, batch: Batch, positions: Sequence[int]) -> None:
        """Nothing: a host looks at the positions in every round."""

    def launch(self, batch: Batch) -> Pending:
        """Run a round."""
        verdict = run_round(batch)
        return Pending(verdict.logits, batch.state.path, verdict.report)


def fill(batch: Batch, requests: Sequence[Request]) -> None:
    """Write the sequences' places into the batch's tensors; lanes behind them are done."""
    state, count = batch.state, len(requests)
    pad = state.tokens.shape[0] - count

    def column(values: list[int], padding: int = 0) -> Tensor:
        return torch.tensor(values + [padding] * pad, dtype=torch.int64)

    state.tokens[:, 0] = column([request.tokens[-1] for request in requests]).to(state.tokens.device)
    state.position.copy_(column([request.position for request in requests]))
    state.remaining.copy_(column([request.remaining for request in requests]))
    state.done.copy_(torch.tensor([False] * count + [True] * pad))
    width = batch.ends.shape[1]
    ends = [[*request.ends, *[NO_TOKEN] * (width - len(request.ends))] for request in requests]
    batch.ends.copy_(torch.tensor(ends + [[NO_TOKEN] * width] * pad, dtype=torch.int64).view(count + pad, width))


@dataclass
class Captured:
    """The static batch of a shape, and its graph."""

    shape: Shape
    batch: Batch
    ops: DeviceOps
    graph: "torch.cuda.CUDAGraph | None" = None
    verdict: Verdict | None = None
    pinned: list[Tensor] = field(default_factory=list)  # two reports on the host: one is read while one is written
    turn: int = 0
    drafting: list[bool] = field(default_factory=list)  # who drafts, as the plan says


class DeviceRunner:
    """Batches by shape, each with static tensors; rounds as CUDA graphs where that is possible and wanted."""

    def __init__(self, target: Target, drafter: Drafter | None, store: SlotStore, graphs: bool, context: int) -> None:
        """context: the most tokens of a sequence, prompt and answer."""
        self._target, self._drafter, self._store, self._graphs = target, drafter, store, graphs
        self._context = context
        self._made_texts: DeviceTexts | None = None
        self._host = HostRunner(target, drafter, store)
        self._made: dict[Shape, Captured] = {}
        self._current: Captured | None = None
        # Of what a round takes beside its results; graphs share it, since they are replayed one after another.
        self._pool: Any = None

    def make(self, requests: Sequence[Request], observer: Observer) -> Batch:
        """The static batch of the sequences' shape, told of them; a host's batch for trees beyond the kernels."""
        lanes = [request.lane for request in requests]
        shape = Shape.of(lanes, len(lanes), max(len(request.ends) for request in requests))
        if not shape.fits:
            self._current = None
            if self._made_texts is not None:
                self._made_texts.give_back(*_texts_of(requests))
            return self._host.make(requests, observer)
        captured = self._current = self._static_batch(shape)
        self._tell(captured, requests, observer)
        return captured.batch

    def prepare(self, lane: Lane, most: int) -> None:
        """Before anybody waits: capture the rounds of up to `most` sequences such as this one, by `prepared_shapes`.

        Without graphs the kernels are compiled. The rounds run on the spare slot, for sequences that are done.
        """
        for shape in prepared_shapes(lane, most):
            captured = self._static_batch(shape)
            self._tell(captured, [], Unobserved())
            captured.batch.lanes = [lane]
            if self._graphs:
                self._capture(captured)
            else:
                _warm_up(captured.batch)

    def runs_ahead(self, batch: Batch) -> bool:
        """Whether a round may be launched before the one before it was read: where the host has no part in it."""
        return self._current is not None and self._alone(batch)

    def launch(self, batch: Batch) -> Pending:
        """Launch a round, and the copy of its report."""
        captured = self._current
        if captured is None:
            return self._host.launch(batch)
        if self._replays(batch):
            if captured.graph is None:
                log.debug("a round is captured while its requests wait: %s", captured.shape)
                self._capture(captured)
            assert captured.graph is not None
            assert captured.verdict is not None
            captured.graph.replay()
            verdict = captured.verdict
        else:
            verdict = run_round(batch)
        return self._pending(captured, verdict)

    def follow(self, batch: Batch, positions: Sequence[int]) -> None:
        """Positions have moved: a sequence past its drafter's own context decodes plainly from now on."""
        captured = self._current
        if captured is not None:
            drafting = [lane.drafts(position) for lane, position in zip(batch.lanes, positions, strict=True)]
            if drafting != captured.drafting:
                captured.ops.write_plan(batch.lanes, positions)
                captured.drafting = drafting

    def _replays(self, batch: Batch) -> bool:
        """Whether a round is one graph. It has no stages: who wants to time them gets single launches."""
        return self._graphs and self._alone(batch) and not isinstance(batch.observer, StageTimer)

    def _alone(self, batch: Batch) -> bool:
        """Whether the device can choose every token by itself."""
        return all(lane.sampler.temperature is not None for lane in batch.lanes)

    @property
    def _texts(self) -> DeviceTexts:
        """Made with the first round that needs them."""
        if self._made_texts is None:
            self._made_texts = DeviceTexts(self._store.count + 1, self._context, self._target.spec.device)
        return self._made_texts

    def _static_batch(self, shape: Shape) -> Captured:
        if shape not in self._made:
            self._made[shape] = self._allocate(shape)
        return self._made[shape]

    def _allocate(self, shape: Shape) -> Captured:
        device, store = self._target.spec.device, self._store
        texts = self._texts.store if shape.context else None
        ops = DeviceOps.allocate(shape.batch, shape.width, shape.depth, shape.ranks, device, texts)
        slots = [0] * shape.batch
        batch = Batch(
            target=self._target,
            target_cache=_static(store.cache, slots),
            drafter=self._drafter,
            drafter_cache=_static(store.drafter_cache, slots) if self._drafter and store.drafter_cache else None,
            lanes=(),
            state=RoundState.allocate(shape.batch, shape.width, shape.depth, device),
            ends=torch.full((shape.batch, shape.ends), NO_TOKEN, dtype=torch.int64, device=device),
            observer=Unobserved(),
            ops=ops,
        )
        batch.state.lay_roots()
        return Captured(shape, batch, ops)

    def _tell(self, captured: Captured, requests: Sequence[Request], observer: Observer) -> None:
        batch, ops = captured.batch, captured.ops
        size = len(ops.seeds)
        batch.lanes, batch.observer = [request.lane for request in requests], observer
        slots = [request.slot.index for request in requests if request.slot is not None]
        slots += [self._store.spare] * (size - len(slots))
        for cache in (batch.target_cache, batch.drafter_cache):
            if cache is not None and cache.index is not None:
                cache.slots = tuple(slots)
                cache.index.copy_(torch.tensor(slots))
        fill(batch, requests)
        samplers: list[Lane] = list(batch.lanes)
        seeds = [lane.sampler.seed for lane in samplers] + [0] * (size - len(samplers))
        heat = [lane.sampler.temperature or 0.0 for lane in samplers] + [0.0] * (size - len(samplers))
        ops.seeds.copy_(torch.tensor(seeds, dtype=torch.int64))
        ops.temperatures.copy_(torch.tensor(heat, dtype=torch.float64))
        if captured.shape.context:
            self._texts.bring(*_texts_of(requests))
        positions = [request.position for request in requests]
        ops.write_plan(batch.lanes, positions)
        captured.drafting = [lane.drafts(position) for lane, position in zip(batch.lanes, positions, strict=True)]

    def _capture(self, captured: Captured) -> None:
        """Record a round, after some that compile kernels and allocate what stays."""
        batch = replace(captured.batch, observer=Unobserved())  # nobody takes a recording's stages for a round's
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            _warm_up(batch)
        torch.cuda.current_stream().wait_stream(stream)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with recording(graph, self._pool):
            captured.verdict = run_round(batch)
        captured.graph = graph

    def _pending(self, captured: Captured, verdict: Verdict) -> Pending:
        if verdict.report.device.type != "cuda":
            return Pending(verdict.logits, captured.batch.state.path, verdict.report)
        if not captured.pinned:
            captured.pinned = [torch.empty(verdict.report.shape, dtype=torch.int64, pin_memory=True) for _ in range(2)]
        captured.turn = 1 - captured.turn
        report = captured.pinned[captured.turn]
        report.copy_(verdict.report, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return Pending(verdict.logits, captured.batch.state.path, report, ready)


@contextmanager
def recording(graph: "torch.cuda.CUDAGraph", pool: Any = None) -> Iterator[None]:
    """Launches within it become the graph. Nothing is freed meanwhile: a tensor or a graph that Python collects in the
    middle of a recording would invalidate it.
    """
    collects = gc.isenabled()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        gc.disable()  # after torch's own collection, which comes first
        try:
            yield
        finally:
            if collects:
                gc.enable()


def _texts_of(requests: Sequence[Request]) -> tuple[list[SequenceContext | None], list[int]]:
    """The sequences' own texts, and their slots."""
    running = [(request.lane.text, request.slot.index) for request in requests if request.slot is not None]
    return [text for text, _ in running], [slot for _, slot in running]


def _static(cache: KVCache, slots: list[int]) -> KVCache:
    """A view whose slots lie in a tensor of its own, which stays where it is."""
    return replace(cache, slots=tuple(slots), index=torch.tensor(slots, device=cache.data.device))


def _warm_up(batch: Batch) -> None:
    """Two rounds of finished sequences, which commit nothing; everything that they move is put back."""
    state = batch.state
    moved = (state.tokens, state.position, state.remaining, state.done)
    saved = [tensor.clone() for tensor in moved]
    state.done.fill_(True)
    for _ in range(2):
        run_round(batch)
    for tensor, value in zip(moved, saved, strict=True):
        tensor.copy_(value)
