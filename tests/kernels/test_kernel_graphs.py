"""Rounds that the host has a part in, as two graphs: the tokens of the host's rounds and of single launches, no other
way taken in silence. Without a card the graphs are fakes (graph_fakes.py) and the kernels run in Triton's interpreter.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from graph_engines import (
    LINEAR,
    LONG,
    SHADOW,
    TREE,
    Lane,
    answers,
    graphs,
    only_long,
)

from ddtree.config import Grammar, SamplingParams, Speculation
from ddtree.engine import graphs as recorded
from ddtree.engine import static
from ddtree.engine.following import GrammarMatcher
from ddtree.engine.runner import DeviceRunner
from ddtree.kernels import backend
from graph_fakes import fake_graphs

WORDS, JSON = Grammar("regex", "[ -~]{4,}"), Grammar("json_object")
GRAMMAR: Lane = (TREE, SamplingParams(max_tokens=7, seed=1, grammar=WORDS))
PLAIN: Lane = (TREE, SamplingParams(max_tokens=5, temperature=0.9, seed=2, ignore_eos=True))
TOLD: Lane = (TREE, SamplingParams(max_tokens=5, temperature=0.9, top_p=0.8, seed=3, grammar=WORDS, presence_penalty=1))
SAMPLED: Lane = (LINEAR, SamplingParams(max_tokens=7, temperature=1.3, seed=4, grammar=WORDS))
SHADOWED: Lane = (SHADOW, SamplingParams(max_tokens=5, temperature=0.7, seed=5, grammar=WORDS, logprobs=1))
OWN_TEXT: Lane = (replace(TREE, tree_context="mix"), GRAMMAR[1])
ALONE: Lane = (Speculation("ar"), SamplingParams(max_tokens=3, seed=6, grammar=JSON))
TOP_P: Lane = (TREE, SamplingParams(max_tokens=5, temperature=0.9, top_p=0.7, seed=3, ignore_eos=True))
TOP_K: Lane = (LINEAR, SamplingParams(max_tokens=4, temperature=1.3, top_k=6, top_p=0.9, seed=4, ignore_eos=True))
MIN_P: Lane = (SHADOW, SamplingParams(max_tokens=4, temperature=0.8, min_p=0.3, seed=5, ignore_eos=True))
MIXES = [
    pytest.param([GRAMMAR, PLAIN], id="beside plain"),
    pytest.param([GRAMMAR, TOLD, PLAIN], id="a filter", marks=LONG),
    pytest.param([SAMPLED, SHADOWED, ALONE, GRAMMAR], id="all modes", marks=LONG),
    pytest.param([OWN_TEXT, TOLD], id="its own text", marks=LONG),
    pytest.param([(LINEAR, replace(SAMPLED[1], top_p=0.8, top_k=9)), TOP_P], id="a filter and a grammar", marks=LONG),
]


@pytest.mark.parametrize("lanes", MIXES)
@pytest.mark.parametrize("make", [
    pytest.param("scripted", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="scripts run on a CPU")),
    pytest.param("loaded", marks=LONG),
])  # fmt: skip
def test_two_graphs_give_the_tokens_of_the_host(make, request, device, lanes, monkeypatch) -> None:
    """And of the kernels launched one by one, as `--cuda-graphs off` has it."""
    load = request.getfixturevalue(make)
    monkeypatch.setattr(backend, "KINDS", set())
    expected, records = answers(load(), lanes)
    assert records.ways == {"host"}
    assert make == "loaded" or max(found[2].accepted for found in expected) > 0
    monkeypatch.setattr(backend, "KINDS", {device.type})
    found, records = answers(load(cuda_graphs=False), lanes)
    assert found == expected
    assert records.ways == {"launches"}
    with graphs(device, monkeypatch) as events:
        engine = load()
        found, records = answers(engine, lanes)
        assert found == expected
        assert "two graphs" in records.ways
        assert records.ways <= {"graph", "two graphs"}
        runner = engine.scheduler._runner
        assert isinstance(runner, DeviceRunner)
        assert any(made.split for made in runner._made.all())
    if events is not None:
        assert sum(event.startswith("replay") for event in events) >= 2 * len(records.found)


@pytest.mark.parametrize("lanes", [
    [TOP_P, PLAIN], pytest.param([TOP_K, MIN_P, TOP_P], marks=LONG), pytest.param([PLAIN, TOP_K], marks=LONG),
], ids=["beside plain", "filters alone", "top_k beside plain"])  # fmt: skip
def test_filters_are_in_the_one_graph(lanes, either, device, monkeypatch) -> None:
    """The host has no part in it, and the tokens are those of rounds that it lays and chooses for itself."""
    monkeypatch.setattr(backend, "KINDS", set())
    expected, records = answers(either(), lanes)
    assert records.ways == {"host"}
    with graphs(device, monkeypatch):
        found, records = answers(either(), lanes)
    assert records.ways == {"graph"}
    assert found == expected


@only_long
@pytest.mark.parametrize("lane", [TOP_P, TOP_K, MIN_P], ids=["top_p", "top_k and top_p", "min_p"])
def test_filtered_tokens_are_the_same_in_every_mode(lane, either, device, monkeypatch) -> None:
    """As plain decoding has them, each mode alone and all of them in one batch."""
    monkeypatch.setattr(backend, "KINDS", set())
    plain, _ = answers(either(), [(Speculation("ar"), lane[1])])
    lanes = [(speculation, lane[1]) for speculation in (Speculation("ar"), LINEAR, TREE, SHADOW)]
    with graphs(device, monkeypatch):
        engine = either(max_running_requests=4)
        together = [engine.scheduler.add([5, 9, 2], params, speculation) for speculation, params in lanes]
        ended = {}
        while engine.scheduler.has_work:
            ended |= {request: chunk.generation for request, chunk in engine.scheduler.step() if chunk.generation}
        alone = [answers(either(), [one])[0][0][0] for one in lanes]
    assert [ended[request].token_ids for request in together] == [plain[0][0]] * 4
    assert alone == [plain[0][0]] * 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="captures that fail are fakes")
@pytest.mark.full
@pytest.mark.parametrize("lane", [TOP_P, GRAMMAR], ids=["one graph", "two graphs"])
def test_a_round_that_finds_no_memory_goes_without_its_graph(lane, scripted, device, monkeypatch, caplog) -> None:
    """It says so, once; no request fails. A capture that ends in an error of its own counts as well."""
    monkeypatch.setattr(backend, "KINDS", {device.type})
    expected, _ = answers(scripted(cuda_graphs=False), [lane])

    def fail(step, pool):
        try:
            raise torch.OutOfMemoryError("tried to allocate 5 GiB")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    with fake_graphs(monkeypatch):
        monkeypatch.setattr("ddtree.engine.graphs.Recorded", fail)
        engine = scripted()
        found = [answers(engine, [lane]) for _ in range(2)]
    assert [tokens for tokens, _ in found] == [expected] * 2
    assert all(records.ways == {"launches"} for _, records in found)
    said = [record.message for record in caplog.records if "does not suffice" in record.message]
    assert len(said) == 1
    assert "1 x 8 rows" in said[0]
    assert "lower max_running_requests" in said[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="captures that fail are fakes")
def test_kept_shapes_make_way_for_a_capture(scripted, device, monkeypatch, caplog) -> None:
    """Memory that runs out is asked for again, once what only lay ready is gone; other errors are not hidden."""
    with graphs(device, monkeypatch):
        engine, record, short = scripted(), recorded.Recorded, replace(PLAIN[1], max_tokens=2)
        answers(engine, [(TREE, short)])
        made = engine.scheduler._runner._made

        def fail_beside_others(step, pool):
            if len(made.all()) > 1:
                raise torch.OutOfMemoryError("tried to allocate 5 GiB")
            return record(step, pool)

        monkeypatch.setattr(recorded, "Recorded", fail_beside_others)
        _, records = answers(engine, [(LINEAR, short)])
        assert records.ways == {"graph"}
        assert [one.shape.width for one in made.all()] == [5]
        assert not caplog.records

        def break_(step, pool):
            raise RuntimeError("an illegal memory access")

        monkeypatch.setattr(recorded, "Recorded", break_)
        with pytest.raises(RuntimeError, match="illegal"):
            answers(engine, [(TREE, short)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="only fakes tell the order")
def test_what_is_launched_when(scripted, device, monkeypatch) -> None:
    """One sequence with a grammar: its first rows, then verify and settle in turns, each verify before the host reads
    what the settle before it gave; none of them is captured again."""
    with graphs(device, monkeypatch) as events:
        engine = scripted()
        read = engine.scheduler._read
        monkeypatch.setattr(engine.scheduler, "_read", lambda *args: events.append("read") or read(*args))
        _, records = answers(engine, [GRAMMAR])
    rounds = len(records.found)
    assert rounds > 1
    assert events[:3] == ["capture 0", "capture 1", "capture 2"]
    lay, verify, settle = (f"replay {number}" for number in range(3))
    assert events[3:] == [lay, verify, *[settle, verify, "read"] * rounds]


@only_long
def test_a_sequence_that_leaves_takes_its_launched_part_along(either, device, monkeypatch) -> None:
    """Its slot is another's by then: nothing may be committed there. Its neighbours' answers stay what they are."""
    lanes = [GRAMMAR, SAMPLED, PLAIN]  # the third waits for the first one's slot
    with graphs(device, monkeypatch):
        engine = either()
        whole, _ = answers(engine, lanes)
        rest, records = answers(engine, lanes, stop_after=3)
    assert len(rest) == 2
    assert [found[0] for found in rest] == [found[0] for found in whole[1:]]
    assert "two graphs" in records.ways


@only_long
def test_an_answer_that_goes_alone_on_its_way_stays_what_it_is(either, device, monkeypatch) -> None:
    """Its grammar follows the root alone from then on; rows that were drafted before have no answer and are cut."""
    monkeypatch.setattr(backend, "KINDS", set())
    lane = TREE, SamplingParams(max_tokens=14, seed=1, grammar=WORDS)
    expected, _ = answers(either(), [lane])
    commit, gone = GrammarMatcher.commit, []

    def go_alone(self: GrammarMatcher, tokens: Sequence[int]) -> None:
        commit(self, tokens)
        if len(self._committed) >= 3 and not self.alone:
            self._recover("a limit")
            gone.append(len(self._committed))

    monkeypatch.setattr(GrammarMatcher, "commit", go_alone)
    with graphs(device, monkeypatch):
        found, records = answers(either(), [lane])
    assert found[0][0] == expected[0][0]
    assert gone
    assert records.found[-1].drafted == 0
    assert records.ways == {"two graphs"}


@only_long
def test_preparing_captures_both_kinds(either, device, monkeypatch) -> None:
    """Before the first request, so that none waits; and nothing of it is left."""
    with graphs(device, monkeypatch) as events:
        engine = either(max_running_requests=1)
        fresh, _ = answers(engine, [GRAMMAR])
        engine = either(max_running_requests=1)
        lane = engine._request([1], SamplingParams(), TREE).lane
        with torch.inference_mode():
            engine.scheduler._runner.prepare(lane, 1)
        [made] = engine.scheduler._runner._made.all()
        assert made.whole is not None
        assert made.split is not None
        monkeypatch.setattr(DeviceRunner, "_capture", lambda *args: pytest.fail("a round was captured"))
        found, records = answers(engine, [GRAMMAR])
        assert found == fresh
        assert records.ways == {"two graphs"}
    assert events is None or sum(event.startswith("capture") for event in events) == 3 + 4


@only_long
def test_a_shape_that_was_given_up_is_captured_again(either, device, monkeypatch) -> None:
    """Two sequences, then the longer one alone, twice: with room for one shape each batch gives up the other's."""
    lanes = [GRAMMAR, PLAIN]
    with graphs(device, monkeypatch) as events:
        engine = either()
        expected = [answers(engine, lanes)[0] for _ in range(2)]
        before = None if events is None else len(events)
        monkeypatch.setattr(static, "MOST_OTHERS", 1)
        engine = either()
        assert [answers(engine, lanes)[0] for _ in range(2)] == expected
        assert len(engine.scheduler._runner._made.all()) == 1
    if events is not None:
        captures = [[e.startswith("capture") for e in part].count(True) for part in (events[:before], events[before:])]
        assert captures[1] > captures[0]
