"""What is counted, and how it is exposed."""

import asyncio
import sys
import threading
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ddtree.engine.observer import RoundRecord
from ddtree.engine.result import Shadow
from ddtree.server.metrics import Histogram, Metrics, RecentDrafts
from ddtree.server.options import ServerOptions


class Samples:
    """One scrape, read back by Prometheus' own parser."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.all = [sample for family in self.families.values() for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        (value,) = (s.value for s in self.all if s.name == name and labels.items() <= s.labels.items())
        return value

    def names(self, prefix: str) -> set[str]:
        return {sample.name for sample in self.all if sample.name.startswith(prefix)}


@pytest.fixture
def record():
    """Makes a `RoundRecord`; fields that are not given are those of one sequence."""

    def make(**fields) -> RoundRecord:
        base = {"batch": 1, "rows": 6, "drafted": 5, "accepted": [1], "depths": [3], "modes": ["tree"],
                "committed": 2, "seconds": 0.01, "waiting": 0}  # fmt: skip
        return RoundRecord(**base | fields)

    return make


@pytest.fixture
def scrape(http):
    async def read() -> Samples:
        answer = await http.get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=")
        return Samples(answer.text)

    return read


@pytest.mark.anyio
async def test_a_scrape_before_any_request(scrape):
    seen = await scrape()
    assert seen("ddtree_requests_total", finish_reason="stop") == 0
    assert seen("ddtree_requests_running") == seen("ddtree_requests_waiting") == 0
    assert seen("ddtree_time_to_first_token_seconds_count") == 0
    assert seen("ddtree_kv_tokens_capacity") > 0
    assert not seen.names("vllm:")
    assert not seen.names("sglang:")
    if sys.platform == "linux":  # read from /proc
        assert seen("process_resident_memory_bytes") > 0


@pytest.mark.anyio
async def test_requests_tokens_and_times(scrape, chat, engine):
    engine.cached_tokens = 3
    assert (await chat("Hi")).status_code == 200  # 8 tokens of prompt, 6 of answer
    assert (await chat("Hi", max_tokens=2, stream=True)).status_code == 200
    assert (await chat("x" * 500)).status_code == 400
    seen = await scrape()
    assert seen("ddtree_requests_total", finish_reason="stop") == 1
    assert seen("ddtree_requests_total", finish_reason="length") == 1
    assert seen("ddtree_prompt_tokens_total") == 16
    assert seen("ddtree_cached_tokens_total") == 6
    assert seen("ddtree_generated_tokens_total") == 8
    assert seen("ddtree_http_responses_total", route="/v1/chat/completions", status="200") == 2
    assert seen("ddtree_http_responses_total", route="/v1/chat/completions", status="400") == 1
    for name, count in (
        ("time_to_first_token_seconds", 2), ("inter_token_seconds", 6), ("request_seconds", 2), ("queue_seconds", 2),
        ("prefill_seconds", 2), ("decode_seconds", 2), ("request_prompt_tokens", 2), ("request_generated_tokens", 2),
    ):  # fmt: skip
        assert seen(f"ddtree_{name}_count") == count, name
        assert seen(f"ddtree_{name}_bucket", le="+Inf") == count, name
    assert seen("ddtree_queue_seconds_sum") == pytest.approx(0.5)
    assert seen("ddtree_request_generated_tokens_sum") == 8
    assert seen("ddtree_request_generated_tokens_bucket", le="5.0") == 1


@pytest.mark.anyio
async def test_rounds_and_speculation(scrape, chat):
    await chat("Hi")
    await chat("Hi", max_tokens=2)
    seen = await scrape()  # the scripted engine drafts 5 nodes a round, 3 deep, and accepts 1
    assert seen("ddtree_rounds_total") == seen("ddtree_drafts_total") == 8
    assert seen("ddtree_way_rounds_total", way="host") == 8
    assert seen("ddtree_verified_rows_total") == 48
    assert seen("ddtree_drafted_tokens_total") == 40
    assert seen("ddtree_accepted_tokens_total") == 8
    assert seen("ddtree_accepted_tokens_per_position_total", position="0") == 8
    assert seen("ddtree_mode_rounds_total", mode="tree") == 8
    assert seen("ddtree_mode_accepted_tokens_total", mode="tree") == 8
    assert seen("ddtree_tree_nodes_sum") == 40
    assert seen("ddtree_tree_depth_bucket", le="3.0") == 8
    assert seen("ddtree_tree_depth_bucket", le="2.0") == 0
    assert seen("ddtree_round_sequences_sum") == 8
    assert seen("ddtree_stage_seconds_total", stage="verify") >= 0


@pytest.mark.anyio
async def test_what_the_trees_of_shadows_would_have_had(scrape, chat, engine):
    await chat("Hi")
    assert (await scrape())("ddtree_shadow_rounds_total") == 0
    engine.shadow = Shadow(2.0, 3.0, True)
    await chat("Hi")
    engine.shadow = Shadow(2.0, 1.0, False)
    await chat("Hi")
    engine.shadow = Shadow(None, None, None)  # an answer without a round
    await chat("Hi")
    seen = await scrape()
    # The scripted engine tells 3 rounds an answer, in which 4 nodes were accepted.
    assert seen("ddtree_shadow_rounds_total") == 6
    assert seen("ddtree_shadow_chain_tokens_total") == 8
    assert seen("ddtree_shadow_accepted_tokens_total") == 6  # two a round of the first
    assert seen("ddtree_shadow_disagreements_total") == 1


@pytest.mark.anyio
async def test_a_client_that_leaves_and_a_failure(scrape, chat, engine, http, eventually):
    engine.pieces, engine.round_seconds = ["word "] * 2000, 0.01
    left = asyncio.ensure_future(chat("Hi"))
    await asyncio.to_thread(engine.started.wait, 10)
    seen = await scrape()
    assert seen("ddtree_requests_running") + seen("ddtree_requests_waiting") == 1
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    await asyncio.to_thread(eventually, lambda: engine.active == 0)
    engine.pieces, engine.error = ["a"], RuntimeError("odd")
    assert (await chat("Hi")).status_code == 500
    seen = await scrape()
    assert seen("ddtree_requests_total", finish_reason="abort") == 1
    assert seen("ddtree_requests_total", finish_reason="error") == 1
    assert seen("ddtree_http_responses_total", route="/v1/chat/completions", status="500") == 1
    assert seen("ddtree_requests_running") == 0


@pytest.mark.anyio
async def test_paths_that_do_not_exist_do_not_fill_the_memory(scrape, http):
    for number in range(50):
        await http.get(f"/v1/nothing/{number}")
    await http.get("/v1/models/scripted")
    seen = await scrape()
    assert seen("ddtree_http_responses_total", route="other", status="404") == 50
    assert seen("ddtree_http_responses_total", route="/v1/models/{model:path}", status="200") == 1


@pytest.mark.anyio
async def test_openmetrics_for_those_who_ask(http):
    accept = "application/openmetrics-text; version=1.0.0,text/plain;q=0.5"
    answer = await http.get("/metrics", headers={"Accept": accept})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


class TestOtherNames:
    """--vllm-metrics"""

    @pytest.fixture
    def options(self):
        return ServerOptions(("first", "second"), vllm_metrics=True)

    @pytest.mark.anyio
    async def test_vllm_names(self, scrape, chat):
        await chat("Hi", model="second")
        seen = await scrape()
        labels = {"model_name": "first", "engine": "0"}
        for name, value in (
            ("num_requests_running", 0), ("num_requests_waiting", 0), ("kv_cache_usage_perc", 0),
            ("prompt_tokens_total", 8), ("generation_tokens_total", 6), ("prefix_cache_queries_total", 8),
            ("prefix_cache_hits_total", 0), ("num_preemptions_total", 0), ("spec_decode_num_drafts_total", 6),
            ("spec_decode_num_draft_tokens_total", 30), ("spec_decode_num_accepted_tokens_total", 6),
            ("time_to_first_token_seconds_count", 1), ("inter_token_latency_seconds_count", 5),
            ("request_time_per_output_token_seconds_count", 1), ("e2e_request_latency_seconds_count", 1),
            ("request_queue_time_seconds_count", 1), ("request_prefill_time_seconds_count", 1),
            ("request_decode_time_seconds_count", 1), ("request_prompt_tokens_sum", 8),
            ("request_generation_tokens_sum", 6),
        ):  # fmt: skip
            assert seen(f"vllm:{name}", **labels) == value, name
        assert seen("vllm:spec_decode_num_accepted_tokens_per_pos_total", position="0", **labels) == 6
        assert seen("vllm:request_success_total", finished_reason="stop", **labels) == 1

    @pytest.mark.anyio
    async def test_sglang_names(self, scrape, chat):
        await chat("Hi")
        seen = await scrape()
        assert seen("sglang:spec_accept_length", model_name="first") == 2  # one node, and the bonus
        assert seen("sglang:spec_accept_rate", model_name="first") == pytest.approx(0.2)
        assert seen("sglang:spec_verify_calls_total", model_name="first") == 6

    @pytest.mark.anyio
    async def test_sglang_gauges_tell_of_recent_rounds(self, scrape, chat, engine, record):
        """aiperf takes their mean over its run: what was served before must not be in it."""
        await chat("Hi")
        for _ in range(256):
            engine.scheduler.observer.round(record(batch=2, accepted=[3, 0], depths=[4, 4], modes=["tree"] * 2))
        seen = await scrape()
        assert seen("sglang:spec_accept_length") == 2.5
        assert seen("sglang:spec_accept_rate") == pytest.approx(0.3 * 2)
        engine.scheduler.observer.round(record(batch=1, accepted=[0], depths=[0], modes=["ar"], drafted=0))
        assert (await scrape())("sglang:spec_accept_length") == 2.5, "a round without a proposal says nothing"
        assert seen("sglang:spec_verify_calls_total") == 6 + 2 * 256, "counters are since the start"

    @pytest.mark.anyio
    async def test_every_name_in_the_three_spellings_parses(self, scrape, chat):
        await chat("Hi")
        assert {"ddtree_", "vllm:", "sglang:"} == {
            p for p in ("ddtree_", "vllm:", "sglang:") if (await scrape()).names(p)
        }


def test_histograms_count_by_bounds_that_are_included():
    histogram = Histogram((1, 2, 5))
    for value in (0.5, 1, 1.5, 5, 6):
        histogram.observe(value)
    histogram.observe(2, times=3)
    assert histogram.counts == [2, 4, 1, 1]
    assert histogram.total == 20


@pytest.mark.parametrize(
    ("accepted", "positions"), [([], [0]), ([0], [0]), ([3, 1, 0], [2, 1, 1]), ([2, 2], [2, 2])], ids=str
)
def test_accepted_per_position(record, accepted, positions):
    metrics = Metrics()
    for count in accepted:
        metrics.round(record(accepted=[count], depths=[4], batch=1))
    assert metrics.accepted_per_position() == positions
    assert metrics.accepted_tokens == sum(positions)


def test_recent_drafts_are_of_the_last_seconds():
    now = 100.0
    recent = RecentDrafts(lambda: now)
    assert recent.sums() == (0, 0, 0)
    for _ in range(4):  # at 100, 104, 108 and 112 seconds
        recent.add(1, 5, 2)
        now += 4
    assert recent.sums() == (3, 15, 6)
    now += 1000
    assert recent.sums() == (3, 15, 6), "nothing new is known"
    recent.add(2, 8, 1)
    assert recent.sums() == (2, 8, 1)


def test_recent_drafts_are_of_the_last_rounds():
    recent = RecentDrafts(lambda: 100.0)
    for number in range(1000):
        recent.add(1, 5, number % 2)
    assert recent.sums() == (256, 5 * 256, 128)


def test_recent_drafts_are_read_while_they_are_added():
    recent, over = RecentDrafts(), threading.Event()

    def add() -> None:
        while not over.is_set():
            recent.add(1, 5, 2)

    thread = threading.Thread(target=add)
    thread.start()
    try:
        for _ in range(300):
            drafts, drafted, accepted = recent.sums()
            assert (drafted, accepted) == (5 * drafts, 2 * drafts)
    finally:
        over.set()
        thread.join()


def test_rounds_without_a_proposal_are_no_drafts(record):
    metrics = Metrics()
    metrics.round(record(batch=3, accepted=[0, 2, 0], depths=[0, 5, 3], modes=["ar", "tree", "linear"], drafted=8))
    assert (metrics.drafts, metrics.accepted_tokens, metrics.drafted_tokens) == (2, 2, 8)
    assert metrics.mode_rounds == {"ar": 1, "tree": 1, "linear": 1}


def test_counting_a_round_takes_microseconds(record):
    """Of 8 sequences; a round of the smallest model takes ten thousand."""
    metrics = Metrics()
    one = record(batch=8, accepted=[1, 2, 0, 3] * 2, depths=[3] * 8, modes=["tree"] * 8, drafted=40)
    best = float("inf")
    for _ in range(20):
        begun = time.perf_counter()
        for _ in range(100):
            for stage in ("draft", "build", "verify", "accept", "commit"):
                with metrics.stage(stage):
                    pass
            metrics.round(one)
        best = min(best, (time.perf_counter() - begun) / 100)
    assert best < 200e-6, f"{best * 1e6:.0f} microseconds"
