"""The counted numbers in Prometheus' form: under the project's own names, and under those of vLLM and SGLang."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ddtree.server.metrics import Histogram, Metrics
from ddtree.server.worker import EngineWorker

Labels = Mapping[str, str]
FINISH_REASONS = ("stop", "length", "abort", "error")
STAGES_HELP = "Time in each stage; on a GPU, of its launches, and only of rounds that are no CUDA graph."


class Exposition(Collector):
    """A registry of its own that turns `Metrics` and the worker's state into text when it is scraped."""

    def __init__(self, metrics: Metrics, worker: EngineWorker, model: str, vllm_names: bool) -> None:
        self._metrics, self._worker = metrics, worker
        self._model = model
        self._vllm_names = vllm_names
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self, accept: str) -> tuple[bytes, str]:
        """The exposition that an Accept header asks for, and its content type."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type

    def describe(self) -> Iterable[Any]:
        """Nothing: names are checked when they are collected."""
        return []

    def collect(self) -> Iterator[Any]:
        """Every metric family, now."""
        yield from self._requests()
        yield from self._rounds()
        yield from self._state()
        if self._vllm_names:
            yield from _vllm(self._metrics, self._worker, {"model_name": self._model, "engine": "0"})
            yield from _sglang(self._metrics, self._worker, {"model_name": self._model})

    def _requests(self) -> Iterator[Any]:
        m = self._metrics
        yield _counters(
            "ddtree_requests",
            "Generations that ended, by reason; abort: the client left or the server stopped.",
            [({"finish_reason": reason}, m.requests[reason]) for reason in FINISH_REASONS],
        )
        yield _counter(
            "ddtree_requests_rejected", "Requests refused because the queue was full.", self._worker.rejected
        )
        responses = [
            ({"route": route, "status": str(status)}, count) for (route, status), count in m.responses.copy().items()
        ]
        yield _counters("ddtree_http_responses", "HTTP answers by route and status.", responses)
        yield _counter("ddtree_prompt_tokens", "Prompt tokens of requests that got a first token.", m.prompt_tokens)
        yield _counter("ddtree_cached_tokens", "Of finished requests' prompt tokens, those reused.", m.cached_tokens)
        yield _counter("ddtree_generated_tokens", "Tokens handed to requests.", m.generated_tokens)
        for name, said, histogram in (
            ("time_to_first_token_seconds", "From the queue's entry to the first token.", m.first_token),
            ("inter_token_seconds", "A round's time spread over the tokens it gave, once a token.", m.between_tokens),
            ("request_seconds", "From the queue's entry to the last token.", m.whole),
            ("queue_seconds", "Waiting before the prefill.", m.queue),
            ("prefill_seconds", "From the prefill's begin to the first token.", m.prefill),
            ("decode_seconds", "From the first token to the last.", m.decode),
            ("request_prompt_tokens", "Prompt lengths of finished requests.", m.prompt_lengths),
            ("request_generated_tokens", "Answer lengths of finished requests.", m.answer_lengths),
        ):
            yield _histogram(f"ddtree_{name}", said, histogram)

    def _rounds(self) -> Iterator[Any]:
        m = self._metrics
        yield _counter("ddtree_rounds", "Rounds, of whatever number of sequences.", m.rounds)
        ways = [({"way": way}, count) for way, count in m.ways.copy().items()]
        yield _counters("ddtree_way_rounds", "Rounds, by how they ran: on the host, as CUDA graphs, as launches.", ways)
        yield _counter("ddtree_verified_rows", "Rows verified, roots included.", m.verified_rows)
        yield _counter("ddtree_drafts", "Rounds of one sequence that had a proposal.", m.drafts)
        yield _counter("ddtree_drafted_tokens", "Nodes verified, roots excluded.", m.drafted_tokens)
        yield _counter("ddtree_accepted_tokens", "Nodes accepted.", m.accepted_tokens)
        positions = [({"position": str(n)}, count) for n, count in enumerate(m.accepted_per_position())]
        yield _counters("ddtree_accepted_tokens_per_position", "Drafts whose node there was accepted.", positions)
        for name, said, counts in (
            ("ddtree_mode_rounds", "Rounds of one sequence, by mode.", m.mode_rounds),
            ("ddtree_mode_accepted_tokens", "Nodes accepted, by mode; over the rounds: acceptance.", m.mode_accepted),
        ):
            yield _counters(name, said, [({"mode": mode}, count) for mode, count in counts.copy().items()])
        for name, said, value in (
            ("rounds", "Rounds of finished shadow-linear answers.", m.shadow_rounds),
            ("chain_tokens", "Nodes that their chain had accepted.", m.shadow_chain),
            ("accepted_tokens", "Nodes that their tree would have had accepted.", m.shadow_tree),
            ("disagreements", "Such answers whose tree had other tokens than those that came.", m.shadow_disagreements),
        ):
            yield _counter(f"ddtree_shadow_{name}", said, value)
        for name, said, histogram in (
            ("round_seconds", "Time of a round.", m.round_seconds),
            ("round_sequences", "Sequences that shared a round.", m.round_batch),
            ("tree_nodes", "Nodes per sequence and round, roots excluded; the mean of the round.", m.tree_nodes),
            ("tree_depth", "Depth of the deepest node, per sequence and round.", m.tree_depth),
        ):
            yield _histogram(f"ddtree_{name}", said, histogram)
        stages = [({"stage": name}, clock.seconds) for name, clock in m.stages.copy().items()]
        yield _counters(
            "ddtree_stage_seconds",
            STAGES_HELP,
            stages,
        )

    def _state(self) -> Iterator[Any]:
        stats = self._worker.stats()
        yield _gauge("ddtree_requests_running", "Requests in a slot.", self._worker.busy)
        yield _gauge("ddtree_requests_waiting", "Requests in the queue.", self._worker.waiting)
        yield _gauge("ddtree_slots", "Requests that can run at once.", stats.slots)
        yield _gauge(
            "ddtree_kv_tokens_used", "Tokens in the KV cache, with those kept for reuse.", stats.kv_tokens_used
        )
        yield _gauge("ddtree_kv_tokens_capacity", "Tokens that the KV cache can hold.", stats.kv_tokens_capacity)


def _vllm(m: Metrics, worker: EngineWorker, labels: Labels) -> Iterator[Any]:
    """What vLLM counts too, under its names, so that load tools and dashboards read it."""
    stats = worker.stats()
    usage = stats.kv_tokens_used / stats.kv_tokens_capacity if stats.kv_tokens_capacity else 0.0
    yield _gauge("vllm:num_requests_running", "Requests in a slot.", worker.busy, labels)
    yield _gauge("vllm:num_requests_waiting", "Requests in the queue.", worker.waiting, labels)
    yield _gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", usage, labels)
    for name, said, value in (
        ("prompt_tokens", "Prompt tokens.", m.prompt_tokens),
        ("generation_tokens", "Generated tokens.", m.generated_tokens),
        ("prefix_cache_queries", "Prompt tokens of finished requests.", int(m.prompt_lengths.total)),
        ("prefix_cache_hits", "Of these, the reused ones.", m.cached_tokens),
        ("num_preemptions", "None: a running request keeps its slot.", 0),
        ("spec_decode_num_drafts", "Rounds of one sequence with a proposal.", m.drafts),
        ("spec_decode_num_draft_tokens", "Nodes verified.", m.drafted_tokens),
        ("spec_decode_num_accepted_tokens", "Nodes accepted.", m.accepted_tokens),
    ):
        yield _counter(f"vllm:{name}", said, value, labels)
    positions = [({**labels, "position": str(n)}, count) for n, count in enumerate(m.accepted_per_position())]
    yield _counters("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted nodes by depth.", positions)
    reasons = [({**labels, "finished_reason": reason}, m.requests[reason]) for reason in FINISH_REASONS]
    yield _counters("vllm:request_success", "Requests that ended, by reason.", reasons)
    for name, said, histogram in (
        ("time_to_first_token_seconds", "Time to the first token.", m.first_token),
        ("inter_token_latency_seconds", "Time between two chunks of a request.", m.between_chunks),
        ("request_time_per_output_token_seconds", "A request's mean time per token.", m.per_token),
        ("e2e_request_latency_seconds", "Time of the whole request.", m.whole),
        ("request_queue_time_seconds", "Time in the queue.", m.queue),
        ("request_prefill_time_seconds", "Time of the prefill.", m.prefill),
        ("request_decode_time_seconds", "Time of the decoding.", m.decode),
        ("request_prompt_tokens", "Prompt lengths.", m.prompt_lengths),
        ("request_generation_tokens", "Answer lengths.", m.answer_lengths),
    ):
        yield _histogram(f"vllm:{name}", said, histogram, labels)


def _sglang(m: Metrics, worker: EngineWorker, labels: Labels) -> Iterator[Any]:
    """SGLang's names. Its two gauges of speculation are means over recent rounds, as its own: readers average them."""
    drafts, drafted, accepted = m.recent.sums()
    length = 1 + accepted / drafts if drafts else 0.0
    rate = accepted / drafted if drafted else 0.0
    yield _gauge("sglang:spec_accept_length", "Accepted nodes per recent draft, and the bonus.", length, labels)
    yield _gauge("sglang:spec_accept_rate", "Accepted over verified nodes, of recent drafts.", rate, labels)
    yield _counter("sglang:spec_verify_calls", "Rounds of one sequence with a proposal.", m.drafts, labels)
    yield _gauge("sglang:num_running_reqs", "Requests in a slot.", worker.busy, labels)
    yield _gauge("sglang:num_queue_reqs", "Requests in the queue.", worker.waiting, labels)


def _gauge(name: str, said: str, value: float, labels: Labels | None = None) -> GaugeMetricFamily:
    labels = labels or {}
    family = GaugeMetricFamily(name, said, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, said: str, value: float, labels: Labels | None = None) -> CounterMetricFamily:
    return _counters(name, said, [(labels or {}, value)])


def _counters(name: str, said: str, values: Sequence[tuple[Labels, float]]) -> CounterMetricFamily:
    """A counter, exposed with `_total` behind its name; `values` share their label names."""
    family = CounterMetricFamily(name, said, labels=list(values[0][0]) if values else [])
    for labels, value in values:
        family.add_metric(list(labels.values()), value)
    return family


def _histogram(name: str, said: str, histogram: Histogram, labels: Labels | None = None) -> HistogramMetricFamily:
    labels = labels or {}
    family = HistogramMetricFamily(name, said, labels=list(labels))
    below, buckets = 0, []
    bounds = [*map(float, histogram.bounds), float("inf")]
    for bound, count in zip(bounds, histogram.counts.copy(), strict=True):
        below += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), below))
    family.add_metric(list(labels.values()), buckets, histogram.total)
    return family
