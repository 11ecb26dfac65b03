"""Continuous batching: who runs when, and that nobody's answer depends on anybody else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.config import MODES, SamplingParams, Speculation
from ddtree.engine import RoundRecord
from ddtree.engine.observer import Unobserved
from ddtree.errors import DamagedFile, InvalidOption
from scripted import engine_for

LONG = SamplingParams(max_tokens=40, ignore_eos=True)


def drive(scheduler, limit: int = 1000):
    """Step until nothing is left: chunks by request."""
    chunks = {}
    for _ in range(limit):
        if not scheduler.has_work:
            return chunks
        for request, chunk in scheduler.step():
            chunks.setdefault(request, []).append(chunk)
    raise AssertionError("the scheduler does not come to an end")


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=9),  # prompt
        st.sampled_from(MODES),
        st.integers(1, 8),  # budget
        st.integers(1, 24),  # max_tokens
        st.sampled_from([0.0, 0.9]),
        st.integers(0, 6),  # steps until it comes
        st.booleans(),  # goes away in the middle
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=60, deadline=None)
@given(salt=st.integers(0, 1000), requests=REQUESTS, slots=st.integers(1, 4), chunk=st.integers(1, 6))
def test_an_answer_does_not_depend_on_its_neighbours(salt, requests, slots, chunk):
    """Modes, budgets, lengths, arrivals and departures mixed: every answer is what it is alone, so are its rounds."""
    options = {"max_running_requests": slots, "prefill_chunk": chunk}
    engine = engine_for(salt, config=options, mode="tree", tree_budget=5, tree_top_k=3)
    alone = engine_for(salt, mode="tree", tree_budget=5, tree_top_k=3)
    coming = sorted(enumerate(requests), key=lambda item: item[1][5])
    made, results, step = {}, {}, 0
    while coming or engine.scheduler.has_work:
        while coming and coming[0][1][5] <= step:
            index, (prompt, mode, budget, tokens, temperature, _, _) = coming.pop(0)
            params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=index)
            speculation = Speculation(mode=mode, tree_budget=budget, tree_top_k=3)
            made[engine.scheduler.add(prompt, params, speculation)] = index
        for request, chunk_ in engine.scheduler.step():
            results.setdefault(made[request], []).append(chunk_)
        for request, index in made.items():
            if requests[index][6] and len(results.get(index, [])) == 2:
                engine.scheduler.abort(request)
        step += 1
        assert step < 2000
    assert engine.scheduler.stats().running == engine.scheduler.stats().waiting == 0
    for index, (prompt, mode, budget, tokens, temperature, _, leaves) in enumerate(requests):
        params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=index)
        expected = alone.generate([prompt], [params], Speculation(mode=mode, tree_budget=budget, tree_top_k=3))[0]
        chunks = results[index]
        ids = [token for c in chunks for token in c.token_ids]
        if leaves and not chunks[-1].last:
            assert ids == expected.token_ids[: len(ids)]
            continue
        found = chunks[-1].generation
        assert ids == found.token_ids == expected.token_ids
        assert "".join(c.text for c in chunks) == found.text == expected.text
        assert (found.finish_reason, found.rounds, found.mode) == (
            expected.finish_reason,
            expected.rounds,
            expected.mode,
        )
        assert found.acceptance_length == expected.acceptance_length
        assert found.speculative == expected.speculative
        assert found.shadow == expected.shadow


def test_first_come_first_served():
    engine = engine_for(3, config={"max_running_requests": 2}, mode="tree")
    requests = [engine.scheduler.add([0, index % 3], LONG, engine.speculation) for index in range(6)]
    order = []
    while engine.scheduler.has_work:
        for request, chunk in engine.scheduler.step():
            if request not in order:
                order.append(request)
            assert chunk.error is None
        assert engine.scheduler.stats().running <= 2
    assert order == requests
    assert requests[0].started <= requests[2].started <= requests[5].started


def test_a_long_prompt_does_not_stall_a_running_answer():
    """It is computed chunk by chunk, and between two chunks everything that runs gets a round."""
    engine = engine_for(3, config={"prefill_chunk": 16}, mode="tree")
    prefilled = []
    honest = engine.target.prefill
    engine.target.prefill = lambda cache, ids, position: (prefilled.append(ids.shape[1]), honest(cache, ids, position))[
        1
    ]
    running = engine.scheduler.add([0], LONG, engine.speculation)
    engine.scheduler.step()
    engine.scheduler.step()
    long = engine.scheduler.add([1, 2, 0] * 50, LONG, engine.speculation)
    prefilled.clear()
    alone = 0
    while long.prefilled == 0:
        before, count = len(prefilled), len(running.output.token_ids)
        engine.scheduler.step()
        assert len(prefilled) - before == 1
        if not running.output.finished and long.prefilled == 0:  # a first token is handed out before the round
            alone += 1
            assert len(running.output.token_ids) > count
    assert max(prefilled) <= 16
    assert sum(prefilled) == 150
    assert alone >= 4


def test_a_first_token_does_not_wait_for_a_round():
    engine = engine_for(3, mode="tree")
    request = engine.scheduler.add([0, 1], LONG, engine.speculation)
    [(came_for, chunk)] = engine.scheduler.step()
    assert came_for is request
    assert len(chunk.token_ids) == 1
    assert engine.target.forwards == []
    other = engine.scheduler.add([1, 2], LONG, engine.speculation)
    [(came_for, chunk)] = engine.scheduler.step()
    assert came_for is request, "the round comes before the next prompt"
    assert other.prefilled == 0
    assert len(engine.target.forwards) == 1


def test_short_prompts_share_a_step():
    engine = engine_for(3, config={"prefill_chunk": 16}, mode="tree")
    for index in range(4):
        engine.scheduler.add([index % 3, 1, 2], LONG, engine.speculation)
    assert len({id(request) for request, _ in engine.scheduler.step()}) == 4


def test_an_abort_frees_the_slot_at_once_wherever_the_request_is():
    engine = engine_for(3, config={"max_running_requests": 1, "prefill_chunk": 4}, mode="tree")
    scheduler = engine.scheduler
    running = scheduler.add([0], LONG, engine.speculation)
    waiting = scheduler.add([1], LONG, engine.speculation)
    scheduler.step()
    scheduler.abort(waiting)
    assert scheduler.stats().waiting == 0
    scheduler.abort(running)
    assert scheduler.stats().running == 0
    prefilling = scheduler.add([1] * 9, LONG, engine.speculation)
    scheduler.step()
    assert prefilling.prefilled == 0
    scheduler.abort(prefilling)
    scheduler.abort(prefilling)  # once more does no harm
    assert not scheduler.has_work
    assert drive_one(engine, [2]) == drive_one(engine_for(3, mode="tree"), [2])


def test_an_abort_drops_a_launched_round_that_nobody_is_left_for():
    """Read all the same, it would cost the next request a step in which nothing comes."""
    engine = engine_for(3, config={"max_running_requests": 3}, mode="tree")
    scheduler, runner = engine.scheduler, engine.scheduler._runner
    expected = [[chunk.token_ids for chunk in chunks] for chunks in drive_all(engine, [[2]])]
    runner.runs_ahead = lambda batch: True  # a round is launched before the one before it is read, as on a GPU
    one, two = (scheduler.add([token], LONG, engine.speculation) for token in (0, 1))
    for _ in range(3):
        scheduler.step()
    flight = scheduler._flight
    assert flight is not None
    assert flight.requests == [one, two]
    scheduler.abort(one)
    assert scheduler._flight is flight, "it is the other one's as well"
    scheduler.abort(two)
    assert scheduler._flight is None
    runner.runs_ahead = lambda batch: False
    assert [[chunk.token_ids for chunk in chunks] for chunks in drive_all(engine, [[2]])] == expected


def drive_all(engine, prompts):
    """Every step's chunk of each request; a step without one shows as too many steps."""
    requests = [engine.scheduler.add(prompt, LONG, engine.speculation) for prompt in prompts]
    chunks, steps = {request: [] for request in requests}, 0
    while engine.scheduler.has_work:
        news, steps = engine.scheduler.step(), steps + 1
        for request, chunk in news:
            chunks[request].append(chunk)
    assert steps == max(len(found) for found in chunks.values())
    return list(chunks.values())


def drive_one(engine, prompt):
    return engine.generate([prompt], [LONG])[0].token_ids


def test_a_failing_forward_drops_everything_and_leaves_nothing_behind():
    engine = engine_for(3, mode="tree")
    expected = engine_for(3, mode="tree").generate([[0, 1, 2, 0]], [LONG])[0]
    honest = engine.target.verify

    def broken(cache, rows, position):
        honest(cache, rows, position)
        raise RuntimeError("the device is gone")

    engine.target.verify = broken
    with pytest.raises(RuntimeError, match="gone"):
        engine.generate([[0, 1, 2, 0]], [LONG])
    assert not engine.scheduler.has_work
    engine.target.verify = honest
    again = engine.generate([[0, 1, 2, 0]], [LONG])[0]
    assert (again.token_ids, again.rounds, again.cached_tokens) == (expected.token_ids, expected.rounds, 0)


def test_a_request_whose_logits_are_not_numbers_fails_alone():
    engine = engine_for(3, mode="tree")
    honest = engine.target.prefill

    def prefill(cache, ids, position):
        features, logits = honest(cache, ids, position)
        return features, logits * float("nan") if ids[0, 0] == 2 else logits

    engine.target.prefill = prefill
    good = engine.scheduler.add([0, 1], LONG, engine.speculation)
    bad = engine.scheduler.add([2, 1], LONG, engine.speculation)
    chunks = drive(engine.scheduler)
    assert isinstance(chunks[bad][-1].error, DamagedFile)
    assert chunks[bad][-1].last
    assert chunks[good][-1].generation.token_ids == drive_one(engine_for(3, mode="tree"), [0, 1])


def test_eight_requests_keep_their_own_secrets():
    """sglang#36548: a neighbour's text bled in. Each answer is a function of its own prompt."""
    prompts = [[i % 3, (i // 3) % 3, 1, 2, i % 2, 0] for i in range(8)]
    engine = engine_for(11, mode="tree", tree_budget=7, tree_top_k=3)
    together = engine.generate(prompts, [LONG] * 8)
    apart = [engine_for(11, mode="tree", tree_budget=7, tree_top_k=3).generate([p], [LONG])[0] for p in prompts]
    assert [g.token_ids for g in together] == [g.token_ids for g in apart]
    assert len({tuple(g.token_ids) for g in together}) > 4


def test_acceptance_does_not_depend_on_concurrency():
    """llama.cpp#27117."""
    prompts = [[i % 3, i // 3, 1] for i in range(9)][:8]
    engine = engine_for(11, noise=0.6, mode="tree", tree_budget=7, tree_top_k=3)
    one_by_one = [engine.generate([p], [LONG])[0].acceptance_length for p in prompts]
    at_once = [g.acceptance_length for g in engine.generate(prompts, [LONG] * 8)]
    assert at_once == one_by_one
    assert min(at_once) > 1


def test_records_of_rounds_add_up():
    class Watcher(Unobserved):
        def __init__(self):
            self.records: list[RoundRecord] = []

        def round(self, record):
            self.records.append(record)

    engine, watcher = engine_for(4, mode="tree", tree_budget=5, tree_top_k=3), Watcher()
    modes = ["tree", "ar", "shadow-linear", "linear"]
    engine.scheduler.observer = watcher
    requests = [
        engine.scheduler.add([i % 3, 1], LONG, Speculation(mode=mode, tree_budget=5, tree_top_k=3))
        for i, mode in enumerate(modes)
    ]
    drive(engine.scheduler)
    generations = [request.generation() for request in requests]
    assert sum(r.committed for r in watcher.records) == sum(len(g.token_ids) - 1 for g in generations)
    assert sum(sum(r.accepted) for r in watcher.records) == sum(g.speculative.accepted for g in generations)
    drafted = {mode: g.speculative.drafted for mode, g in zip(modes, generations, strict=True)}
    assert sum(r.drafted for r in watcher.records) > sum(drafted.values()), "the shadowed tree's nodes are rows too"
    assert drafted["shadow-linear"] == 4 * generations[2].rounds
    assert {mode for r in watcher.records for mode in r.modes} == set(modes)
    assert all(r.batch == len(r.modes) == len(r.depths) and r.rows == r.drafted + r.batch for r in watcher.records)
    for generation, mode in zip(generations, modes, strict=True):
        stats = generation.speculative
        assert generation.mode == mode
        assert sum(stats.histogram) == stats.rounds == generation.rounds
        assert sum(n * count for n, count in enumerate(stats.histogram)) == stats.accepted
        assert (stats.drafted > 0) == (mode != "ar")
        assert stats.width == {"tree": 5, "ar": 0, "shadow-linear": 4, "linear": 4}[mode]


def test_the_mode_that_really_ran_is_reported():
    """dflash-mlx#20, omlx#1402: past the drafter's own context a request decodes plainly, and says so."""
    engine = engine_for(6, limit=5, mode="tree")
    assert engine.generate([[0, 1, 2, 0, 1]], [LONG])[0].mode == "ar"
    assert engine_for(6, mode="tree").generate([[0, 1, 2, 0, 1]], [LONG])[0].mode == "tree"


def test_a_budget_beyond_the_plan_is_refused():
    engine = engine_for(6, config={"max_tree_budget": 9}, mode="tree", tree_budget=5)
    with pytest.raises(InvalidOption, match="tree_budget 10 is more than the 9 planned for"):
        engine.generate([[0]], [LONG], Speculation(mode="tree", tree_budget=10))
    assert engine.generate([[0]], [LONG], Speculation(mode="tree", tree_budget=9))


@pytest.mark.parametrize("mode", MODES)
def test_log_probabilities_end_with_the_tokens(mode):
    """vllm#47616; and they are the target's own at every place (llama.cpp#27972)."""
    import math

    from scripted import hashed

    engine = engine_for(2, mode=mode, tree_budget=7, tree_top_k=3)
    for limit in (1, 2, 3, 7, 20):
        params = SamplingParams(max_tokens=limit, temperature=0.7, seed=1, logprobs=2, ignore_eos=True)
        generation = engine.generate([[0, 1]], [params])[0]
        assert [entry.token_id for entry in generation.logprobs] == generation.token_ids
        seen = (0, 1)
        for entry in generation.logprobs:
            raw = hashed(seen, 2)
            norm = math.log(sum(map(math.exp, raw)))
            assert entry.logprob == pytest.approx(raw[entry.token_id] - norm, abs=1e-5)
            assert [value for _, value in entry.top] == pytest.approx(sorted((v - norm for v in raw), reverse=True)[:2])
            seen = (*seen, entry.token_id)
    assert engine.generate([[0, 1]], [LONG])[0].logprobs == []
