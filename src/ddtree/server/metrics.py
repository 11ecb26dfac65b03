"""What the server counts. Recording is adding to plain numbers, some microseconds a round; scrapes do the rest.

The engine's thread writes what concerns rounds and requests, the event loop what concerns HTTP. A scrape may read
between two additions; each number by itself is right.
"""

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from ddtree.server.answer import Answer

if TYPE_CHECKING:
    from ddtree.engine import Chunk, Generation
    from ddtree.engine.observer import RoundRecord

# Upper bounds of histograms. Seconds: the first four as fine as a GPU's rounds, so that one set serves all.
ROUND_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_SECONDS = (
    0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
SMALL = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024)
RECENT_ROUNDS = 256  # what counts as recent, in rounds: about a second of a GPU
RECENT_SECONDS = 10.0  # and in time: on a CPU fewer rounds than that


class Histogram:
    """Counts of values by the smallest bound that is not below them, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last: above every bound
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value, `times` over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class RecentDrafts:
    """What the newest rounds drafted and accepted: at most 256, none over 10 seconds older than the newest one.

    While nothing is drafted it stays as it is. One thread adds, any thread reads.
    """

    __slots__ = ("_clock", "_rounds")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds."""
        self._clock = clock
        self._rounds: deque[tuple[float, int, int, int]] = deque(maxlen=RECENT_ROUNDS)

    def add(self, drafts: int, drafted: int, accepted: int) -> None:
        """A round of `drafts` sequences that had a proposal: nodes verified and accepted, over all of them."""
        now, rounds = self._clock(), self._rounds
        rounds.append((now, drafts, drafted, accepted))
        while rounds[0][0] < now - RECENT_SECONDS:
            rounds.popleft()

    def sums(self) -> tuple[int, int, int]:
        """Drafts, nodes verified, nodes accepted; all zero before the first one."""
        rounds = self._rounds.copy()  # in one step, whatever the adding thread does
        return sum(r[1] for r in rounds), sum(r[2] for r in rounds), sum(r[3] for r in rounds)


class StageClock:
    """A context that adds the time within it to one stage. Never nested with itself, so one serves all rounds."""

    __slots__ = ("_began", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += time.perf_counter() - self._began


class Metrics:
    """The numbers themselves: the worker's watcher, and the observer of the engine's rounds."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()  # by finish reason: stop, length, abort, error
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.first_token = Histogram(FIRST_TOKEN_SECONDS)
        self.between_tokens = Histogram(TOKEN_SECONDS)  # a round's time spread over its tokens, once a token
        self.between_chunks = Histogram(TOKEN_SECONDS)
        self.per_token = Histogram(TOKEN_SECONDS)  # mean over a request, first token excluded
        self.whole = Histogram(REQUEST_SECONDS)
        self.queue = Histogram(REQUEST_SECONDS)
        self.prefill = Histogram(REQUEST_SECONDS)
        self.decode = Histogram(REQUEST_SECONDS)
        self.prompt_lengths = Histogram(TOKENS)
        self.answer_lengths = Histogram(TOKENS)
        self.rounds = 0  # of whatever batch
        self.ways: Counter[str] = Counter()  # the same, by how they ran: see engine.observer.WAYS
        self.verified_rows = self.drafts = self.drafted_tokens = self.accepted_tokens = 0
        self.recent = RecentDrafts()
        self.accepted_counts: Counter[int] = Counter()  # rounds of one sequence, by how many nodes were accepted
        self.mode_rounds: Counter[str] = Counter()  # rounds of one sequence
        self.mode_accepted: Counter[str] = Counter()
        # Of finished shadow-linear answers: rounds, nodes of the chain, nodes the tree would have had, disagreements.
        self.shadow_rounds = self.shadow_chain = self.shadow_tree = self.shadow_disagreements = 0
        self.round_seconds = Histogram(ROUND_SECONDS)
        self.round_batch = Histogram(SMALL)
        self.tree_nodes = Histogram(SMALL)
        self.tree_depth = Histogram(SMALL)
        self.stages: dict[str, StageClock] = {}
        self.responses: Counter[tuple[str, int]] = Counter()  # by route and status

    # The engine's observer.

    def stage(self, name: str) -> StageClock:
        """A context around one stage. It waits for no device: on a GPU a stage's time is that of its launches.

        A round that is one CUDA graph has no stages.
        """
        clock = self.stages.get(name)
        if clock is None:
            clock = self.stages[name] = StageClock()
        return clock

    def round(self, record: "RoundRecord") -> None:
        """A round has ended."""
        self.rounds += 1
        self.ways[record.ran] += 1
        self.verified_rows += record.rows
        self.round_seconds.observe(record.seconds)
        self.round_batch.observe(record.batch)
        drafts, accepted_tokens = self.drafts, self.accepted_tokens
        for accepted, depth, mode in zip(record.accepted, record.depths, record.modes, strict=True):
            self.mode_rounds[mode] += 1
            self.mode_accepted[mode] += accepted
            if depth:  # a sequence without a proposal drafted nothing
                self.drafts += 1
                self.accepted_counts[accepted] += 1
                self.accepted_tokens += accepted
                self.tree_depth.observe(depth)
        if record.drafted:
            self.drafted_tokens += record.drafted
            self.tree_nodes.observe(record.drafted / record.batch, record.batch)
            self.recent.add(self.drafts - drafts, record.drafted, self.accepted_tokens - accepted_tokens)

    # The worker's watcher.

    def chunk(self, answer: Answer, chunk: "Chunk") -> None:
        """A chunk is on its way to its answer."""
        count = len(chunk.token_ids)
        if count:
            now = time.monotonic()
            if answer.token_time is None:
                self.first_token.observe(now - answer.submitted)
                self.prompt_tokens += len(answer.prompt)
            else:
                self.between_chunks.observe(now - answer.token_time)
                self.between_tokens.observe((now - answer.token_time) / count, count)
            answer.token_time = now
            self.generated_tokens += count
        if chunk.generation is not None:
            self._finished(answer, chunk.generation)

    def dropped(self, answer: Answer, reason: str) -> None:
        """A request ended without a generation; `reason`: "abort" or "error"."""
        self.requests[reason] += 1

    def _finished(self, answer: Answer, generation: "Generation") -> None:
        self.requests[generation.finish_reason] += 1
        self.cached_tokens += generation.cached_tokens
        self.whole.observe(time.monotonic() - answer.submitted)
        self.queue.observe(generation.queue_seconds)
        self.prefill.observe(generation.prefill_seconds)
        self.decode.observe(generation.decode_seconds)
        self._shadowed(generation)
        count = len(generation.token_ids)
        self.prompt_lengths.observe(generation.prompt_tokens)
        self.answer_lengths.observe(count)
        if count > 1:
            self.per_token.observe(generation.decode_seconds / (count - 1))

    def _shadowed(self, generation: "Generation") -> None:
        shadow = generation.shadow
        if shadow is None or shadow.tree_acceptance_length is None:  # another mode, or no round
            return
        rounds = generation.speculative.rounds
        self.shadow_rounds += rounds
        self.shadow_chain += generation.speculative.accepted
        self.shadow_tree += round((shadow.tree_acceptance_length - 1) * rounds)  # a whole number over the rounds
        self.shadow_disagreements += shadow.agree is False

    # HTTP.

    def response(self, route: str, status: int) -> None:
        """An answer was sent. `route`: the path's pattern, of which there are few."""
        self.responses[route, status] += 1

    # What scrapes derive.

    def accepted_per_position(self) -> list[int]:
        """How many drafts had their node at depth 1, 2, ... accepted; at least one entry."""
        counts = dict(self.accepted_counts)
        deepest = max(counts, default=0)
        return [
            sum(times for accepted, times in counts.items() if accepted > depth) for depth in range(max(deepest, 1))
        ]
