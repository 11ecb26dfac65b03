"""Penalties and biases in rounds on the device: one graph, the tokens of rounds that the host lays and chooses for."""

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
from ddtree.engine.history import DeviceHistories
from ddtree.engine.runner import DeviceRunner
from ddtree.kernels import backend
from scripted_text import END

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # see test_kernel_penalty.py
AR = Speculation("ar")
NONE = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": ()}
BIAS = tuple((token, 1.3 if token % 5 else -0.7) for token in range(32, 127))  # the scripted drafter drafts these
SAID = SamplingParams(max_tokens=9, ignore_eos=True, seed=1, presence_penalty=-0.6, frequency_penalty=-0.9)
REPEATED = SamplingParams(max_tokens=9, ignore_eos=True, seed=2, temperature=0.3, repetition_penalty=0.5)
BIASED = SamplingParams(max_tokens=6, ignore_eos=True, seed=3, temperature=0.4, top_p=0.8, logit_bias=BIAS)
ALL = replace(SAID, max_tokens=6, temperature=1.2, top_k=9, repetition_penalty=0.6, logit_bias=BIAS, seed=4)
PLAIN: Lane = (TREE, SamplingParams(max_tokens=5, temperature=0.9, seed=2, ignore_eos=True))
TOLD: Lane = (TREE, replace(BIASED, max_tokens=5, grammar=Grammar("regex", "[ -~]{4,}"), presence_penalty=0.5))
LATE: Lane = (LINEAR, replace(SAID, ignore_eos=False, min_tokens=4, logit_bias=((END, 100.0),)))


def without(lanes: Sequence[Lane]) -> list[Lane]:
    """The same requests without penalties and biases."""
    return [(speculation, replace(params, **NONE)) for speculation, params in lanes]  # type: ignore[arg-type]


def by_host(make, lanes: Sequence[Lane], **config) -> list[tuple]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "KINDS", set())
        found, records = answers(make(**config), lanes)
    assert records.ways == {"host"}
    return found


MIXES = [
    pytest.param([(TREE, replace(SAID, max_tokens=6))], id="alone"),
    pytest.param([(TREE, SAID), PLAIN], id="beside plain", marks=LONG),
    pytest.param([(LINEAR, BIASED), (TREE, REPEATED)], id="a bias and a repetition", marks=LONG),
    pytest.param([(SHADOW, SAID), (AR, ALL), (TREE, ALL), (LINEAR, REPEATED)], id="all modes", marks=LONG),
    pytest.param([(replace(TREE, tree_context="mix"), SAID), PLAIN], id="its own text", marks=LONG),
    pytest.param([(TREE, replace(SAID, logprobs=2)), (SHADOW, REPEATED)], id="log-probabilities", marks=LONG),
]


@pytest.mark.parametrize("lanes", MIXES)
def test_they_are_in_the_one_graph(lanes, either, device, monkeypatch) -> None:
    """The host has no part in it, and the tokens are those of rounds that it lays and chooses for itself."""
    expected = by_host(either, lanes)
    assert max(found[2].accepted for found in expected) > 0
    bare = without(lanes)
    plain = by_host(either, bare)
    changed = [i for i, lane in enumerate(lanes) if lane != bare[i]]
    assert all(expected[i][0] != plain[i][0] for i in changed), "penalties changed nothing"
    with graphs(device, monkeypatch):
        found, records = answers(either(), lanes)
    assert found == expected
    assert records.ways == {"graph"}


@only_long
@pytest.mark.parametrize("lanes", MIXES)
def test_kernels_launched_one_by_one_give_the_same(lanes, either, device, monkeypatch) -> None:
    """As `--cuda-graphs off` has it."""
    expected = by_host(either, lanes)
    monkeypatch.setattr(backend, "KINDS", {device.type})
    found, records = answers(either(cuda_graphs=False), lanes)
    assert found == expected
    assert records.ways == {"launches"}


@pytest.mark.parametrize("lanes", [
    pytest.param([TOLD, PLAIN], marks=LONG), pytest.param([LATE, TOLD], marks=LONG), [LATE],
], ids=["a grammar", "a grammar beside min_tokens", "min_tokens"])  # fmt: skip
def test_under_masks_they_are_changed_by_the_same_kernel(lanes, either, device, monkeypatch) -> None:
    """Of a grammar and of min_tokens: two graphs, and the host says what may follow, no more."""
    expected = by_host(either, lanes)
    assert [found[0] for found in expected] != [found[0] for found in by_host(either, without(lanes))]
    monkeypatch.setattr("ddtree.engine.sampling.RowSampler._filtered_best", None)  # what a host's round would call
    monkeypatch.setattr("ddtree.engine.history.History.apply_", only_a_prompt_s_row())
    with graphs(device, monkeypatch):
        found, records = answers(either(), lanes)
    assert found == expected
    assert "two graphs" in records.ways
    assert records.ways <= {"graph", "two graphs"}  # those that outlive the others


def only_a_prompt_s_row():
    from ddtree.engine.history import History

    apply = History.apply_

    def checked(self, scores, logits, rows) -> None:
        assert rows.depths == [0], "the host changes a round's logits"
        apply(self, scores, logits, rows)

    return checked


@only_long
@pytest.mark.parametrize("params", [SAID, REPEATED, ALL], ids=["output", "repetition", "all"])
def test_tokens_are_the_same_in_every_mode(params, either, device, monkeypatch) -> None:
    [plain] = by_host(either, [(AR, params)])
    with graphs(device, monkeypatch):
        found = [answers(either(), [(mode, params)])[0][0][0] for mode in (AR, LINEAR, TREE, SHADOW)]
    assert found == [plain[0]] * 4


@only_long
def test_a_slot_s_next_request_starts_afresh(either, device, monkeypatch) -> None:
    """One slot: requests one after another, one that is given up half-way and asked again, and one of another kind."""
    lanes: list[Lane] = [(TREE, SAID), (TREE, replace(BIASED, max_tokens=4)), (TREE, replace(SAID, max_tokens=4))]
    expected = by_host(either, lanes, max_running_requests=1)
    with graphs(device, monkeypatch):
        engine = either(max_running_requests=1)
        runner = engine.scheduler._runner
        assert isinstance(runner, DeviceRunner)
        runner._made_histories = dirty = DeviceHistories(2, engine.target.spec.vocab_size, device)
        dirty.store.words.fill_(0x7FFFFFF3)
        dirty.store.biases.fill_(torch.nan)
        dropped, _ = answers(engine, lanes[:1], stop_after=4)
        assert not dropped
        found, records = answers(engine, lanes)
    # Requests one after another have prompts of their own place in the list: so are the host's.
    assert found == expected
    assert records.ways == {"graph"}


@only_long
@pytest.mark.skipif(torch.cuda.is_available(), reason="scripts run on a CPU")
def test_rounds_beyond_the_kernels_count_as_well(scripted, monkeypatch) -> None:
    """A sequence that only the host can lay joins and leaves: what it counted meanwhile goes to the device."""
    lanes: list[Lane] = [
        (TREE, replace(SAID, max_tokens=14)),
        (Speculation("tree", 300, 2), replace(SAID, max_tokens=3)),
    ]
    expected = by_host(scripted, lanes, max_tree_budget=300)
    sent = []
    send = DeviceHistories.bring
    monkeypatch.setattr(DeviceHistories, "bring", lambda *args: sent.append(len(args[1])) or send(*args))
    monkeypatch.setattr(backend, "KINDS", {"cpu"})
    found, records = answers(scripted(max_tree_budget=300), lanes)
    assert found == expected
    assert records.ways == {"host", "launches"}
    assert len(sent) >= 1


def test_they_are_in_the_memory_plan(either, device, monkeypatch) -> None:
    """The histories of all slots, and nothing of them where the host lays rounds."""
    monkeypatch.setattr(backend, "KINDS", {device.type})
    engine = either()
    made = DeviceHistories(3, engine.target.spec.vocab_size, device).store
    assert engine._store.plan.facts()["histories"] == made.words.nbytes + made.biases.nbytes
    monkeypatch.setattr(backend, "KINDS", set())
    assert "histories" not in either()._store.plan.facts()
