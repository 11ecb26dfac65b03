"""tree_context: not one token changes, and what the text says is really drafted and accepted."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.config import MODES, TREE_CONTEXTS, EngineConfig, SamplingParams, Speculation
from ddtree.engine import Engine, ops
from ddtree.engine.context import SequenceContext
from ddtree.engine.modes import MODES as MODE_TABLE
from ddtree.engine.modes import Layout, lay_out
from ddtree.errors import InvalidOption
from ddtree.kernels import backend
from ddtree.kernels.context import KINDS
from ddtree.tree import Branch, Guesses, RoundState
from ddtree.tree.matches import Confidence
from scripted import ScriptedDrafter, ScriptedTarget, engine_for, scripted_engine

DRAFTING = [mode for mode in MODES if mode != "ar"]
ASKING = [context for context in TREE_CONTEXTS if context != "off"]
PERIOD, LETTERS = 7, 12
PHRASE = [3, 1, 4, 1, 5, 9, 2]


def copying_engine(mode: str, tree_context: str, wrong_every: int = 0, **more) -> Engine:
    """A target that goes on as PERIOD tokens ago (but at every so manieth place), and a drafter that knows nothing."""

    def script(history: tuple[int, ...]) -> Sequence[float]:
        token = history[-PERIOD] if len(history) >= PERIOD else 0
        if wrong_every and len(history) % wrong_every == 0:
            token = (token + 5) % LETTERS
        return [2.0 if t == token else 0.1 * (t * len(history) % 7) for t in range(LETTERS)]

    def propose(history: tuple[int, ...]) -> list[list[float]]:
        return [[float(t in (10, 11)) * t for t in range(LETTERS)] for _ in range(6)]

    options = {"tree_budget": 9, "tree_top_k": 2, **more}
    return scripted_engine(
        ScriptedTarget(script, LETTERS), ScriptedDrafter(propose, 7), "abcdefghijkl", mode=mode,
        tree_context=tree_context, **options,
    )  # fmt: skip


def watched(engine: Engine, prompt: list[int], params: SamplingParams, monkeypatch) -> tuple[Engine, int]:
    """An answer's finished request, and how many nodes were accepted that were none of the drafter's candidates."""
    laid: list[Layout] = []

    def spy(*args) -> Layout:
        laid.append(lay_out(*args))
        return laid[-1]

    monkeypatch.setattr(ops, "lay_out", spy)
    request, foreign = engine.scheduler.add(prompt, params, engine.speculation), 0
    while engine.scheduler.has_work:
        rounds = len(laid)
        engine.scheduler.step()
        if len(laid) > rounds and engine.scheduler._batch is not None:
            path = engine.scheduler._batch.state.path[0].tolist()
            foreign += sum(row in laid[-1].nodes.foreign for row in path)
    return request.generation(), foreign


@settings(max_examples=40, deadline=None)
@given(
    salt=st.integers(0, 10_000),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    budget=st.integers(1, 12),
    top_k=st.integers(1, 4),
    spine=st.integers(0, 4),
    context=st.sampled_from(ASKING),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
)
def test_every_mode_equals_plain_decoding_alone_and_in_a_batch(
    salt, temperature, budget, top_k, spine, context, lengths
):
    prompts = [[(salt + i + j) % 3 for j in range(n)] for i, n in enumerate(lengths)]
    params = [
        SamplingParams(max_tokens=6 + 7 * i, temperature=temperature, seed=salt + i, ignore_eos=i % 2 == 0)
        for i in range(len(prompts))
    ]
    options = {"tree_budget": budget, "tree_top_k": top_k, "tree_spine": spine, "tree_context": context}
    results = {}
    for mode in MODES:
        engine = engine_for(salt, noise=0.6, mode=mode, **options)
        alone = [engine.generate([p], [s])[0] for p, s in zip(prompts, params, strict=True)]
        batch = engine.generate(prompts, params)
        assert [g.token_ids for g in batch] == [g.token_ids for g in alone]
        assert [(g.rounds, g.acceptance_length, g.shadow) for g in batch] == [
            (g.rounds, g.acceptance_length, g.shadow) for g in alone
        ]
        assert all(g.shadow is None or g.shadow.agree in (True, None) for g in alone)
        results[mode] = [(g.token_ids, g.text, g.finish_reason) for g in alone]
    assert all(result == results["ar"] for result in results.values())


@pytest.mark.parametrize("mode", DRAFTING)
@pytest.mark.parametrize("context", ASKING)
@pytest.mark.parametrize("wrong_every", [0, 5])
def test_what_the_text_says_is_accepted_where_the_drafter_knows_nothing(mode, context, wrong_every, monkeypatch):
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    prompt = PHRASE + PHRASE[:3]
    plain = copying_engine("ar", context, wrong_every).generate([prompt], [params])[0]
    off = copying_engine(mode, "off", wrong_every).generate([prompt], [params])[0]
    found, foreign = watched(copying_engine(mode, context, wrong_every), prompt, params, monkeypatch)
    assert found.token_ids == off.token_ids == plain.token_ids
    assert off.acceptance_length < 1.5
    assert found.acceptance_length > (1.5 if wrong_every else 4)
    # The drafter's candidates are 10 and 11, which the phrase has not.
    assert foreign > (10 if wrong_every else 40)


def test_sampled_answers_with_penalties_keep_their_tokens(monkeypatch):
    params = SamplingParams(max_tokens=60, temperature=0.8, seed=4, presence_penalty=0.3, top_p=0.95)
    plain = copying_engine("ar", "off").generate([PHRASE * 2], [params])[0]
    for mode in DRAFTING:
        found, foreign = watched(copying_engine(mode, "mix"), PHRASE * 2, params, monkeypatch)
        assert found.token_ids == plain.token_ids
        assert foreign > 0
        assert found.rounds < plain.rounds


@pytest.mark.parametrize("context", ASKING)
@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_shadow_linear_with_a_context_commits_what_linear_does(context, temperature):
    params = [SamplingParams(max_tokens=50, ignore_eos=True, temperature=temperature, seed=2)]
    linear = copying_engine("linear", context).generate([PHRASE * 2], params)[0]
    shadow = copying_engine("shadow-linear", context).generate([PHRASE * 2], params)[0]
    assert shadow.token_ids == linear.token_ids
    assert shadow.rounds == linear.rounds
    assert shadow.acceptance_length == linear.acceptance_length == shadow.shadow.linear_acceptance_length
    assert shadow.shadow.agree is True
    assert shadow.shadow.tree_acceptance_length > 1.5


@pytest.mark.parametrize("wrong_every", [4, 5])
def test_the_shadowed_tree_is_counted_by_the_answer_that_came(wrong_every, monkeypatch):
    """Its length, worked out anew: how far the tree of every round holds the answer's own next tokens."""
    engine, laid = copying_engine("shadow-linear", "mix", wrong_every), []
    monkeypatch.setattr(ops, "lay_out", lambda *args: laid.append((args[3], lay_out(*args))) or laid[-1][1])
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    request, roots = engine.scheduler.add(PHRASE * 2, params, engine.speculation), []
    while engine.scheduler.has_work:
        rounds, position = len(laid), request.position
        engine.scheduler.step()
        roots += [position] * (len(laid) - rounds)
    lengths, gained = [], 0
    for position, (guesses, layout) in zip(roots, laid, strict=True):
        coming = tuple(request.tokens[position + 1 :])
        if len(coming) <= len(guesses.tokens):
            break  # behind the answer's end nobody knows
        paths = tokens_of(layout, guesses.tokens)
        lengths.append(max(len(path) for path in paths[: layout.tree_size] if coming[: len(path)] == path))
        chain = max(len(paths[row]) for row in layout.chain if coming[: len(paths[row])] == paths[row])
        gained += lengths[-1] > chain
    seen = request.counts.tree_accepted - sum(lengths)
    assert 0 <= seen <= 6 * (len(laid) - len(lengths))
    assert len(laid) - len(lengths) < 0.2 * len(laid)
    assert gained > 0
    assert request.generation().shadow.agree is True


def tokens_of(layout: Layout, tokens: list[list[int]]) -> list[tuple[int, ...]]:
    state = RoundState.allocate(1, len(layout.nodes), len(tokens))
    state.lay([layout.nodes], [tokens])
    return state.draft_tree(0).paths()


def test_the_shadow_is_the_tree_and_the_chain_that_the_other_modes_lay():
    tokens, log_q = [[1, 2]] * 4, [[-0.4, -1.2]] * 4
    speculation = Speculation(tree_budget=5, tree_top_k=2)
    guesses = Guesses(Branch((7, 8, 9, 7), (0.55, 0.7, 0.3, 0.85)), tokens, log_q)
    layouts = {mode: lay_out(MODE_TABLE[mode], speculation, log_q, guesses) for mode in DRAFTING}
    paths = {mode: tokens_of(layout, tokens) for mode, layout in layouts.items()}
    shadow = layouts["shadow-linear"]
    assert paths["shadow-linear"][: shadow.tree_size] == paths["tree"]
    assert [paths["shadow-linear"][row] for row in shadow.chain] == paths["linear"]
    assert paths["linear"] == [(), (7,), (7, 8), (7, 8, 1), (7, 8, 1, 1)]  # behind 7 8 the drafter is likelier
    assert (7, 8) in paths["tree"]
    plain = lay_out(MODE_TABLE["shadow-linear"], speculation, log_q)
    assert not plain.nodes.foreign
    assert tokens_of(plain, tokens)[plain.chain[-1]] == (1, 1, 1, 1)


@pytest.mark.parametrize("mode", DRAFTING)
def test_reused_prefixes_draft_as_fresh_ones_do(mode):
    turn, answers = SamplingParams(max_tokens=25, ignore_eos=True), []
    for reuse in (True, False):
        engine = copying_engine(mode, "mix", 6)
        engine.scheduler._reuse = reuse
        prompt, own = list(PHRASE), []
        for turns in range(3):
            generation = engine.generate([prompt], [turn])[0]
            own.append((generation.token_ids, generation.rounds, generation.acceptance_length))
            assert (generation.cached_tokens > 0) == (reuse and turns > 0)
            prompt = [*prompt, *generation.token_ids, 8, 8]
        answers.append(own)
    assert answers[0] == answers[1]


def test_requests_of_one_engine_choose_for_themselves_and_keep_their_texts_apart():
    engine = copying_engine("tree", "off")
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    contexts = ["off", "branch", "mix", "mix"]
    prompts = [PHRASE * 2, PHRASE * 2, PHRASE * 2, [6, 7, 8, 6, 0, 0, 2, 6, 7]]
    speculations = [replace(engine.speculation, tree_context=context) for context in contexts]
    requests = [engine.scheduler.add(p, params, s) for p, s in zip(prompts, speculations, strict=True)]
    done = {}
    while engine.scheduler.has_work:
        done |= {r: chunk.generation for r, chunk in engine.scheduler.step() if chunk.generation}
    for request, prompt, speculation in zip(requests, prompts, speculations, strict=True):
        alone = copying_engine("tree", "off").generate([prompt], [params], speculation)[0]
        assert (done[request].token_ids, done[request].rounds) == (alone.token_ids, alone.rounds)
    assert done[requests[0]].rounds > 2 * done[requests[2]].rounds


def test_only_what_needs_it_keeps_an_index():
    for speculation in (Speculation("ar", tree_context="mix"), *(Speculation(m, tree_context="off") for m in DRAFTING)):
        assert SequenceContext.of(speculation, [1]) is None
    context = SequenceContext.of(Speculation("linear", tree_context="branch"), [1, 2])
    tokens, log_q = [[5, 2], [5, 6], [5, 6]], [[-0.1, -3.0]] * 3
    assert context is not None
    assert context.guesses(tokens, log_q) is None, "before the first token there is no round"
    context.commit([1])
    said = context.guesses(tokens, log_q)
    assert said is not None
    assert said.context == Branch((2, 1, 2), tuple(map(Confidence(), (1, 2, 3))), length=1)


@pytest.mark.parametrize("kind", ["branch", "mix"])
def test_a_sequence_learns_from_what_became_of_its_guesses(kind):
    context = SequenceContext(kind, [1, 2, 3, 4, 1, 2, 3])
    tokens, log_q = [[4, 9], [8, 9], [8, 9]], [[-0.5, -1.0]] * 3
    context.commit([4])
    said = context.guesses(tokens, log_q)
    assert said is not None
    assert [said.context.behind(path).token for path in ((), (1,), (1, 2))] == [1, 2, 3]
    context.commit([1, 2, 7])  # 4 tokens match, then 5, then 6, which is wrong
    expected = Confidence()
    for length, right in ((4, True), (5, True), (6, False)):
        expected.learn(length, right)
    later = context.guesses(tokens, log_q)
    assert context._index is not None
    assert [context._index.confidence(n) for n in range(1, 40)] == [expected(n) for n in range(1, 40)]
    assert later is None or later.behind(()) is None, "7 is new"
    context.commit([1])  # nothing was said of it
    said = context.guesses([[2, 9]] * 3, log_q)
    assert said is not None
    context.commit([2])  # which the drafter expected, too
    expected.learn(1, True, float(np.exp(-0.5)))
    assert context._index.confidence(1) == expected(1)


class TestOnADevice:
    """Where the rows are laid by kernels, a context is what it says too."""

    @pytest.fixture(autouse=True)
    def _kernels(self, monkeypatch) -> None:
        monkeypatch.setattr(backend, "KINDS", {"cpu"})

    @pytest.mark.parametrize("context", ["branch", "mix"])
    def test_it_is_said_and_every_request_may_ask_for_it(self, context):
        engine = engine_for(3, mode="tree", tree_context=context)
        assert engine.info()["tree_context"] == context
        for mode in MODES:
            engine.check([1], SamplingParams(max_tokens=2), Speculation(mode, tree_context=context))

    def test_auto_is_what_it_is_on_a_cpu(self):
        engine = engine_for(3, mode="tree", tree_context="auto")
        assert engine.info()["tree_context"] == "mix"
        assert engine_for(3, mode="tree").info()["tree_context"] == "off"
        assert SequenceContext.of(engine.speculation, [1]).plan == KINDS["mix"]


def test_info_says_what_runs():
    found = {context: engine_for(3, mode="tree", tree_context=context).info()["tree_context"] for context in ASKING}
    assert found == {"branch": "branch", "mix": "mix", "auto": "mix"}


def test_an_unknown_context_is_refused_by_name():
    with pytest.raises(InvalidOption, match="tree_context 'on' is unknown: choose one of off, branch, mix, auto"):
        EngineConfig(speculation=Speculation(tree_context="on"))
