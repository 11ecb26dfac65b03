"""Every mode gives the tokens that plain decoding gives, and really speculates."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.config import MODES, SamplingParams
from ddtree.engine import StageTimer
from ddtree.engine.modes import MODES as MODE_TABLE
from ddtree.engine.observer import STAGES
from scripted import engine_for


@settings(max_examples=40, deadline=None)
@given(
    salt=st.integers(0, 10_000),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    budget=st.integers(1, 12),
    top_k=st.integers(1, 6),
    spine=st.integers(0, 6),
    ignore_eos=st.booleans(),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
)
def test_every_mode_equals_plain_decoding_alone_and_in_a_batch(
    salt, temperature, budget, top_k, spine, ignore_eos, lengths
):
    prompts = [[(salt + i + j) % 3 for j in range(n)] for i, n in enumerate(lengths)]
    params = [
        SamplingParams(max_tokens=4 + 3 * i, temperature=temperature, seed=salt + i, ignore_eos=ignore_eos)
        for i in range(len(prompts))
    ]
    results = {}
    for mode in MODES:
        engine = engine_for(salt, mode=mode, tree_budget=budget, tree_top_k=top_k, tree_spine=spine)
        alone = [engine.generate([p], [s])[0] for p, s in zip(prompts, params, strict=True)]
        batch = engine.generate(prompts, params)
        assert [g.token_ids for g in batch] == [g.token_ids for g in alone]
        assert [g.finish_reason for g in batch] == [g.finish_reason for g in alone]
        assert [g.rounds for g in batch] == [g.rounds for g in alone]
        assert [g.acceptance_length for g in batch] == [g.acceptance_length for g in alone]
        results[mode] = [(g.token_ids, g.text, g.finish_reason) for g in alone]
    assert all(result == results["ar"] for result in results.values())


def test_speculation_happens_and_leaves_the_chain():
    params, off_chain = SamplingParams(max_tokens=60, ignore_eos=True), 0
    rounds = {
        mode: engine_for(5, noise=0.6, mode=mode, tree_budget=7, tree_top_k=3).generate([[0]], [params])[0].rounds
        for mode in ("ar", "linear", "tree")
    }
    engine = engine_for(5, noise=0.6, mode="tree", tree_budget=7, tree_top_k=3)
    request = engine.scheduler.add([0], params, engine.speculation)
    while engine.scheduler.has_work:
        engine.scheduler.step()
        batch = engine.scheduler._batch
        if batch is None:
            continue
        parents = batch.state.parents[0].tolist()
        for row in (r for r in batch.state.path[0].tolist() if r > 0):
            off_chain += parents.index(parents[row]) != row  # an elder sibling is what the chain would have taken
    assert request.output.finished
    assert rounds["tree"] < rounds["linear"] < rounds["ar"] == 59
    assert off_chain > 0


@pytest.mark.parametrize("salt", [1, 2, 3])
def test_shadow_commits_what_linear_does_and_reports_the_tree(salt):
    params = [SamplingParams(max_tokens=40, ignore_eos=True)]
    options = {"tree_budget": 7, "tree_top_k": 3}
    linear = engine_for(salt, noise=0.6, mode="linear", **options).generate([[0, 1]], params)[0]
    shadow = engine_for(salt, noise=0.6, mode="shadow-linear", **options).generate([[0, 1]], params)[0]
    assert shadow.token_ids == linear.token_ids
    assert shadow.rounds == linear.rounds
    assert shadow.acceptance_length == linear.acceptance_length == shadow.shadow.linear_acceptance_length
    assert shadow.shadow.agree is True
    assert shadow.shadow.overhead is None
    assert linear.shadow is None


def test_shadow_verifies_the_union_and_no_more():
    engine = engine_for(4, mode="shadow-linear", tree_budget=6, tree_top_k=3)
    engine.generate([[0]], [SamplingParams(max_tokens=30, ignore_eos=True)])
    assert max(engine.target.forwards) <= 1 + 4 + 6
    assert min(engine.target.forwards) >= 1 + 6


def test_shadow_says_so_when_the_tree_disagrees_with_what_is_committed_later():
    """A target whose answers depend on the shape of the forward: what a broken kernel would look like."""
    engine = engine_for(4, noise=0.6, mode="shadow-linear", tree_budget=7, tree_top_k=3)
    honest = engine.target.verify

    def verify(cache, rows, position):
        logits, features = honest(cache, rows, position)
        logits[:, 3:] = logits[:, 3:].flip(-1)
        return logits, features

    engine.target.verify = verify
    generation = engine.generate([[0]], [SamplingParams(max_tokens=60, ignore_eos=True)])[0]
    assert generation.shadow.agree is False


def test_a_full_spine_and_budget_is_the_chain():
    params = [SamplingParams(max_tokens=40, ignore_eos=True)]
    linear = engine_for(9, noise=0.6, mode="linear").generate([[1]], params)[0]
    spine = engine_for(9, noise=0.6, mode="tree", tree_budget=4, tree_spine=4).generate([[1]], params)[0]
    assert (spine.rounds, spine.acceptance_length) == (linear.rounds, linear.acceptance_length)
    assert linear.acceptance_length > 1


@pytest.mark.parametrize("mode", ["linear", "shadow-linear", "tree"])
def test_crossing_the_drafters_own_limit_falls_back_to_plain_decoding(mode):
    params = [SamplingParams(max_tokens=40, ignore_eos=True)] * 2
    prompts = [[0, 1], [0, 1, 2, 0, 1, 2, 0]]
    plain = engine_for(6, mode="ar").generate(prompts, params)
    engine = engine_for(6, limit=25, mode=mode, tree_budget=6, tree_top_k=3)
    crossed = engine.generate(prompts, params)
    assert [g.token_ids for g in crossed] == [g.token_ids for g in plain]
    assert max(engine.target.forwards) > 1
    assert engine.target.forwards[-1] == 1


def test_requests_of_different_lengths_in_turn_share_a_cache():
    engine = engine_for(8, mode="tree", tree_budget=7, tree_top_k=3)
    long, short = SamplingParams(max_tokens=200, ignore_eos=True), SamplingParams(max_tokens=5, ignore_eos=True)
    fresh = [engine_for(8, mode="tree").generate([[i]], [s])[0].token_ids for i, s in enumerate((long, short))]
    assert engine.generate([[0]], [long])[0].token_ids == fresh[0]
    assert engine.generate([[1]], [short])[0].token_ids == fresh[1]
    assert engine.generate([[0]], [long])[0].token_ids == fresh[0]
    assert engine.scheduler.stats().running == 0


def test_the_drafter_is_fed_in_every_mode():
    """So that a request could change its mode without leaving holes in the drafter's context."""
    for mode in MODES:
        engine = engine_for(2, mode=mode)
        run_positions = []
        honest = engine.drafter.append
        engine.drafter.append = lambda cache, features, position, counts=None, h=honest, r=run_positions: (
            r.append((int(position[0]), counts[0] if counts else features.shape[1])),
            h(cache, features, position, counts),
        )
        engine.generate([[0, 1, 2]], [SamplingParams(max_tokens=20, ignore_eos=True)])
        ends = [position + count for position, count in run_positions]
        assert [position for position, _ in run_positions] == [0, *ends[:-1]]


def test_stage_times_are_there_for_whoever_asks():
    engine = engine_for(2, mode="tree")
    timer = StageTimer()
    generation = engine.generate([[0]], [SamplingParams(max_tokens=9, ignore_eos=True)], observer=timer)[0]
    assert set(generation.stages) == set(STAGES)
    assert all(seconds >= 0 for seconds in generation.stages.values())
    assert engine.generate([[0]], [SamplingParams(max_tokens=9)])[0].stages == {}


def test_an_engine_without_drafter_shares_the_target_and_decodes_plainly():
    engine = engine_for(3, mode="tree")
    plain = engine.without_drafter()
    params = [SamplingParams(max_tokens=20, ignore_eos=True)]
    assert plain.target is engine.target
    assert plain.drafter is None
    assert plain.generate([[0]], params)[0].mode == "ar"
    assert plain.generate([[0]], params)[0].token_ids == engine.generate([[0]], params)[0].token_ids


def test_the_table_of_modes_is_the_one_users_are_offered():
    assert tuple(MODE_TABLE) == MODES
