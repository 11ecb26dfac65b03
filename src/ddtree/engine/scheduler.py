"""Continuous batching: requests wait, are prefilled one after another, and share rounds until they end."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.config import SamplingParams, Speculation
from ddtree.drafter import Drafter
from ddtree.engine.logprobs import TokenLogprob, token_logprobs
from ddtree.engine.observer import Observer, RoundRecord, Unobserved
from ddtree.engine.request import Request
from ddtree.engine.result import Chunk
from ddtree.engine.round import Batch, Verdict, run_round
from ddtree.engine.rows import HostRows
from ddtree.engine.sampling import greedy
from ddtree.engine.slots import SlotStore
from ddtree.errors import DamagedFile, DDTreeError, InvalidOption
from ddtree.target import Target
from ddtree.tree import RoundState

NO_TOKEN = -2  # fills the lists of end ids
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
    ) -> None:
        """make: checks a request and turns it into a `Request`; raises DDTreeError for one that cannot be run."""
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
        self._prefilling = self._batch = None
        self._round_is_due = False
        self._store.forget()

    @torch.inference_mode()
    def step(self) -> News:
        """Some prefill, then one round; what came of it, at most one chunk a request.

        First tokens are handed out before the round, which is the next step then: nobody waits for a round to be read.
        """
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
        start, slots = request.position, [request.slot.index]
        end = min((start // self._chunk + 1) * self._chunk, len(request.prompt))
        device = self._target.spec.device
        ids = torch.tensor([request.prompt[start:end]], device=device)
        position = torch.tensor([start], device=device)
        features, logits = self._target.prefill(self._store.cache.view(slots), ids, position)
        if self._drafter is not None and self._store.drafter_cache is not None:
            self._drafter.append(self._store.drafter_cache.view(slots), features, position)
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
        started = time.perf_counter()
        batch = self._batch = self._batch or self._make_batch()
        requests, state = list(self._running), batch.state
        positions = state.position.tolist()
        verdict = run_round(batch)
        counts = verdict.committed.count.tolist()
        sizes, done = state.n_committed.tolist(), state.done.tolist()
        committed = [tokens[:n] for tokens, n in zip(state.committed.tolist(), sizes, strict=True)]
        news: News = []
        for index, request in enumerate(requests):
            if NO_ANSWER in committed[index]:
                self._leave(request)
                news.append((request, Chunk("", [], error=_no_answer(request))))
                continue
            layout = verdict.drafts[index].layout
            # Of a shadowed tree nothing can be accepted: a rate over its nodes would be nobody's.
            nodes = len(layout.chain if request.lane.mode.shadows else layout.nodes) - 1
            request.counts.add(nodes, counts[index])
            if request.lane.mode.shadows:
                self._shadow(request, verdict, index, positions[index], committed[index])
            request.remaining -= sizes[index]
            request.tokens += committed[index]
            self._advance(request, positions[index] + counts[index] + 1)
            chosen_by = state.path[index, : sizes[index]]  # rows
            news.append((request, self._take(request, committed[index], verdict.logits[index, chosen_by], done[index])))
        self.observer.round(self._record(requests, verdict, counts, sum(sizes), time.perf_counter() - started))
        return news

    def _make_batch(self) -> Batch:
        """The running sequences as tensors; made anew when one comes or goes."""
        requests, store, device = self._running, self._store, self._target.spec.device
        lanes = [request.lane for request in requests]
        slots = [request.slot.index for request in requests if request.slot is not None]
        rows, depth = max(lane.rows for lane in lanes), max(lane.depth for lane in lanes)
        state = RoundState.allocate(len(requests), rows, depth, device)
        state.tokens[:, 0] = torch.tensor([request.tokens[-1] for request in requests])
        state.position.copy_(torch.tensor([request.position for request in requests]))
        state.remaining.copy_(torch.tensor([request.remaining for request in requests]))
        most = max(len(request.ends) for request in requests)
        ends = [[*request.ends, *[NO_TOKEN] * (most - len(request.ends))] for request in requests]
        return Batch(
            target=self._target,
            target_cache=store.cache.view(slots),
            drafter=self._drafter,
            drafter_cache=store.drafter_cache.view(slots) if self._drafter and store.drafter_cache else None,
            lanes=lanes,
            state=state,
            ends=torch.tensor(ends, dtype=torch.int64, device=device).view(len(requests), most),
            observer=self.observer,
        )

    def _take(self, request: Request, tokens: list[int], logits: Tensor, last: bool) -> Chunk:
        """Hand committed tokens to a request; logits [M, V]: the target's own at the rows that chose them."""
        request.lane.sampler.commit(tokens)
        logprobs: list[TokenLogprob] = []
        if request.params.logprobs is not None:
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
        if request.slot is not None:
            self._store.release(request.slot)

    def _shadow(self, request: Request, verdict: Verdict, index: int, position: int, committed: list[int]) -> None:
        assert verdict.tree is not None
        size = int(verdict.tree.count[index]) + 1
        request.counts.shadow(position, verdict.tree.tokens[index, :size].tolist(), committed)

    def _record(
        self, requests: list[Request], verdict: Verdict, accepted: list[int], committed: int, seconds: float
    ) -> RoundRecord:
        nodes = [draft.layout.nodes for draft in verdict.drafts]
        rows = sum(map(len, nodes))
        return RoundRecord(
            batch=len(requests),
            rows=rows,
            drafted=rows - len(requests),
            accepted=accepted,
            depths=[max(n.depths) for n in nodes],
            modes=[request.lane.mode.name for request in requests],
            committed=committed,
            seconds=seconds,
            waiting=len(self._waiting),
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
