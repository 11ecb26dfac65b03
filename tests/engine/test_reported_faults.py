"""Faults that users of such systems reported, each with its whole kind: here those that the engine alone can show.

The numbers name public threads (repository#number). Acceptance inside a block is forced: the drafter knows the answer
as well as a test wants it to.
"""

import dataclasses
import json
import math
from random import Random

import pytest
import torch

from ddtree.config import MODES, Grammar, SamplingParams, Speculation
from ddtree.errors import InvalidOption
from ddtree.layers import KVCache
from scripted import ScriptedDrafter, ScriptedTarget, engine_for, hashed, scripted_engine
from scripted_text import END, FIRST_PIECE, Book, book_engine, byte_text

PIECES = ["is", "this ", "STOP", " a wörld", "🌍🌍", "e.\n", "</s>"]
VOCAB = FIRST_PIECE + len(PIECES)
DRAFTING = [mode for mode in MODES if mode != "ar"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return byte_text(tmp_path_factory.mktemp("tokenizer"), PIECES)


def ask(text, message):
    return text.chat([{"role": "user", "content": message}])


def outcome(generation):
    """What a user sees of an answer, and may depend on nothing but the request."""
    return (
        generation.text,
        generation.token_ids,
        generation.logprobs,
        generation.finish_reason,
        generation.stop_reason,
    )


def run(engine, prompt, params, speculation=None):
    """The answer, streamed; what the chunks add up to is checked against the generation."""
    chunks = list(engine.stream(prompt, params, speculation))
    last = chunks[-1].generation
    assert "".join(chunk.text for chunk in chunks) == last.text
    assert [token for chunk in chunks for token in chunk.token_ids] == last.token_ids
    assert [entry for chunk in chunks for entry in chunk.logprobs] == last.logprobs
    return last


# Stops, lengths, usage


def expected_end(text, tokens, params):
    """Text, ids and reasons by the definition, token after token: sglang#23802, vllm#49391, transformers#47931."""
    stop_ids = set(params.stop_token_ids)
    ends = stop_ids | (set() if params.ignore_eos else {END})
    for n, token in enumerate(tokens, start=1):
        if token in ends:
            return text.decode(tokens[: n - 1]), tokens[:n], "stop", token if token in stop_ids else None
        before, now = (text.decode(tokens[:k]).rstrip("\ufffd") for k in (n - 1, n))
        found = [
            (place, stop) for stop in params.stop if (place := now.find(stop, max(0, len(before) - len(stop) + 1))) >= 0
        ]
        if found and n >= params.min_tokens:
            place, stop = min(found)
            return now[:place], tokens[:n], "stop", stop
        if n == params.max_tokens:
            return text.decode(tokens[:n]), tokens[:n], "length", None
    raise AssertionError("the answer is too short for the test")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", range(10))
def test_text_ids_and_log_probabilities_end_where_the_definition_says(text, mode, case):
    """vllm#47616, ferrox#311, with all ends mixed: strings, ids, end of sequence, limit, min_tokens, cut characters."""
    chance = Random(case)
    words = [*b"this is a test. ", *"éa€".encode(), *range(FIRST_PIECE, VOCAB)]
    answer = [chance.choice(words) for _ in range(60)]
    if case % 3 == 0:
        answer[chance.randrange(4, 50)] = END
    book = Book({"q": answer}, vocab=VOCAB, rank=lambda place: [0, 0, 0, 1, 0, 0, 2, 0][place * 7 % 8])
    engine = book_engine(text, book, block=chance.choice([2, 8, 16]), mode=mode, tree_budget=12)
    whole = text.decode(answer)
    for _ in range(6):
        places = [chance.randrange(1, len(whole) - 4) for _ in range(chance.choice([0, 1, 2, 4]))]
        stops = tuple(whole[place : place + chance.randrange(1, 6)] for place in places)
        params = SamplingParams(
            max_tokens=chance.choice([chance.randrange(1, 50), 50]),
            stop=tuple(dict.fromkeys(stop for stop in stops if "\ufffd" not in stop)),
            stop_token_ids=chance.choice([(), (), (chance.choice(answer),)]),
            ignore_eos=chance.random() < 0.3,
            logprobs=chance.choice([None, 0, 2]),
        )
        if "\ufffd" in whole[:-1] and params.stop:
            params = dataclasses.replace(params, stop=("is",))
        params = dataclasses.replace(params, min_tokens=chance.choice([0, 0, chance.randrange(params.max_tokens + 1)]))
        if params.min_tokens and not {END, *params.stop_token_ids}.isdisjoint(answer[: params.min_tokens]):
            params = dataclasses.replace(params, min_tokens=0)  # else the model would have to say something else
        found = run(engine, ask(text, "q"), params)
        assert (found.text, found.token_ids, found.finish_reason, found.stop_reason) == expected_end(
            text, answer, params
        ), params
        assert len(found.logprobs) == (0 if params.logprobs is None else len(found.token_ids))
        assert [entry.token_id for entry in found.logprobs] == found.token_ids[: len(found.logprobs)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("least", [2, 3, 4, 5])
def test_a_stop_string_that_is_completed_behind_min_tokens_counts(text, mode, least):
    """Also where it began before: then its beginning must have been held back."""
    engine = book_engine(text, Book({"q": list(b"xabcabcy")}), mode=mode)
    found = run(engine, ask(text, "q"), SamplingParams(max_tokens=8, stop=("abc", "zz"), min_tokens=least))
    assert (found.text, found.stop_reason) == (("x", "abc") if least <= 4 else ("xabc", "abc"))


def test_a_stop_completed_before_min_tokens_stays_uncounted(text):
    engine = book_engine(text, Book({"q": list(b"abxabcy")}))
    found = run(engine, ask(text, "q"), SamplingParams(max_tokens=7, stop=("b", "abc"), min_tokens=3))
    assert (found.text, found.token_ids) == ("abxa", list(b"abxab"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stops", [("s", "hi"), ("hi", "s"), ("s", "is", "his"), ("zz", "is ", "h")])
def test_of_stops_that_one_token_completes_the_first_in_the_text_counts(text, mode, stops):
    """vllm#49391: the order of the list did."""
    book = Book({"q": [*b"so", FIRST_PIECE + PIECES.index("this "), *b"abc"]}, vocab=VOCAB)
    found = run(book_engine(text, book, mode=mode), ask(text, "q"), SamplingParams(max_tokens=9, stop=stops[:4]))
    if stops[0] == "s" or stops[1] == "s":  # the very first token is one already
        assert (found.text, found.stop_reason) == ("", "s")
    found = run(
        book_engine(text, book, mode=mode), ask(text, "q"), SamplingParams(max_tokens=9, stop=stops, min_tokens=2)
    )
    assert (found.text, len(found.token_ids)) == ("sot", 3)


@pytest.mark.parametrize("mode", MODES)
def test_the_limit_holds_with_everything_at_once(text, mode):
    """ferrox#311: for every limit, with neighbours, sampled and not, also where the context is the limit."""
    book = Book({"q": list(b"abcdefghijklmnopqrstuvwxyz" * 3)}, variety=4.0)
    engine = book_engine(text, book, context=64, mode=mode, tree_budget=12)
    prompt = ask(text, "q")
    room = 64 - len(prompt)
    limits = [*range(1, 21), room - 1, room, None]
    params = [
        SamplingParams(max_tokens=limit, temperature=0.7 * (i % 2), seed=i, ignore_eos=True)
        for i, limit in enumerate(limits)
    ]
    for limit, found in zip(limits, engine.generate([prompt] * len(params), params), strict=True):
        assert (len(found.token_ids), found.finish_reason) == (limit or room, "length")


# Sampling, log-probabilities


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "pair",
    [
        ({"frequency_penalty": 2.0}, {"frequency_penalty": -2.0}),
        ({"presence_penalty": 2.0}, {"presence_penalty": -2.0}),
        ({"repetition_penalty": 2.0}, {"repetition_penalty": 0.5}),
        ({"logit_bias": ((0, 3.0),)}, {"logit_bias": ((0, -3.0),)}),
    ],
    ids=lambda pair: next(iter(pair[0])),
)
def test_penalties_and_biases_work_inside_accepted_runs(pair, temperature):
    """vllm#18902. The drafter sees that the last token comes again: right where repeating is rewarded."""

    def logits(history):
        return [hash((history, t)) % 97 / 60 for t in range(5)]

    engines = {
        mode: scripted_engine(
            ScriptedTarget(logits, 5),
            ScriptedDrafter(lambda history: [[3.0 if t == history[-1] else 0.1 * t for t in range(5)]] * 7, 8),
            "abcde",
            mode=mode,
            tree_budget=15,
            tree_top_k=4,
        )
        for mode in MODES
    }
    answers = []
    for options in (pair[0], {}, pair[1]):
        params = SamplingParams(max_tokens=30, temperature=temperature, seed=5, **options)
        found = {mode: engines[mode].generate([[1, 2]], [params])[0] for mode in MODES}
        assert all(one.token_ids == found["ar"].token_ids for one in found.values()), options
        answers.append(found)
    assert len({tuple(one["ar"].token_ids) for one in answers}) == 3
    assert min(one["linear"].rounds for one in answers) < 27, "some of it must come out of accepted runs"
    assert min(one["tree"].rounds for one in answers) < 27


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 100.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 1e-300},
        {"temperature": 1.0, "top_k": 1, "top_p": 0.5, "min_p": 0.5, "seed": 1},
    ],
    ids=str,
)
def test_one_token_left_to_choose_from_is_greedy(text, mode, options):
    """sparkring#161: it varied from run to run."""
    book = Book({"q": list(b"abcdefghijklmnopqrstuvwxyz")}, variety=7.0)
    engine = book_engine(text, book, mode=mode, tree_budget=12)
    params, prompt = SamplingParams(max_tokens=20, **options), ask(text, "q")  # without a seed: a fresh one each time
    greedy = outcome(run(engine, prompt, SamplingParams(max_tokens=20)))
    assert [outcome(one) for one in engine.generate([prompt] * 2, [params] * 2)] == [greedy] * 2


@pytest.mark.parametrize("mode", DRAFTING)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.5, "top_p": 0.8},
        {"frequency_penalty": 2.0, "presence_penalty": 1.0, "repetition_penalty": 1.5},
        {"logit_bias": ((0x61, -100.0), (0x62, 5.0))},
        {"grammar": Grammar("regex", "[a-f]{3,20}")},
    ],
    ids=["plain", "sampled", "penalties", "bias", "grammar"],
)
def test_log_probabilities_are_the_models_own(text, mode, options):
    """llama.cpp#27972: all were 0. They are those of plain decoding, before whatever was asked for on top."""
    book = Book({"q": list(b"abcdefghijabcdefghij")}, variety=5.0)
    params = SamplingParams(max_tokens=18, seed=3, logprobs=4, **options)
    prompt = ask(text, "q")
    found = run(book_engine(text, book, mode=mode, tree_budget=12), prompt, params)
    assert outcome(found) == outcome(run(book_engine(text, book, mode="ar"), prompt, params))
    assert len(found.logprobs) == len(found.token_ids) > 2
    seen = tuple(prompt)
    for entry in found.logprobs:
        raw = book.logits(seen).tolist()
        norm = math.log(sum(map(math.exp, raw)))
        assert entry.logprob == pytest.approx(raw[entry.token_id] - norm, abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx(sorted((v - norm for v in raw), reverse=True)[:4])
        assert entry.logprob < 0
        seen = (*seen, entry.token_id)


def test_seeds(text):
    """vllm#6038, z-lab/dflash#74: the same twice, in every mode and company; another for another seed, or for none."""
    book = Book({"q": list(b"abcdefghijklmnopqrstuvwxyz")}, variety=5.5)
    prompt, answers = ask(text, "q"), {}
    for mode in MODES:
        engine = book_engine(text, book, mode=mode, tree_budget=12)
        for seed in (0, 1, -1, 2**63 - 1, -(2**63)):
            params = SamplingParams(max_tokens=30, temperature=1.0, seed=seed)
            other = dataclasses.replace(params, seed=12345)
            alone, (in_company, _) = run(engine, prompt, params), engine.generate([prompt] * 2, [params, other])
            assert outcome(alone) == outcome(in_company)
            answers.setdefault(seed, []).append(tuple(alone.token_ids))
        free = SamplingParams(max_tokens=30, temperature=1.0)
        assert len({tuple(one.token_ids) for one in engine.generate([prompt] * 3, [free] * 3)}) == 3
    assert all(len(set(found)) == 1 for found in answers.values())
    assert len({found[0] for found in answers.values()}) == len(answers)


# Grammar

PERSON = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {"first_name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
            "required": ["first_name", "age"],
            "additionalProperties": False,
        }
    ),
)
GOOD = '{"first_name": "Bo", "age": 7}'


@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        (GOOD, GOOD),
        (GOOD, '{"name": "Bo", "age": 7}'),  # legal up to inside the key
        (GOOD, "Sure! Here it is: " + GOOD),  # illegal from the first token
        (GOOD, GOOD + " and more of it, without an end"),  # legal, then goes on behind the end
        (GOOD, '{"first_name": 7777777777777777'),
        ('{"nom": "Bo", "age": 7}', '{"nom": "Bo", "age": 7}'),  # what the model itself wants is illegal
        ("I cannot do that.", GOOD),
        (GOOD[:-1] + ', "x": 1}', GOOD),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_a_drafter_that_the_grammar_forbids_does_not_stall_the_answer(text, target, drafter, temperature):
    """sglang#9187: the answer stood still where the drafter was first at odds with the schema."""
    wants, drafts = Book({"q": list(target.encode())}, variety=0.5), Book({"q": list(drafter.encode())})
    no_white = tuple((token, -100.0) for token in b" \t\r\n") if target != GOOD else ()  # else a lost model adds much
    params = SamplingParams(
        max_tokens=80, temperature=temperature, seed=1, grammar=PERSON, logprobs=1, logit_bias=no_white
    )
    found = {}
    for mode in MODES:
        engine = book_engine(text, wants, mode=mode, tree_budget=24, tree_top_k=4)
        engine.drafter.script = lambda history: drafts.propose(history, 15)
        found[mode] = run(engine, ask(text, "q"), params)
    assert all(outcome(one) == outcome(found["ar"]) for one in found.values())
    said = found["ar"]
    assert said.finish_reason == "stop"
    person = json.loads(said.text)
    assert set(person) == {"first_name", "age"}
    if temperature == 0 and target == GOOD:
        assert said.text == GOOD
        assert found["tree"].rounds <= (3 if drafter == GOOD else len(GOOD))


@pytest.mark.parametrize("mode", DRAFTING)
def test_an_illegal_sibling_is_cut_and_the_legal_one_is_accepted(text, mode):
    """vllm#53777: the grammar could not advance over a draft token. At every other place the right token is the second
    guess; the first is a capital letter, which is illegal outside of strings."""
    said = '{"a": {"b": [1, 2, {"c": null}]}, "d": "ö🌍"}'
    book = Book({"q": list(said.encode())}, rank=lambda place: 1 if place % 2 else 0)
    engine = book_engine(text, book, mode=mode, tree_budget=40, tree_top_k=3)
    found = run(engine, ask(text, "q"), SamplingParams(max_tokens=100, grammar=Grammar("json_object"), logprobs=0))
    assert (found.text, found.finish_reason) == (said, "stop")
    if mode == "tree":
        assert found.acceptance_length > 3.5, "the legal siblings are taken"
    plain = run(book_engine(text, book, mode="ar"), ask(text, "q"), SamplingParams(max_tokens=100, logprobs=0))
    assert found.token_ids == plain.token_ids


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("limit", [1, 2, 7, 20, 45])
def test_a_limit_inside_a_constrained_answer_cuts_it_and_nothing_else(text, mode, limit):
    book = Book({"q": list(GOOD.encode())}, rank=lambda place: place % 3 == 2)
    engine = book_engine(text, book, mode=mode, tree_budget=20, tree_top_k=3)
    found = run(engine, ask(text, "q"), SamplingParams(max_tokens=limit, grammar=PERSON))
    assert found.token_ids == [*GOOD.encode(), END][:limit]
    assert found.finish_reason == ("length" if limit <= len(GOOD) else "stop")


# State, concurrency


@pytest.mark.parametrize(("mode", "count"), [*((mode, 16) for mode in MODES), ("tree", 8)])
def test_answers_and_acceptance_do_not_depend_on_how_many_run(text, mode, count):
    """sglang#36548, llama.cpp#27117 (its 16 sequences): each request has a word of its own, of a length of its own."""
    secrets = {
        f"who is {n}?": list(f"The word of {n} is {'abcdefghijklmnop'[n] * (2 * n + 3)}.".encode()) for n in range(16)
    }
    book = Book(secrets, variety=4.0, rank=lambda place: [0, 0, 1, 0, 0, 0, 9][place % 7])
    engine = book_engine(text, book, mode=mode, tree_budget=10, config={"max_running_requests": count})
    prompts = [ask(text, message) for message in list(secrets)[:count]]
    params = [SamplingParams(temperature=0.6 * (n % 2), seed=n, max_tokens=60, logprobs=1) for n in range(count)]
    apart = [run(engine, prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    for found, alone in zip(engine.generate(prompts, params), apart, strict=True):
        assert outcome(found) == outcome(alone)
        assert (found.rounds, found.acceptance_length) == (alone.rounds, alone.acceptance_length)
    assert all(one.token_ids[:-1] == answer for one, answer in list(zip(apart, secrets.values(), strict=False))[::2])
    if mode != "ar":
        assert min(one.acceptance_length for one in apart[::2]) > 2


@pytest.mark.parametrize("mode", DRAFTING)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "logits",
    [
        lambda t, d, x: 0.0,
        lambda t, d, x: 5.0 if t == d % 4 else 0.0,
        lambda t, d, x: float(x + t) % 3,
        lambda t, d, x: math.nan,
        lambda t, d, x: math.nan if t == 1 else 0.0,
        lambda t, d, x: -math.inf,
        lambda t, d, x: math.inf if t == 2 else 0.0,
        lambda t, d, x: -math.inf if t != 1 else 0.0,
        lambda t, d, x: 1e300,
    ],
    ids=["flat", "turning", "random", "nan", "one nan", "-inf", "inf", "one", "huge"],
)
def test_whatever_a_drafter_says_the_answer_is_the_same(mode, temperature, logits):
    """z-lab/dflash#172: rejected drafts were kept. Broken drafters too: they cost speed, and nothing else."""

    def propose(history):
        return [[logits(t, depth, hash(history)) for t in range(4)] for depth in range(5)]

    target = ScriptedTarget(lambda history: hashed(history, 3), 4)
    params = [SamplingParams(max_tokens=20, temperature=temperature, seed=n) for n in range(2)]
    prompts = [[0], [1, 2]]
    engine = scripted_engine(target, ScriptedDrafter(propose, 6), "abcd", mode=mode, tree_budget=9, tree_top_k=4)
    plain = scripted_engine(target, None, "abcd").generate(prompts, params)
    assert [outcome(one) for one in engine.generate(prompts, params)] == [outcome(one) for one in plain]


@pytest.mark.parametrize("salt", range(6))
@pytest.mark.parametrize("budget", [4, 5, 30])
def test_a_tree_that_holds_the_chain_accepts_no_less(salt, budget):
    """lucebox#415: a spine-only tree accepted less. From the same roots a tree accepts what the chain does, or more."""
    engine = engine_for(salt, noise=0.6, mode="shadow-linear", tree_budget=budget, tree_spine=4, tree_top_k=3)
    found = engine.generate([[0, 1]], [SamplingParams(max_tokens=60, ignore_eos=True)])[0]
    chain, tree = found.shadow.linear_acceptance_length, found.shadow.tree_acceptance_length
    assert (tree == chain) if budget == 4 else (tree >= chain)
    assert found.shadow.agree is True


# Prefix, context, memory


@pytest.mark.parametrize("seed", range(6))
def test_reuse_changes_nothing_whatever_came_before(seed):
    """atlas#693, vllm#47930, llama.cpp#22105: conversations that branch, end in the middle of a block, are given up,
    change their mode, share slots; tokens, rounds and acceptance are those of an engine that keeps nothing."""
    chance = Random(seed)
    options = {"mode": "tree", "tree_budget": 7, "tree_top_k": 3}
    engine = engine_for(7, noise=0.6, config={"max_running_requests": 3, "prefill_chunk": 8}, **options)
    fresh = engine_for(7, noise=0.6, config={"prefix_caching": False}, **options)
    told, reused = [[0, 1, 2]], 0
    for _ in range(12):
        prompts, params = [], []
        mode = Speculation(mode=chance.choice(MODES), tree_budget=chance.randrange(1, 8), tree_top_k=3)
        for _ in range(chance.randrange(1, 5)):
            before = chance.choice(told)
            keep = chance.choice([len(before), chance.randrange(len(before) + 1)])
            prompts.append([*before[:keep], *(chance.randrange(3) for _ in range(chance.randrange(1, 9)))][:300])
            params.append(
                SamplingParams(
                    max_tokens=chance.randrange(1, 25),
                    temperature=chance.choice([0.0, 0.9]),
                    seed=chance.randrange(9),
                    stop=chance.choice([(), ("ab",), ("ca", "bb")]),
                    ignore_eos=True,
                )
            )
        if chance.random() < 0.4:  # one is given up in the middle
            stream = engine.stream(prompts[0], params[0], mode)
            next(stream)
            stream.close()
        for prompt, one, two in zip(
            prompts, engine.generate(prompts, params, mode), fresh.generate(prompts, params, mode), strict=True
        ):
            assert outcome(one) == outcome(two)
            assert (one.rounds, one.acceptance_length) == (two.rounds, two.acceptance_length)
            told.append([*prompt, *one.token_ids])
            reused += one.cached_tokens
    assert reused > 100


@pytest.mark.parametrize("limit", [6, 13, 20, 33])
@pytest.mark.parametrize("chunk", [4, 64])
def test_the_drafters_own_limit_may_be_crossed_anywhere(limit, chunk):
    """omlx#1402: a crash. In the prompt, in mid-answer, beside neighbours that are short of it, and before a next
    turn or a short request on the same slot."""
    options = {"mode": "tree", "tree_budget": 6, "tree_top_k": 3}
    engine = engine_for(6, limit=limit, config={"prefill_chunk": chunk, "max_running_requests": 2}, **options)
    unlimited = engine_for(6, **options)
    prompts = [[0, 1, 2] * 4, [0], [1, 0, 2, 2, 1], [0, 1, 2] * 12, [2, 1], [0, 1, 2] * 4]
    params = [SamplingParams(max_tokens=30, temperature=0.7 * (n % 2), seed=n, ignore_eos=True) for n in range(6)]
    for _ in range(2):
        found, expected = engine.generate(prompts, params), unlimited.generate(prompts, params)
        assert [outcome(one) for one in found] == [outcome(one) for one in expected]
        for prompt, one in zip(prompts, found, strict=True):
            assert (one.mode == "tree") == (len(prompt) <= limit - 5), "the mode that really ran"
            assert (one.speculative.drafted > 0) == (one.mode == "tree")
        prompts = [[*p, *one.token_ids, 1][:60] for p, one in zip(prompts, found, strict=True)]


@pytest.mark.parametrize("mode", DRAFTING)
def test_acceptance_at_long_context(text, mode):
    """buun-llama-cpp#32: the drafter's positions went wrong. At 3,000 and 6,000 tokens it accepts as at 30.

    mlx-vlm#2096: the prompt comes in many chunks, and the scripted drafter reads a function of all of them.
    """
    answer = list(b"The quick brown fox jumps over the lazy dog. " * 2)
    lengths = []
    for size in (30, 3000, 6000):
        book = Book({"x" * size: answer}, rank=lambda place: [0, 0, 0, 0, 1][place % 5])
        engine = book_engine(text, book, context=8192, drafter_context=8192, mode=mode, tree_budget=12)
        found = run(engine, ask(text, "x" * size), SamplingParams(max_tokens=60))
        assert found.token_ids == answer[:60]
        lengths.append((found.rounds, found.acceptance_length))
    assert lengths[0] == lengths[1] == lengths[2]
    assert lengths[0][1] > 4


def test_memory_that_is_not_there_is_refused_at_the_start_with_the_sum():
    """hipfire#486: out of memory in mid-answer, at a large budget and context. Here more than any machine has."""
    target = ScriptedTarget(lambda history: [0.0] * 4, 4, max_position=2**20)
    target.allocate = lambda slots, length: KVCache.allocate(
        64, slots, length, 64, 256, torch.float32, torch.device("cpu")
    )
    config = {"max_running_requests": 1024, "max_tree_budget": 1000}
    # 64 layers * (1024 + 1) slots * 2 * 64 heads * (2^20 + 1001) positions * 256 numbers of 4 bytes
    said = r"(?s)does not fit.* 8404815\.82 GiB target context: 1024 requests of 1049577 positions;.*lower max_r"
    with pytest.raises(InvalidOption, match=said) as caught:
        scripted_engine(target, None, config=config)
    assert caught.value.param == "max_model_len"
