"""One request on its way through the scheduler."""

import secrets
import time
from dataclasses import dataclass, field

from ddtree.config import SamplingParams
from ddtree.engine.logprobs import TokenLogprob
from ddtree.engine.output import RequestOutput
from ddtree.engine.result import Chunk, Counts, Generation
from ddtree.engine.round import Lane
from ddtree.engine.slots import Slot


def draw_seed(params: SamplingParams) -> int:
    """The request's own seed, or a fresh one."""
    return secrets.randbits(63) if params.seed is None else params.seed


@dataclass(eq=False)
class Request:
    """A prompt, how it is answered, and what came of it so far. Made and owned by the scheduler."""

    prompt: list[int]
    params: SamplingParams
    lane: Lane
    output: RequestOutput
    remaining: int  # tokens it may still generate
    slot: Slot | None = None
    position: int = 0  # tokens in the caches; while it runs, the position of its root
    cached: int = 0  # of the prompt, reused
    tokens: list[int] = field(default_factory=list)  # prompt and everything committed
    counts: Counts = field(default_factory=Counts)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    arrived: float = field(default_factory=time.perf_counter)
    started: float = 0.0  # its prefill began
    prefilled: float = 0.0  # its first token was there
    pending: list[Chunk] = field(default_factory=list)  # for whoever drives the scheduler for several readers

    @property
    def ends(self) -> list[int]:
        """Tokens that end it."""
        return sorted(self.output.end_ids)

    def push(self, tokens: list[int], logprobs: list[TokenLogprob], last: bool) -> Chunk:
        """Take newly committed tokens; the chunk that a reader gets of them. last: no more will come."""
        before = len(self.output.token_ids)
        text = self.output.push(tokens)
        if last:
            text += self.output.finish("length")
        ids = self.output.token_ids[before:]
        logprobs = logprobs[: len(ids)]  # text, ids and log-probabilities end at the same token
        self.logprobs += logprobs
        if not self.output.finished:
            return Chunk(text, ids, logprobs=logprobs)
        return Chunk(text, ids, self.output.finish_reason, self.generation(), logprobs)

    def generation(self) -> Generation:
        """The finished request."""
        now, counts, mode = time.perf_counter(), self.counts, self.lane.mode
        return Generation(
            text=self.output.text,
            token_ids=list(self.output.token_ids),
            finish_reason=self.output.finish_reason or "length",
            stop_reason=self.output.stop_reason,
            mode=mode.name if counts.speculated or not counts.rounds else "ar",
            rounds=counts.rounds,
            acceptance_length=counts.acceptance_length,
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached,
            seconds=now - self.arrived,
            queue_seconds=self.started - self.arrived,
            prefill_seconds=self.prefilled - self.started,
            decode_seconds=now - self.prefilled,
            logprobs=self.logprobs,
            speculative=counts.stats(self.lane.depth if mode.shadows else self.lane.rows - 1),
            shadow=counts.shadow_result() if mode.shadows else None,
        )
