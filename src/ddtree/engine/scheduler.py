"""Continuous batching: requests wait, are prefilled one after another, and share rounds until they end."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.config import SamplingParams, Speculation
from ddtree.drafter import Drafter
from ddtree.engine.device import standing_on
from ddtree.engine.logprobs import TokenLogprob, token_logprobs
from ddtree.engine.observer import Observer, RoundRecord, Unobserved
from ddtree.engine.prompts import Prompts
from ddtree.engine.request import Request
from ddtree.engine.result import Chunk
from ddtree.engine.round import Batch, Lane, Outcome, read_report
from ddtree.engine.rows import HostRows
from ddtree.engine.runner import DeviceRunner, HostRunner, Pending
from ddtree.engine.sampling import greedy, rehearse_choices
from ddtree.engine.slots import SlotStore
from ddtree.errors import DamagedFile, DDTreeError, InvalidOption
from ddtree.kernels.backend import usable
from ddtree.target import Target

NO_ANSWER = -1  # what a row chooses where nothing can follow it
News = list[tuple[Request, Chunk]]


@dataclass(frozen=True)
class SchedulerStats:
    """How full the scheduler is."""

    running: int  # sequences that share rounds, the one that is prefilled included
    waiting: int
    slots: int
    kv_tokens_used: int  # positions in use or kept for reuse
    kv_tokens_capacity: int


@dataclass(frozen=True)
class Flight:
    """A launched round, and the sequences it was launched for."""

    pending: Pending
    requests: list[Request]
    depth: int


class Scheduler:
    """First come, first served: up to one sequence a slot runs, the others wait. Not thread-safe.

    A step computes at most about `prefill_chunk` rows of prompts, then one round of everything that runs, so a long
    prompt delays running answers by one chunk a round. Prompts are cut at multiples of the chunk, so where a prompt is
    cut does not depend on its neighbours.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        store: SlotStore,
        make: Callable[[Sequence[int], SamplingParams, Speculation], Request],
        prefill_chunk: int,
        prefix_caching: bool,
        runner: HostRunner | DeviceRunner,
        prompts: Prompts,
    ) -> None:
        """make: checks a request and turns it into a `Request`; raises DDTreeError for one that cannot be run."""
        self._runner, self._prompts = runner, prompts
        self._flight: Flight | None = None  # a round that was launched before the one before it was read
        self._target, self._drafter, self._store, self._make = target, drafter, store, make
        self._chunk, self._reuse = prefill_chunk, prefix_caching
        self.observer: Observer = Unobserved()
        self._waiting: deque[Request] = deque()
        self._prefilling: Request | None = None
        self._running: list[Request] = []
        self._batch: Batch | None = None  # of `_running`; None: to be made anew
        self._round_is_due = False  # a prefill's first tokens were handed out before it

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._prefilling or self._running)

    def stats(self) -> SchedulerStats:
        """How full it is now."""
        store = self._store
        running = len(self._running) + (self._prefilling is not None)
        capacity = store.count * store.length
        return SchedulerStats(running, len(self._waiting), store.count, store.tokens_held, capacity)

    def add(self, prompt: Sequence[int], params: SamplingParams, speculation: Speculation) -> Request:
        """Queue a request behind all earlier ones. Raises DDTreeError for one that cannot be run."""
        request = self._make(prompt, params, speculation)
        self._waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        """Drop a request, wherever it is; its slot is free at once. Nothing happens where it is over already."""
        if request in self._waiting:
            self._waiting.remove(request)
        elif request is self._prefilling or request in self._running:
            self._leave(request)

    def drop_prefixes(self) -> None:
        """Reuse nothing of what finished requests left; call between steps. Requests that run are not touched."""
        self._store.drop_idle()

    def reset(self) -> None:
        """After a step that raised: drop every request, and trust nothing that lies in the caches."""
        self._waiting.clear()
        self._running.clear()
        self._prefilling = self._batch = self._flight = None
        self._round_is_due = False
        self._store.forget()

    @torch.inference_mode()
    def warm_up(self, lane: Lane) -> None:
        """Compute small prompts and the longest chunk, and let the runner prepare rounds of sequences such as this one.

        Before the first request: so none waits for a kernel to be compiled. It is done on the spare slot, and leaves
        nothing behind.
        """
        with standing_on(self._target.spec.device):
            for size in self._prompts.sizes(self._chunk):
                self._prompts.forward(self._store.spare, [0] * size, 0)
            self._runner.prepare(lane, self._store.count)
            if usable(self._target.spec.device):
                rehearse_choices(self._target.spec.vocab_size, self._target.spec.dtype, self._target.spec.device)

    @torch.inference_mode()
    def step(self) -> News:
        """Some prefill, then one round; what came of it, at most one chunk a request.

        First tokens are handed out before the round, which is the next step then: nobody waits for a round to be read.
        """
        with standing_on(self._target.spec.device):
            return self._step()

    def _step(self) -> News:
        news: News = []
        if not self._round_is_due:
            news = self._prefill()
            self._round_is_due = bool(self._running)
            if news:
                return news
        self._round_is_due = False
        return self._round() if self._running else news

    def _prefill(self) -> News:
        news: News = []
        left = self._chunk
        while left > 0:
            request = self._prefilling = self._prefilling or self._admit()
            if request is None:
                break
            before = request.position
            try:
                with self.observer.stage("prefill"):
                    logits = self._prefill_chunk(request)
                if logits is not None:
                    news.append((request, self._first_token(request, logits)))
            except DDTreeError as error:  # this request's alone
                self._leave(request)
                news.append((request, Chunk("", [], error=error)))
            left -= max(request.position - before, 1)
        return news

    def _admit(self) -> Request | None:
        if not self._waiting:
            return None
        request = self._waiting[0]
        found = self._store.acquire(request.prompt, reuse=self._reuse, drafts=self._drafter is not None)
        if found is None:
            return None
        self._waiting.popleft()
        request.slot, request.cached = found
        request.position, request.started = request.cached, time.perf_counter()
        request.tokens = list(request.prompt)
        request.slot.tokens = request.tokens
        return request

    def _prefill_chunk(self, request: Request) -> Tensor | None:
        """Compute up to the next multiple of the chunk; the last row's logits [1, V] at the prompt's end, else None."""
        assert request.slot is not None
        start = request.position
        end = min((start // self._chunk + 1) * self._chunk, len(request.prompt))
        logits = self._prompts.forward(request.slot.index, request.prompt[start:end], start)
        self._advance(request, end)
        return logits if end == len(request.prompt) else None

    def _first_token(self, request: Request, logits: Tensor) -> Chunk:
        """The prompt is done: its last token, one before the root's position, chooses the root."""
        sampler = request.lane.sampler
        rows = HostRows.root(request.prompt[-1])
        own = greedy(logits) if sampler.plain else sampler.choose(logits, rows, request.position - 1)
        first = int(own[0])
        if first < 0:
            raise _no_answer(request)
        request.prefilled = time.perf_counter()
        request.remaining -= 1
        self._prefilling = None
        self._running.append(request)
        self._batch = None
        request.tokens.append(first)
        last = request.remaining <= 0 or first in request.output.end_ids
        return self._take(request, [first], logits, last)

    def _round(self) -> News:
        """One round of everything that runs; on a GPU the next one is launched before this one is read."""
        started = time.perf_counter()
        flight = self._flight
        if flight is None or not self._goes_on(flight):
            if self._batch is None:
                self._batch = self._runner.make(self._running, self.observer)
            flight = self._launch(self._batch)
        flight.pending.settle()
        ahead = self._batch is not None and not self._reads_logits() and self._runner.runs_ahead(self._batch)
        self._flight = self._launch(self._batch) if ahead and self._batch is not None else None
        news = self._read(flight, started)
        if self._batch is not None:
            self._runner.follow(self._batch, [request.position for request in self._running])
        if not self._running:
            self._flight = None  # nobody is left whom it could concern
        return news

    def _goes_on(self, flight: Flight) -> bool:
        """Whether a launched round is of use: one that still waits for the host would commit into the slot of a
        sequence that has left, which may be another's by now. Dropped, it has committed nothing.
        """
        return not flight.pending.waits or all(request in self._running for request in flight.requests)

    def _launch(self, batch: Batch) -> "Flight":
        return Flight(self._runner.launch(batch), list(self._running), batch.depth)

    def _reads_logits(self) -> bool:
        return any(request.params.logprobs is not None for request in self._running)

    def _read(self, flight: "Flight", started: float) -> News:
        """What a round did for each sequence that has not left since it was launched."""
        pending, requests = flight.pending, flight.requests
        limits, ends = [r.remaining for r in requests], [r.output.end_ids for r in requests]
        outcomes = read_report(pending.report(), flight.depth, limits, ends)
        news: News = []
        for index, (request, outcome) in enumerate(zip(requests, outcomes, strict=True)):
            if request not in self._running:
                continue
            if NO_ANSWER in outcome.committed:
                self._leave(request)
                news.append((request, Chunk("", [], error=_no_answer(request))))
                continue
            # Of a shadowed tree nothing can be accepted: a rate over its nodes would be nobody's.
            nodes = min(outcome.drafted, request.lane.depth) if request.lane.mode.shadows else outcome.drafted
            request.counts.add(nodes, outcome.accepted)
            if request.lane.mode.shadows:
                request.counts.shadow(request.position, outcome.tree, outcome.committed)
            request.remaining -= len(outcome.committed)
            request.tokens += outcome.committed
            self._advance(request, request.position + outcome.accepted + 1)
            logits = (
                pending.logits[index, pending.path[index, : len(outcome.committed)]] if self._reads(request) else None
            )
            news.append((request, self._take(request, outcome.committed, logits, outcome.done)))
        self.observer.round(self._record(requests, outcomes, time.perf_counter() - started, pending.ran))
        return news

    @staticmethod
    def _reads(request: Request) -> bool:
        return request.params.logprobs is not None

    def _take(self, request: Request, tokens: list[int], logits: Tensor | None, last: bool) -> Chunk:
        """Hand committed tokens to a request; logits [M, V]: the target's own at the rows that chose them."""
        request.lane.commit(tokens)
        logprobs: list[TokenLogprob] = []
        if request.params.logprobs is not None and logits is not None:
            logprobs = token_logprobs(logits, tokens, request.params.logprobs)
        chunk = request.push(tokens, logprobs, last)
        if chunk.last:
            self._leave(request)
        return chunk

    def _advance(self, request: Request, position: int) -> None:
        """The caches hold `position` tokens of a request now; those behind a cut are known to nobody."""
        assert request.slot is not None
        request.position = position
        request.slot.held = min(position, len(request.tokens))
        request.slot.drafted = request.slot.held if self._drafter is not None else 0

    def _leave(self, request: Request) -> None:
        """A request is over, or given up."""
        if request is self._prefilling:
            self._prefilling = None
        if request in self._running:
            self._running.remove(request)
            self._batch = None
        if self._flight is not None and not any(other in self._running for other in self._flight.requests):
            self._flight = None  # nobody is left to read it for
        if request.slot is not None:
            self._store.release(request.slot)

    def _record(self, requests: list[Request], outcomes: list[Outcome], seconds: float, ran: str) -> RoundRecord:
        drafted = sum(outcome.drafted for outcome in outcomes)
        return RoundRecord(
            batch=len(requests),
            rows=drafted + len(requests),
            drafted=drafted,
            accepted=[outcome.accepted for outcome in outcomes],
            depths=[outcome.depth for outcome in outcomes],
            modes=[request.lane.mode.name for request in requests],
            committed=sum(len(outcome.committed) for outcome in outcomes),
            seconds=seconds,
            waiting=len(self._waiting),
            ran=ran,
        )


def _no_answer(request: Request) -> DDTreeError:
    """Why nothing can follow a request's last token."""
    grammar, biased = request.params.grammar is not None, bool(request.params.logit_bias)
    if why := request.lane.sampler.grammar_error:
        said = f"the grammar became too complex on the answer's way ({why}): simplify the schema"
        return InvalidOption(said, param="response_format", code="grammar_dead_end")
    if grammar or biased:
        by = " and ".join(["the grammar"] * grammar + ["logit_bias"] * biased)
        remedy = "forbid fewer tokens by it" if biased else "let the schema allow more"
        said = f"no token is left that {by} allow{'' if grammar and biased else 's'}: {remedy}"
        return InvalidOption(said, param="response_format" if grammar else "logit_bias", code="grammar_dead_end")
    return DamagedFile(
        "the model's logits are not numbers: its weights or its configuration are damaged, or overflow in this dtype;"
        " fetch the model again, or try float32"
    )
