"""Prefix reuse: a next turn computes only what is new, and drafts as well as if everything had been computed."""

import itertools

import pytest

from ddtree.config import MODES, SamplingParams
from ddtree.engine.observer import Unobserved
from scripted import engine_for

TURN = SamplingParams(max_tokens=30, ignore_eos=True)
OPTIONS = {"tree_budget": 7, "tree_top_k": 3}


def converse(engine, turns: int = 4):
    """A conversation whose every turn holds the whole one before: the generations."""
    prompt, answers = [0, 1, 2, 0, 1, 1], []
    for turn in range(turns):
        generation = engine.generate([prompt], [TURN])[0]
        answers.append(generation)
        prompt = [*prompt, *generation.token_ids, turn % 3, 2, 0]
    return answers


@pytest.mark.parametrize("mode", MODES)
def test_a_conversation_reuses_all_it_can_and_nothing_changes(mode):
    """atlas#693, vllm#47930: acceptance fell after a hit, since the drafter's context was missing or shifted."""
    reused = converse(engine_for(7, noise=0.6, mode=mode, **OPTIONS))
    fresh = converse(engine_for(7, noise=0.6, mode=mode, config={"prefix_caching": False}, **OPTIONS))
    for one, two in zip(reused, fresh, strict=True):
        assert (one.token_ids, one.rounds, one.acceptance_length) == (two.token_ids, two.rounds, two.acceptance_length)
    assert [g.cached_tokens for g in fresh] == [0] * 4
    for before, after in itertools.pairwise(reused):
        # All but the new ones, and the last token, unless a forward has seen it because the limit fell inside a block.
        assert 0 <= before.prompt_tokens + len(before.token_ids) - after.cached_tokens <= 1
    assert max(g.acceptance_length for g in reused) > 1 or mode == "ar"


def test_a_template_that_drops_thinking_shares_what_lies_before_it():
    engine = engine_for(7, noise=0.6, mode="tree", **OPTIONS)
    fresh = engine_for(7, noise=0.6, mode="tree", config={"prefix_caching": False}, **OPTIONS)
    prompt = [0, 1, 2, 0, 1, 1]
    first = engine.generate([prompt], [TURN])[0]
    think, answer = first.token_ids[:20], first.token_ids[20:]
    assert think[0] != answer[0], "the test needs a turn whose dropped part shows at its first token"
    turn = [*prompt, *answer, 2, 0]  # the thinking part is gone from the history
    second, expected = engine.generate([turn], [TURN])[0], fresh.generate([turn], [TURN])[0]
    assert second.cached_tokens == len(prompt)
    assert (second.token_ids, second.rounds, second.acceptance_length) == (
        expected.token_ids,
        expected.rounds,
        expected.acceptance_length,
    )


def test_different_tails_behind_a_shared_beginning():
    shared = [0, 1, 2, 1, 0, 0, 2, 1]
    engine = engine_for(7, noise=0.6, mode="tree", **OPTIONS)
    fresh = engine_for(7, noise=0.6, mode="tree", config={"prefix_caching": False}, **OPTIONS)
    for tail in ([0], [1, 1], [2, 0, 1]):
        one, two = (e.generate([shared + tail], [TURN])[0] for e in (engine, fresh))
        assert (one.token_ids, one.acceptance_length) == (two.token_ids, two.acceptance_length)
        assert one.cached_tokens >= (0 if tail == [0] else len(shared))


def test_choices_of_one_prompt_share_its_prefill():
    """Also when they come at the same time: the second waits for the first one's prompt, and copies it."""
    engine, prompt = engine_for(7, mode="tree"), [0, 1, 2] * 20
    rows = []
    honest = engine.target.prefill
    engine.target.prefill = lambda cache, ids, position: (rows.append(ids.shape[1]), honest(cache, ids, position))[1]
    params = [SamplingParams(max_tokens=12, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(4)]
    together = engine.generate([prompt] * 4, params)
    assert sum(rows) == 60 + 3
    assert [g.cached_tokens for g in together] == [0, 59, 59, 59]
    assert [g.token_ids for g in together] == [
        engine_for(7, mode="tree").generate([prompt], [p])[0].token_ids for p in params
    ]


def test_an_aborted_request_leaves_a_sound_prefix():
    engine, prompt = engine_for(7, mode="tree", **OPTIONS), [0, 1, 2, 0]
    stream = engine.stream(prompt, TURN)
    tokens = [token for _ in range(4) for token in next(stream).token_ids]
    stream.close()
    turn = [*prompt, *tokens, 1]
    again = engine.generate([turn], [TURN])[0]
    expected = engine_for(7, mode="tree", **OPTIONS).generate([turn], [TURN])[0]
    assert again.cached_tokens == len(prompt) + len(tokens) - 1
    assert (again.token_ids, again.acceptance_length) == (expected.token_ids, expected.acceptance_length)


@pytest.mark.parametrize("mode", MODES)
def test_prefixes_dropped_while_others_run(mode):
    """Between any two steps: what runs goes on as if nothing had happened, what comes next is computed anew."""
    prompts = [0, 1, 2, 0, 1, 1], [1, 1, 2, 0], [2, 0, 1, 2, 2]
    alone = [engine_for(7, noise=0.6, mode=mode, **OPTIONS).generate([p], [TURN])[0] for p in prompts]
    engine = engine_for(7, noise=0.6, mode=mode, config={"max_running_requests": 2, "prefill_chunk": 2}, **OPTIONS)
    scheduler = engine.scheduler
    requests = [scheduler.add(prompt, TURN, engine.speculation) for prompt in prompts]  # the third one waits
    found = {}
    while scheduler.has_work:
        found |= {r: chunk.generation for r, chunk in scheduler.step() if chunk.generation}
        scheduler.drop_prefixes()
    assert [(found[r].token_ids, found[r].acceptance_length) for r in requests] == [
        (one.token_ids, one.acceptance_length) for one in alone
    ]
    assert scheduler.stats().kv_tokens_used == 0
    assert engine.generate([prompts[0]], [TURN])[0].cached_tokens == 0
    assert engine.generate([prompts[0]], [TURN])[0].cached_tokens == len(prompts[0]) - 1


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_cut_inside_a_block_leaves_a_sound_prefix(mode):
    """Tokens behind a limit or a stop lie in the cache, and are no part of what may be reused."""
    for limit in range(1, 12):
        engine = engine_for(7, noise=0.2, mode=mode, **OPTIONS)
        first = engine.generate([[0, 1]], [SamplingParams(max_tokens=limit, ignore_eos=True)])[0]
        turn = [0, 1, *first.token_ids, *[(first.token_ids[-1] + 1) % 3] * 3]
        second = engine.generate([turn], [TURN])[0]
        expected = engine_for(7, noise=0.2, mode=mode, **OPTIONS).generate([turn], [TURN])[0]
        assert (second.token_ids, second.rounds) == (expected.token_ids, expected.rounds)
        assert second.cached_tokens <= 2 + limit


def test_a_plain_engine_and_a_drafting_one_share_slots_without_harm():
    engine = engine_for(7, noise=0.6, mode="tree", **OPTIONS)
    plain = engine.without_drafter()
    expected = engine_for(7, noise=0.6, mode="tree", **OPTIONS).generate([[0, 1, 2, 0]], [TURN])[0]
    plain.generate([[0, 1, 2, 0]], [TURN])
    answer = engine.generate([[0, 1, 2, 0]], [TURN])[0]
    assert answer.cached_tokens == 0
    assert (answer.token_ids, answer.acceptance_length) == (expected.token_ids, expected.acceptance_length)
    assert plain.generate([[0, 1, 2, 0]], [TURN])[0].cached_tokens == 3


def test_prompts_longer_than_a_chunk_reach_the_drafter_whole():
    """mlx-vlm#2096: only the last chunk did. The scripted drafter fails on a position it has never seen."""
    for chunk in (1, 3, 7, 64):
        engine = engine_for(7, noise=0.6, mode="tree", config={"prefill_chunk": chunk}, **OPTIONS)
        answer = engine.generate([[0, 1, 2] * 7], [TURN])[0]
        expected = engine_for(7, noise=0.6, mode="tree", **OPTIONS).generate([[0, 1, 2] * 7], [TURN])[0]
        assert (answer.token_ids, answer.rounds) == (expected.token_ids, expected.rounds)


def test_waiting_time_is_no_prefill_time():
    engine = engine_for(7, mode="tree", config={"max_running_requests": 1})
    engine.scheduler.observer = Unobserved()
    one, two = engine.generate([[0], [1]], [TURN] * 2)
    assert two.queue_seconds > one.decode_seconds / 2
    assert two.seconds >= two.queue_seconds + two.prefill_seconds
