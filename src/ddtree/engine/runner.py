"""Runs rounds of a batch: at once on a CPU; as captured graphs, ahead of the host as far as it goes, on a GPU."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddtree.drafter import Drafter
from ddtree.engine.context import DeviceTexts, SequenceContext
from ddtree.engine.device import deliver
from ddtree.engine.graphs import Letter, SplitRound, WholeRound, at_rest, rehearse
from ddtree.engine.history import DeviceHistories
from ddtree.engine.observer import Observer, StageTimer, Unobserved
from ddtree.engine.ops import HostOps
from ddtree.engine.pressure import short, starved
from ddtree.engine.request import Request
from ddtree.engine.round import Batch, Lane, run_round
from ddtree.engine.sampling import RowSampler
from ddtree.engine.shapes import Shape, prepared_shapes
from ddtree.engine.slots import SlotStore
from ddtree.engine.static import NO_TOKEN, Captured, StaticBatches, allocate
from ddtree.target import Target
from ddtree.tree import RoundState

log = logging.getLogger("ddtree.engine")


@dataclass
class Pending:
    """A round that was launched, or its first part; on a GPU it may still run."""

    ran: str  # one of observer.WAYS
    logits: Tensor  # [B, N, V]; of a captured round valid until the next launch
    path: Tensor  # [B, D + 1] int64, likewise
    report: Callable[[], list[list[int]]]  # waits for the round's end; see `read_report`
    told: Callable[[], None] | None = None  # the host's part and what lies behind it; None: all is launched

    @property
    def waits(self) -> bool:
        """Whether a part of the round is still to be launched."""
        return self.told is not None

    def settle(self) -> None:
        """Do the host's part, where there is one, and launch what waits for it."""
        told, self.told = self.told, None
        if told is not None:
            told()


class HostRunner:
    """A new batch for every set of sequences, rounds run at once."""

    def __init__(self, target: Target, drafter: Drafter | None, store: SlotStore) -> None:
        self._target, self._drafter, self._store = target, drafter, store

    def make(self, requests: Sequence[Request], observer: Observer) -> Batch:
        """The running sequences as tensors."""
        device, lanes = self._target.spec.device, [request.lane for request in requests]
        rows, depth = max(lane.rows for lane in lanes), max(lane.depth for lane in lanes)
        most = max(len(request.ends) for request in requests)
        store, slots = self._store, _slots_of(requests)
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
        return Pending("host", verdict.logits, batch.state.path, verdict.report.tolist)


def fill(batch: Batch, requests: Sequence[Request]) -> None:
    """Write the sequences' places into the batch's tensors; lanes behind them are done."""
    state, count = batch.state, len(requests)
    pad = state.tokens.shape[0] - count

    def column(values: list[int], padding: int = 0) -> Tensor:
        return torch.tensor(values + [padding] * pad, dtype=torch.int64)

    deliver(state.tokens[:, 0], column([request.tokens[-1] for request in requests]))
    deliver(state.position, column([request.position for request in requests]))
    deliver(state.remaining, column([request.remaining for request in requests]))
    deliver(state.done, torch.tensor([False] * count + [True] * pad))
    width = batch.ends.shape[1]
    ends = [[*request.ends, *[NO_TOKEN] * (width - len(request.ends))] for request in requests]
    deliver(batch.ends, torch.tensor(ends + [[NO_TOKEN] * width] * pad, dtype=torch.int64).view(count + pad, width))


class DeviceRunner:
    """Batches by shape, each with static tensors; rounds as CUDA graphs where that is possible and wanted."""

    def __init__(self, target: Target, drafter: Drafter | None, store: SlotStore, graphs: bool, context: int) -> None:
        """context: the most tokens of a sequence, prompt and answer."""
        self._target, self._drafter, self._store, self._graphs = target, drafter, store, graphs
        self._context = context
        self._made_texts: DeviceTexts | None = None
        self._made_histories: DeviceHistories | None = None
        head = drafter.pairwise if drafter else None
        self._factors = None if head is None else head.factors(target.spec.dtype)
        self._host = HostRunner(target, drafter, store)
        self._made = StaticBatches(self._allocate, self._short)
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
            if self._made_histories is not None:
                self._made_histories.forget(_slots_of(requests))
            return self._host.make(requests, observer)
        self._current = None  # else its memory would stay where it is given up for this one
        captured = self._current = self._made.get(shape)
        self._tell(captured, requests, observer)
        return captured.batch

    def prepare(self, lane: Lane, most: int) -> None:
        """Before anybody waits: capture the rounds of up to `most` sequences such as this one, by `prepared_shapes`.

        Both kinds: grammars are common, too. Without graphs the kernels are compiled. The rounds run on the spare slot,
        for sequences that are done.
        """
        for shape in prepared_shapes(lane, most):
            captured = self._made.get(shape, stays=True)
            self._tell(captured, [], Unobserved())
            captured.batch.lanes = [lane]
            for ops in (captured.alone, captured.told):
                captured.batch.ops = ops
                if self._graphs:
                    self._capture(captured)
                else:
                    with at_rest(captured.batch):
                        rehearse(captured.batch)

    def runs_ahead(self, batch: Batch) -> bool:
        """Whether the next round, or its part before the host's, may be launched before this one was read."""
        return self._current is not None and (self._current.batch.ops is self._current.alone or self._replays(batch))

    def launch(self, batch: Batch) -> Pending:
        """Launch a round and the copy of its report, or the part of it that lies before the host's."""
        captured = self._current
        if captured is None:
            return self._host.launch(batch)
        path = batch.state.path
        if not self._replays(batch):
            verdict = run_round(batch)
            letter = Letter()
            letter.send(verdict.report)
            return Pending("launches", verdict.logits, path, letter.read)
        if not self._is_captured(captured):
            log.debug("a round is captured while its requests wait: %s", captured.shape)
            if not self._finds_memory(captured):
                return self.launch(batch)
        if batch.ops is captured.alone:
            assert captured.whole is not None
            return Pending("graph", captured.whole.logits, path, captured.whole.launch().read)
        split = captured.split
        assert split is not None
        split.launch()
        return Pending("two graphs", split.logits, path, split.report, partial(split.settle, batch))

    def follow(self, batch: Batch, positions: Sequence[int]) -> None:
        """Positions have moved: a sequence past its drafter's own context decodes plainly from now on."""
        captured = self._current
        if captured is not None:
            drafting = [lane.drafts(position) for lane, position in zip(batch.lanes, positions, strict=True)]
            if drafting != captured.drafting:
                captured.alone.write_plan(batch.lanes, positions)
                captured.drafting = drafting

    def _replays(self, batch: Batch) -> bool:
        """Whether rounds are graphs. They have no stages: who wants to time them gets single launches."""
        starved = self._current is not None and self._current.starved
        return self._graphs and not starved and not isinstance(batch.observer, StageTimer)

    def _is_captured(self, captured: Captured) -> bool:
        return (captured.whole if captured.batch.ops is captured.alone else captured.split) is not None

    def _finds_memory(self, captured: Captured) -> bool:
        """Capture a shape, at the cost of others that nobody prepared. If even that is too much: say so, once."""
        error = self._try_to_capture(captured)
        if error is not None and self._made.give_up(captured):
            error = self._try_to_capture(captured)
        if error is not None:
            captured.starved = True
            log.warning(
                "the memory does not suffice to capture rounds of %d x %d rows: they are launched one by one, which is"
                " slower (%s); lower max_running_requests, max_model_len or the request's tree_budget",
                captured.shape.batch, captured.shape.width, error,
            )  # fmt: skip
        return not captured.starved

    def _try_to_capture(self, captured: Captured) -> str | None:
        """What was said where there was no memory. Not the error, which keeps all that the attempt had allocated."""
        try:
            self._capture(captured)
        except torch.OutOfMemoryError as error:
            return str(error)
        return None

    def _capture(self, captured: Captured) -> None:
        """The kind of round that the batch's ops are for. Raises torch.OutOfMemoryError."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            if captured.batch.ops is captured.alone:
                captured.whole = WholeRound(captured.batch, self._pool)
            else:
                captured.split = SplitRound(captured.batch, self._pool)
        except RuntimeError as error:
            if starved(error):
                raise torch.OutOfMemoryError(str(error)) from error
            raise

    def _short(self) -> bool:
        return short(self._target.spec.device, self._store.plan)

    @property
    def _texts(self) -> DeviceTexts:
        """Made with the first round that needs them."""
        if self._made_texts is None:
            self._made_texts = DeviceTexts(self._store.count + 1, self._context, self._target.spec.device)
        return self._made_texts

    @property
    def _histories(self) -> DeviceHistories:
        """Made with the first round."""
        if self._made_histories is None:
            spec = self._target.spec
            self._made_histories = DeviceHistories(self._store.count + 1, spec.vocab_size, spec.device)
        return self._made_histories

    def _allocate(self, shape: Shape) -> Captured:
        texts = self._texts.store if shape.context else None
        histories = self._histories.store
        return allocate(shape, self._target, self._drafter, self._store, histories, texts, self._factors)

    def _tell(self, captured: Captured, requests: Sequence[Request], observer: Observer) -> None:
        batch, ops = captured.batch, captured.alone
        size = len(ops.seeds)
        batch.lanes, batch.observer = [request.lane for request in requests], observer
        slots = _slots_of(requests) + [self._store.spare] * (size - len(requests))
        for cache in (batch.target_cache, batch.drafter_cache):
            if cache is not None and cache.index is not None:
                cache.slots = tuple(slots)
                cache.index.copy_(torch.tensor(slots))
        fill(batch, requests)
        samplers = [lane.sampler for lane in batch.lanes]
        ops.write_samplers(samplers)
        self._histories.bring([sampler.history for sampler in samplers], slots[: len(samplers)])
        if captured.shape.context:
            self._texts.bring(*_texts_of(requests))
        positions = [request.position for request in requests]
        ops.write_plan(batch.lanes, positions)
        captured.drafting = [lane.drafts(position) for lane, position in zip(batch.lanes, positions, strict=True)]
        self._ask(captured, samplers)

    def _ask(self, captured: Captured, samplers: Sequence[RowSampler]) -> None:
        """Whether the device can choose every token of these by itself; if not, the host will tell it of masks."""
        batch, host = captured.batch, captured.told.host
        batch.ops = captured.alone
        if any(sampler.masked for sampler in samplers):
            assert host is not None
            host.begin(batch.lanes)
            batch.ops = captured.told
        if captured.split is not None:
            captured.split.laid = False  # of other sequences


def _slots_of(requests: Sequence[Request]) -> list[int]:
    """Where the sequences lie; all that run have a slot."""
    return [request.slot.index for request in requests if request.slot is not None]


def _texts_of(requests: Sequence[Request]) -> tuple[list[SequenceContext | None], list[int]]:
    """The sequences' own texts, and their slots."""
    running = [(request.lane.text, request.slot.index) for request in requests if request.slot is not None]
    return [text for text, _ in running], [slot for _, slot in running]
