"""tree_context in rounds on the device, against rounds laid by the host: the same tokens, rounds and counts."""

from collections.abc import Sequence

import pytest
import torch

from ddtree.config import SamplingParams, Speculation
from ddtree.engine import Engine
from ddtree.engine.context import DeviceTexts
from ddtree.engine.prompts import Prompts
from ddtree.engine.runner import DeviceRunner
from ddtree.kernels import backend
from scripted import ScriptedDrafter, ScriptedTarget, scripted_engine

# Scripted models run on the CPU alone.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted here")
PERIOD, LETTERS = 7, 12
PHRASE = [3, 1, 4, 1, 5, 9, 2]
GREEDY = SamplingParams(max_tokens=22, ignore_eos=True)
LANES = [
    (PHRASE * 2, GREEDY, Speculation("tree", 6, 2, 0, "mix")),
    ([6, 7, 8, 6, 7], GREEDY, Speculation("linear", tree_context="branch")),
    (PHRASE, SamplingParams(max_tokens=13, temperature=0.4, seed=2, ignore_eos=True),
     Speculation("shadow-linear", 5, 2, 1, "mix")),
    (PHRASE * 2, SamplingParams(max_tokens=6), Speculation("tree", 6, 2, tree_context="off")),
    (PHRASE, SamplingParams(max_tokens=9, temperature=0.6, top_p=0.9, seed=3), Speculation("tree", 5, 2, 0, "branch")),
]  # fmt: skip


def engine(slots: int = 3) -> Engine:
    """A target that goes on as PERIOD tokens ago, but at every fifth place; a drafter that hardly knows anything."""

    def script(history: tuple[int, ...]) -> Sequence[float]:
        token = history[-PERIOD] if len(history) >= PERIOD else 0
        if len(history) % 5 == 0:
            token = (token + 5) % LETTERS
        return [2.0 if t == token else 0.1 * (t * len(history) % 7) for t in range(LETTERS)]

    def propose(history: tuple[int, ...]) -> list[list[float]]:
        return [[float((t + len(history)) % 5 == depth % 5) * t / 4 for t in range(LETTERS)] for depth in range(4)]

    config = {"max_running_requests": slots, "max_model_len": 80}
    made = scripted_engine(
        ScriptedTarget(script, LETTERS), ScriptedDrafter(propose, 5), "abcdefghijkl", config, mode="tree",
        tree_budget=6, tree_top_k=2,
    )  # fmt: skip
    # Scripted models take prompts as they come, not padded.
    made.scheduler._prompts = Prompts(made.target, made.drafter, made._store)
    return made


def answers(made: Engine, lanes) -> list:
    requests = [made.scheduler.add(prompt, params, speculation) for prompt, params, speculation in lanes]
    found = {}
    while made.scheduler.has_work:
        for request, chunk in made.scheduler.step():
            assert chunk.error is None
            if chunk.generation:
                found[request] = chunk.generation
    return [
        (g.token_ids, g.rounds, g.speculative, g.shadow, g.finish_reason) for g in (found[r] for r in requests)
    ]  # fmt: skip


@pytest.fixture
def on_the_device(monkeypatch):
    monkeypatch.setattr(backend, "KINDS", {"cpu"})


def by_host(lanes) -> list:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "KINDS", set())
        return answers(engine(), lanes)


@pytest.mark.full
def test_rounds_equal_those_of_the_host(on_the_device):
    """Five requests over three slots: batches change, a slot's next text takes the place of the one before."""
    made = engine()
    assert isinstance(made.scheduler._runner, DeviceRunner)
    found = answers(made, LANES)
    assert found == by_host(LANES)
    plain = by_host([(prompt, params, Speculation("tree", 6, 2, 0, "off")) for prompt, params, _ in LANES])
    assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in plain]
    assert found[0][1] < plain[0][1], "the text helps"


@pytest.mark.full
def test_a_reused_prefix_and_a_second_turn(on_the_device):
    turns = [PHRASE * 2, [*PHRASE * 2, 1, 4, 1, 5, 8, 8, 3, 1]]
    made, host = engine(1), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "KINDS", set())
        reference = engine(1)
        host = [answers(reference, [(turn, *LANES[0][1:])]) for turn in turns]
    assert [answers(made, [(turn, *LANES[0][1:])]) for turn in turns] == host


def test_rounds_beyond_the_kernels_take_the_texts_along(on_the_device, monkeypatch):
    """A lane that only the host can lay joins and leaves: what was learned goes to the host and back."""
    calls = []
    for name in ("bring", "give_back"):
        real = getattr(DeviceTexts, name)
        monkeypatch.setattr(DeviceTexts, name, lambda *a, real=real, name=name: calls.append(name) or real(*a))
    wide = ([5, 6], SamplingParams(max_tokens=5, ignore_eos=True), Speculation("tree", 300, 2))
    lanes = [LANES[0], LANES[3], wide]
    made = engine(2)
    made.config = made.config.__class__(**{**vars(made.config), "max_tree_budget": 300})
    reference = [*by_host_wide(lanes)]
    assert answers(made, lanes) == reference
    first, last = calls.index("bring"), len(calls) - calls[::-1].index("bring")
    assert "give_back" in calls[first:last]


def by_host_wide(lanes) -> list:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "KINDS", set())
        made = engine(2)
        made.config = made.config.__class__(**{**vars(made.config), "max_tree_budget": 300})
        return answers(made, lanes)


def test_every_request_chooses_for_itself_and_auto_is_mix(on_the_device):
    made = engine()
    speculation = Speculation("tree", 6, 2, 0, "auto")
    assert made._request([1], GREEDY, speculation).lane.context == 2
    assert made._request([1], GREEDY, Speculation("tree", 6, 2, tree_context="off")).lane.context == 0
    assert made._request([1], GREEDY, LANES[0][2]).lane.context == 2
    assert made._request([1], GREEDY, LANES[4][2]).lane.context == 1
