"""Faults that users of such systems reported, each with its whole kind, through the whole server.

The `openai` client over a real socket, the real engine; only model and drafter are scripted, so that acceptance inside
a block is forced. The numbers name public threads (repository#number).
"""

import itertools
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from random import Random
from types import SimpleNamespace

import openai
import pytest

from ddtree.config import MODES
from scripted_text import ASSISTANT, END, FIRST_PIECE, GO, MODEL, Book, book_engine, both, byte_text, serving, tell

THOUGHT = "<think>5 < 6</think>Yes"
CALL = '<tool_call>{"name": "time", "arguments": {"zone": "</b>é"}}</tool_call>'
TIME = {
    "type": "function",
    "function": {
        "name": "time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string", "maxLength": 12}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}
BARE = {"type": "function", "function": {"name": "time"}}
WHERE = {"type": "function", "function": {"name": "where"}}
# Every way to cut the one in three; the other in two, and windows of it.
PIECES = sorted(
    {THOUGHT[low:high] for low in range(len(THOUGHT)) for high in range(low + 2, len(THOUGHT) + 1)}
    | {CALL[:at] for at in range(2, len(CALL) + 1)}
    | {CALL[at:] for at in range(len(CALL) - 1) if len(CALL[at:].encode()) > 1}
)
VOCAB = FIRST_PIECE + len(PIECES)


def token(piece: str) -> int:
    return piece.encode()[0] if len(piece.encode()) == 1 else FIRST_PIECE + PIECES.index(piece)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return byte_text(tmp_path_factory.mktemp("tokenizer"), PIECES)


def started(text, variety=0.0, options=None, **engine):
    """A server, its client, and the book that its model reads."""
    book = Book(vocab=VOCAB, variety=variety)
    return SimpleNamespace(
        book=book,
        server=serving(book_engine(text, book, **{"mode": "tree", "tree_budget": 12, **engine}), **options or {}),
    )


def opened(one):
    with one.server as server, server.openai() as client:
        one.url, one.engine, one.app, one.client = server.url, server.engine, server.app, client
        yield one


@pytest.fixture(scope="module")
def exact(text):
    """Its model says what the book says; the drafter knows most of it."""
    yield from opened(started(text))


@pytest.fixture(scope="module")
def varied(text):
    """Its model may say other things, where it is sampled or told to."""
    yield from opened(started(text, variety=5.0))


@pytest.fixture(scope="module")
def thinking(text):
    """Thinking is split off."""
    yield from opened(started(text, options={"reasoning_parser": "qwen3"}))


@pytest.fixture(autouse=True)
def _the_drafter_knows_everything(request):
    yield
    for name in ("exact", "varied", "thinking"):
        if name in request.fixturenames:
            request.getfixturevalue(name).book.rank = lambda place: 0


def speculative(mode, **more):
    return {"speculative": {"mode": mode, **more}}


def asked(message, kind):
    """The same as a chat, and as a text to go on with."""
    return {"messages": message} if kind == "chat" else {"prompt": f"<|user|>{message}<|end|><|assistant|><|go|>"}


# Stops, lengths, usage


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_where_an_answer_ends(exact, mode, kind):
    """sglang#23802, vllm#49391, vllm#47616, transformers#47931: inside a run of accepted tokens, every kind of end."""
    answer = exact.book.say("end?", "this is a test of all the ends")
    cases = [
        ({"stop": "is"}, "th", 4, ("stop", "is")),
        ({"stop": ["a", "is"]}, "th", 4, ("stop", "is")),
        ({"stop": ["is", "s i", "hi"]}, "t", 3, ("stop", "hi")),
        ({"stop": ["s", "is"]}, "th", 4, ("stop", "is")),  # one token completes both
        ({"stop": "of all"}, "this is a test ", 21, ("stop", "of all")),
        ({"stop": ["zz", "endss"]}, "this is a test of all the ends", 31, ("stop", None)),
        ({"stop_token_ids": [ord("a")]}, "this is ", 9, ("stop", ord("a"))),
        ({"min_tokens": 5, "stop": "is"}, "this ", 7, ("stop", "is")),
        ({"max_tokens": 3}, "thi", 3, ("length", None)),
        ({"max_tokens": 4, "stop": "is"}, "th", 4, ("stop", "is")),
        ({"max_tokens": 3, "stop": "is"}, "thi", 3, ("length", None)),
        ({}, "this is a test of all the ends", 31, ("stop", None)),
    ]
    logprobs = {"logprobs": True, "top_logprobs": 2} if kind == "chat" else {"logprobs": 2, "max_tokens": 99}
    for options, said, count, reason in cases:
        told = both(exact.client, **asked("end?", kind), temperature=0, **{**logprobs, **options}, **speculative(mode))
        assert (told.text, told.reasons, told.usage[1]) == ([said], [reason], count), options
        assert told.ids == [[*answer, END][:count]]
        entries = told.logprobs[0]["content"] if kind == "chat" else told.logprobs[0]["token_logprobs"]
        assert len(entries) == count


@pytest.mark.parametrize("place", range(12))
def test_an_end_token_anywhere_in_a_block(exact, place):
    """transformers#47931, and ignored on demand."""
    exact.book.say("end?", [*b"abcdefghijkl"[:place], END, *b"mnopqrst"])
    for mode in MODES:
        told = both(exact.client, messages="end?", temperature=0, **speculative(mode))
        assert (told.text, told.usage[1], told.reasons) == (["abcdefghijkl"[:place]], place + 1, [("stop", None)])
        told = tell(
            exact.client, messages="end?", temperature=0, ignore_eos=True, max_tokens=place + 3, **speculative(mode)
        )
        assert told.text == ["abcdefghijkl"[:place] + "mn"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 15, 16, 17, 20])
def test_limits_count_tokens_and_the_mode_that_ran_is_told(exact, mode, limit):
    """ferrox#311, dflash-mlx#20: by each name of the limit, in both APIs."""
    exact.book.say("long?", "abcdefghijklmnopqrstuvwxyz")
    ask = {"temperature": 0, **speculative(mode, metrics=True)}
    for told in (
        both(exact.client, **asked("long?", "chat"), max_tokens=limit, **ask),
        tell(exact.client, **asked("long?", "chat"), max_completion_tokens=limit, **ask),
        both(exact.client, **asked("long?", "text"), max_tokens=limit, **ask),
    ):
        assert told.usage[1] == limit
        assert told.reasons == [("length", None)]
        assert told.blocks[0]["mode"] == mode
        assert told.blocks[0]["rounds"] == (
            limit - 1 if mode == "ar" else -(-(limit - 1) // (13 if mode == "tree" else 16))
        )
        drafted = told.metrics and told.metrics["speculative_decoding"]
        assert bool(drafted) == (mode != "ar" and limit > 1)


@pytest.mark.parametrize("limit", [*range(1, len(THOUGHT) + 2), None])
def test_the_limit_inside_the_thinking(thinking, limit):
    """sglang#37450, #39826: reasoning tokens are a part of the answer's, and stop where it stops."""
    thinking.book.say("think?", THOUGHT)
    inside = THOUGHT.index("Yes")
    for mode in ("ar", "tree"):
        told = both(thinking.client, messages="think?", temperature=0, max_tokens=limit, **speculative(mode))
        count = min(limit or 99, len(THOUGHT) + 1)
        assert told.usage[1:] == (count, min(count, inside) if count >= 7 else 0)
        assert told.reasons[0][0] == ("stop" if count > len(THOUGHT) else "length")
        assert told.text[0] == (THOUGHT[inside:count] if count >= 7 else THOUGHT[:count])


# Sampling, log-probabilities


def test_seeds_and_modes(varied):
    """vllm#6038, z-lab/dflash#74: the same twice, in every mode; another for another seed, and where there is none."""
    varied.book.say("seed?", "abcdefghijklmnopqrstuvwxyz")
    ask = {"messages": "seed?", "max_tokens": 25, "logprobs": True, "top_logprobs": 3}
    found = {}
    for seed in (0, 1, -(2**63), 2**63 - 1):
        told = [both(varied.client, **ask, seed=seed, **speculative(mode)) for mode in MODES]
        assert all(one == told[0] for one in told)
        found[seed] = told[0]
    assert len({tuple(one.ids[0]) for one in found.values()}) == 4
    assert len({tuple(tell(varied.client, **ask).ids[0]) for _ in range(3)}) == 3


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 0.000001}, {"min_p": 1}, {"top_k": 1, "temperature": 2}])
def test_one_token_left_is_greedy(varied, options):
    """sparkring#161. The temperature is 1 where none is sent."""
    varied.book.say("top?", "abcdefghijklmnopqrstuvwxyz")
    for mode in MODES:
        told = both(varied.client, messages="top?", **options, **speculative(mode))
        assert told.text == ["abcdefghijklmnopqrstuvwxyz"]


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_penalties(varied, name, temperature):
    """vllm#18902: no effect under speculation. In every mode as in plain decoding, and +2 and -2 differ."""
    varied.book.say("same?", "abababababababababababababababab")
    found = []
    for penalty in (2, 0, -2):
        ask = {"messages": "same?", "temperature": temperature, "seed": 4, "max_tokens": 30, name: penalty}
        told = [both(varied.client, **ask, **speculative(mode)) for mode in MODES]
        assert all(one == told[0] for one in told)
        found.append(told[0].text[0])
    assert len(set(found)) == 3


@pytest.mark.parametrize("mode", MODES)
def test_log_probabilities_are_numbers_of_the_model(varied, mode):
    """llama.cpp#27972. Chats and texts tell the same, whatever was asked for on top."""
    varied.book.say("sure?", "abcdé")
    ask = {"temperature": 0, "logit_bias": {"100": -50}, "frequency_penalty": 1.5, "max_tokens": 9}
    chat = both(varied.client, **asked("sure?", "chat"), logprobs=True, top_logprobs=3, **ask, **speculative(mode))
    text = both(varied.client, **asked("sure?", "text"), logprobs=3, **ask, **speculative(mode))
    plain = both(varied.client, **asked("sure?", "chat"), logprobs=True, top_logprobs=3, **ask, **speculative("ar"))
    assert chat == plain
    assert chat.ids == text.ids
    assert chat.ids[0][3] != 100, "the bias holds"
    entries = chat.logprobs[0]["content"]
    assert [one["logprob"] for one in entries] == text.logprobs[0]["token_logprobs"]
    assert all(-20 < one["logprob"] < 0 for one in entries)
    assert all(len(one["top_logprobs"]) == 3 for one in entries)
    assert entries[3]["top_logprobs"][0]["token"] == "d", "before the bias"
    assert entries[3]["top_logprobs"][0]["logprob"] > entries[3]["logprob"]
    shown = bytes(value for one in entries for value in one["bytes"]).removesuffix(b"<|end|>")
    assert shown.decode(errors="replace") == chat.text[0] == text.text[0]


# Grammar

SCHEMA = {
    "type": "object",
    "properties": {"first_name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "maximum": 99}},
    "required": ["first_name", "age"],
    "additionalProperties": False,
}
PERSON = '{"first_name": "Bö", "age": 7}'


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafted", [PERSON, '{"name": "Bö", "age": 7}', "Of course: " + PERSON, "[" * 60])
def test_a_schema_that_the_drafter_does_not_know(exact, mode, drafted):
    """sglang#9187: the answer stood still at the drafter's first disagreement."""
    exact.book.say("person?", PERSON)
    drafter = Book({"person?": list(drafted.encode())}, vocab=VOCAB)
    honest = exact.engine.drafter.script
    exact.engine.drafter.script = lambda history: drafter.propose(history, 15)
    try:
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
        told = both(exact.client, messages="person?", temperature=0, response_format=form, **speculative(mode))
    finally:
        exact.engine.drafter.script = honest
    assert (told.text, told.reasons) == ([PERSON], [("stop", None)])
    assert told.usage[1] == len(PERSON.encode()) + 1


@pytest.mark.parametrize("mode", MODES)
def test_an_object_whose_siblings_are_illegal(exact, mode):
    """vllm#53777: the grammar could not advance over a draft token."""
    said = '{"a": [1, {"b": null}], "ö": true}'
    exact.book.say("object?", said)
    exact.book.rank = lambda place: place % 2
    told = both(
        exact.client, messages="object?", temperature=0, response_format={"type": "json_object"},
        **speculative(mode, **({"tree_budget": 30, "tree_top_k": 3} if "linear" != mode != "ar" else {})),
    )  # fmt: skip
    assert (told.text, told.reasons) == ([said], [("stop", None)])
    if mode == "tree":
        assert told.blocks[0]["acceptance_length"] > 3


@pytest.mark.parametrize("mode", ["ar", "linear", "tree"])
@pytest.mark.parametrize("wanted", [CALL, "I would rather not."])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}, "auto"])
def test_calls(exact, mode, wanted, choice):
    """sglang#30096: constrained requests were refused. A call comes also where the model would rather not."""
    exact.book.say("time?", wanted)
    white = {str(byte): -100 for byte in b" \t\r\n"} if wanted != CALL else {}  # a lost model adds much of it
    told = both(
        exact.client, messages="time?", temperature=0, tools=[TIME] if wanted != CALL else [WHERE, TIME],
        tool_choice=choice, logit_bias=white, max_tokens=150, **speculative(mode),
    )  # fmt: skip
    if choice == "auto" and wanted != CALL:
        assert (told.calls, told.reasons) == ([[]], [("stop", None)])
        assert told.text[0].strip()
        return
    name, arguments = told.calls[0][0]
    assert name == "time"
    if wanted == CALL:
        assert told.calls == [[("time", '{"zone": "</b>é"}')]]
        assert told.reasons == [("tool_calls", None)]
        assert told.text == [""]
    else:
        assert set(json.loads(arguments)) == {"zone"}


# State, concurrency


def at_once(count, ask):
    """ask(number) for each number, all at the same time."""
    gate = threading.Barrier(count)

    def one(number):
        gate.wait(10)
        return ask(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


@pytest.mark.parametrize("mode", MODES)
def test_eight_at_once_keep_their_secrets_and_their_acceptance(exact, mode):
    """sglang#36548, llama.cpp#27117; and a second, shorter request (llama.cpp#22105)."""
    secrets = [f"The word of {n} is {chr(0x61 + n) * (40 - 4 * n)}, {n}." for n in range(8)]
    for number, secret in enumerate(secrets):
        exact.book.say(f"word {number}?", secret)
    exact.book.rank = lambda place: [0, 0, 0, 1, 0, 0, 9][place % 7]

    def ask(number):
        return tell(exact.client, bool(number % 2), messages=f"word {number}?", temperature=0, **speculative(mode))

    apart, together = [ask(number) for number in range(8)], at_once(8, ask)
    assert [told.text for told in together] == [[secret] for secret in secrets]
    assert together == apart
    lengths = [[told.blocks[0]["acceptance_length"] for told in group] for group in (apart, together)]
    assert lengths[0] == lengths[1]
    assert min(lengths[0]) > 2 or mode == "ar"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stream", [False, True])
def test_choices_that_end_at_different_times(varied, mode, stream):
    """Each is what it is alone with its seed; one that has ended leaves the rounds to the others."""
    varied.book.say("short?", "abcdefghijklmnopqrstuvwxyz")
    ask = {"messages": "short?", "max_tokens": 12, "logit_bias": {str(END): 1.5}, **speculative(mode)}
    ask |= {"logprobs": True, "top_logprobs": 1, "stop": "defg"}
    batches, honest = [], varied.engine.target.verify
    varied.engine.target.verify = lambda cache, rows, position: (
        batches.append(len(rows.tokens)), honest(cache, rows, position))[1]  # fmt: skip
    try:
        told = tell(varied.client, stream, n=5, seed=7, **ask)
    finally:
        varied.engine.target.verify = honest
    alone = [tell(varied.client, seed=7 + number, **ask) for number in range(5)]
    assert told.text == [one.text[0] for one in alone]
    assert told.ids == [one.ids[0] for one in alone]
    assert told.logprobs == [one.logprobs[0] for one in alone]
    assert told.reasons == [one.reasons[0] for one in alone]
    assert told.usage[:2] == (alone[0].usage[0], sum(one.usage[1] for one in alone))
    assert len({len(ids) for ids in told.ids}) > 2, "they must end at different times"
    assert {"stop", "length"} <= {reason for reason, _ in told.reasons}
    assert sum(batches) == sum(block["rounds"] for block in told.blocks)
    assert batches[-1] < max(batches)


# A client that goes away


@pytest.fixture(scope="module")
def gate(text):
    """A server whose rounds go on one by one, as `rounds.release()` lets them."""
    one = started(text, config={"max_running_requests": 2})
    with contextmanager(opened)(one):
        honest = one.engine.target.verify

        def verify(cache, rows, position):
            one.begun.append(len(rows.tokens))
            assert one.rounds.acquire(timeout=20), "a test forgot to let the engine go on"
            return honest(cache, rows, position)

        one.engine.target.verify = verify
        yield one
        one.engine.target.verify = honest


@pytest.fixture
def gated(gate):
    gate.rounds, gate.begun = threading.Semaphore(0), []
    yield gate
    gate.rounds.release(1000)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_a_client_that_goes_away_frees_its_slots_within_one_round(gated, eventually, route, stream, n):
    """By the scheduler's own numbers: the round that is under way when it goes is the last one."""
    gated.book.say("endless?", "abc " * 400)
    told = {"messages": [{"role": "user", "content": "endless?"}]} if "chat" in route else asked("endless?", "text")
    body = json.dumps({"max_tokens": 1500, "temperature": 0, "stream": stream, "n": n, **told})
    scheduler, worker = gated.engine.scheduler, gated.app.state.worker
    connection = HTTPConnection(gated.url.removeprefix("http://"), timeout=20)
    connection.request("POST", f"/v1/{route}", body, {"Content-Type": "application/json"})
    for number in (1, 2):
        eventually(lambda number=number: len(gated.begun) == number)
        gated.rounds.release()
    eventually(lambda: len(gated.begun) == 3)  # the third is under way
    assert gated.begun == [n] * 3
    if stream:
        response = connection.getresponse()
        assert response.read1().startswith(b"data: {")
    assert scheduler.stats().running == worker.unfinished == n
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    eventually(lambda: not worker.unfinished)
    gated.rounds.release()
    eventually(lambda: scheduler.stats().running == 0)
    assert not scheduler.has_work
    assert len(gated.begun) == 3
    gated.rounds.release(100)
    gated.book.say("next?", "here")
    assert tell(gated.client, messages="next?", temperature=0).text == ["here"]


def test_a_client_that_waits_and_goes_away_never_runs(gated, eventually):
    """Two run, a third waits; when it goes, the two go on, and the next one is not held up by it."""
    gated.book.say("endless?", "abc " * 400)
    body = {"messages": [{"role": "user", "content": "endless?"}], "max_tokens": 30, "temperature": 0}
    scheduler, worker = gated.engine.scheduler, gated.app.state.worker
    connections = []
    for _ in range(3):
        connections.append(HTTPConnection(gated.url.removeprefix("http://"), timeout=20))
        connections[-1].request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        eventually(lambda: worker.unfinished == len(connections))
    for _ in range(2):
        eventually(lambda: gated.begun)
        gated.rounds.release()
    eventually(lambda: gated.begun[-1] == 2)
    eventually(lambda: scheduler.stats().waiting == 1)
    connections[2].sock.shutdown(socket.SHUT_RDWR)
    connections[2].close()
    eventually(lambda: worker.unfinished == 2)
    gated.rounds.release(100)
    for connection in connections[:2]:
        answer = json.loads(connection.getresponse().read())
        assert answer["choices"][0]["message"]["content"] == ("abc " * 8)[:30]
        connection.close()
    eventually(lambda: not scheduler.has_work)
    assert sum(gated.begun) == 2 * answer["ddtree"]["rounds"], "no round was spent on the third"


# Prefix, context


def test_a_conversation_with_thinking(text):
    """atlas#693, vllm#47930: acceptance fell after a hit. The template drops earlier thinking, so a turn shares what
    lies before it; answers and acceptance are those of a server that keeps nothing."""
    answers = [f"<think>{'hm, ' * 4 * (n + 1)}</think>Turn {n} is {'well ' * 3}done." for n in range(4)]
    found = []
    for caching in (True, False):
        one = started(
            text, options={"reasoning_parser": "qwen3"}, config={"prefix_caching": caching, "prefill_chunk": 16}
        )
        with contextmanager(opened)(one):
            one.book.rank = lambda place: [0, 0, 0, 0, 1, 0, 0, 4][place % 8]
            messages, told = [{"role": "system", "content": "Be brief, and think."}], []
            for number, answer in enumerate(answers):
                one.book.say(f"turn {number}?", answer)
                messages.append({"role": "user", "content": f"turn {number}?"})
                told.append(tell(one.client, bool(number % 2), messages=messages, temperature=0))
                messages.append({"role": "assistant", "content": told[-1].text[0], "reasoning_content": "x"})
            found.append(told)
    kept, fresh = found
    assert kept == fresh
    assert [one.text[0] for one in kept] == [answer.partition("</think>")[2] for answer in answers]
    for name in ("rounds", "acceptance_length"):
        assert [one.blocks[0][name] for one in kept] == [one.blocks[0][name] for one in fresh]
    assert min(one.blocks[0]["acceptance_length"] for one in kept) > 2
    assert [one.cached for one in fresh] == [0] * 4
    for before, after in itertools.pairwise(kept):
        assert after.cached == before.usage[0], "all of the last prompt, and nothing of the thinking behind it"


def test_shared_beginnings_with_different_tails_at_once(exact):
    """Many requests under one system prompt, at the same time: each accepts what it accepts alone."""
    for number in range(8):
        exact.book.say(f"tail {number}?", f"answer {number} to it, at some length, as it should be")
    exact.book.rank = lambda place: [0, 0, 0, 0, 1, 0, 0, 4][place % 8]

    def ask(number):
        system = {"role": "system", "content": "You are one of a kind. " * 8}
        return tell(exact.client, messages=[system, {"role": "user", "content": f"tail {number}?"}], temperature=0)

    together, alone = at_once(8, ask), [ask(number) for number in range(8)]
    assert together == alone
    assert [one.blocks[0]["acceptance_length"] for one in together] == [
        one.blocks[0]["acceptance_length"] for one in alone
    ]
    assert sum(one.cached > 150 for one in together) >= 6


@pytest.mark.parametrize("mode", MODES)
def test_the_drafters_own_limit(text, mode):
    """omlx#1402: crossed in mid-answer it falls back to plain decoding; beyond it, that is what the answer says."""
    with contextmanager(opened)(started(text, drafter_context=64, context=256, mode=mode)) as one:
        one.book.say("x" * 9, "crossing the limit of the drafter in the middle of an answer of some length")
        one.book.say("y" * 80, "beyond it from the start")
        told = both(one.client, messages="x" * 9, temperature=0)
        assert told.text == ["crossing the limit of the drafter in the middle of an answer of some length"]
        assert told.blocks[0]["mode"] == mode
        told = both(one.client, messages="y" * 80, temperature=0, speculative={"metrics": True})
        assert (told.text, told.blocks[0]["mode"]) == (["beyond it from the start"], "ar")
        assert told.metrics == {"speculative_decoding": None}
        with pytest.raises(openai.BadRequestError) as caught:
            tell(one.client, messages="z" * 300)
        assert caught.value.code == "context_length_exceeded"
        assert tell(one.client, messages="x" * 9, temperature=0).blocks[0]["mode"] == mode


# API, streaming


def test_thinking_is_split_whatever_way_the_tokens_cut_it(thinking):
    """Rapid-MLX#219, omlx#892: every way to write it in up to three tokens, each in one round and in several."""
    for low in range(len(THOUGHT)):
        for high in range(low + 1, len(THOUGHT) + 1):
            parts = [part for part in (THOUGHT[:low], THOUGHT[low:high], THOUGHT[high:]) if part]
            ids = thinking.book.say("cut?", [token(part) for part in parts])
            thinking.book.rank = lambda place, low=low: 9 * (place == low % 3)
            told = tell(thinking.client, bool((low + high) % 4), messages="cut?", temperature=0)
            assert (told.reasoning, told.text) == (["5 < 6"], ["Yes"]), parts
            ends = len(THOUGHT) - len("Yes")
            closes = next(n for n in range(1, len(parts) + 1) if len("".join(parts[:n])) >= ends)
            assert told.usage[1:] == (len(ids) + 1, closes), "up to the token that closes it, that one included"


@pytest.mark.parametrize("before", ["<think>So.</think>", "Let me see. "])
def test_calls_are_split_whatever_way_the_tokens_cut_them(thinking, before):
    """Twice the same call, cut in two at every place; and byte by byte with a round's end at every place."""
    expected = [("time", '{"zone": "</b>é"}')] * 2
    for at in range(1, len(CALL)):
        cut = [token(CALL[:at]), token(CALL[at:])]
        thinking.book.say("call?", [*before.encode(), *cut, ord("\n"), *cut])
        thinking.book.rank = lambda place, at=at: 9 * (place == len(before) + at % 5)
        told = tell(thinking.client, bool(at % 4), messages="call?", temperature=0, tools=[BARE])
        assert told.calls == [expected], at
        assert told.text == [before if "think" not in before else ""]
        assert told.reasons == [("tool_calls", None)]
    for at in range(len((before + CALL).encode())):
        thinking.book.say("call?", before + CALL)
        thinking.book.rank = lambda place, at=at: 9 * (place == at)
        told = tell(thinking.client, True, messages="call?", temperature=0, tools=[BARE], **speculative("linear"))
        assert told.calls == [expected[:1]], at


@pytest.mark.parametrize("mode", ["tree"])
def test_a_limit_inside_a_call(thinking, mode):
    """What is cut off is no content, once the call has begun: also of the marker that would close it."""
    said = '<tool_call>{"name": "time", "arguments": {"zone": "b"}}</tool_call>\n' + CALL
    begins, ends = said.index('{"zone'), said.index("}</tool_call>")
    thinking.book.say("call?", said)
    for limit in range(1, len('<tool_call>{"name": "time", "arguments": {"zone": "b"}}</tool_call>\n') + 1):
        told = both(
            thinking.client, messages="call?", temperature=0, tools=[BARE], max_tokens=limit, **speculative(mode)
        )
        assert told.usage[1] == limit
        assert told.reasons == [("length", None)]
        if limit <= begins:
            assert (told.text, told.calls) == ([said[:limit]], [[]])
        else:
            assert (told.text, told.calls) == ([""], [[("time", said[begins : min(limit, ends)])]]), limit


def test_thinking_that_the_template_opened(thinking):
    """Its marker is in the prompt; the closing one comes byte by byte, a round ending at each."""
    said = "so far</think>\n\nYes, é."
    for at in range(len(said.encode())):
        thinking.book.say("open?", said)
        thinking.book.rank = lambda place, at=at: 9 * (place == at)
        told = tell(
            thinking.client, True, messages="open?", temperature=0, chat_template_kwargs={"enable_thinking": True}
        )
        assert (told.reasoning, told.text) == (["so far"], ["\n\nYes, é."])
        assert told.usage[2] == len("so far</think>")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_characters_cut_over_tokens_and_rounds(exact, kind, seed):
    """Every byte is a token; rounds end anywhere, also inside of characters and of stop strings."""
    chance = Random(seed)
    said = "".join(chance.choice(["a", "é", "€", "🌍", "👩‍🚀", " ", "ß", "中"]) for _ in range(20))
    exact.book.say("utf?", said)
    cuts = [chance.random() < 0.3 for _ in range(200)]
    exact.book.rank = lambda place: 9 * cuts[place]
    mode = chance.choice(MODES[1:])
    ask = {**asked("utf?", kind), "temperature": 0, **speculative(mode), "max_tokens": 300}
    told = both(exact.client, **ask)
    assert told.text == [said]
    for _ in range(4):
        place = chance.randrange(len(said) - 4)
        stop = said[place : place + chance.randrange(1, 5)]
        told = both(exact.client, **ask, stop=["never", stop])
        assert (told.text, told.reasons) == ([said[: said.index(stop)]], [("stop", stop)])
        assert told.ids[0] == list(said[: said.index(stop) + len(stop)].encode())
    for limit in chance.sample(range(1, 30), 4):  # a limit inside a character shows it as broken, once, at the end
        told = both(exact.client, **{**ask, "max_tokens": limit})
        assert told.text == [said.encode()[:limit].decode(errors="replace")]
        assert told.usage[1] == limit


def test_no_chunk_holds_a_part_of_a_character(exact):
    exact.book.say("whole?", "🌍é€" * 6)
    for wrong in range(9):
        exact.book.rank = lambda place, wrong=wrong: 9 * (place % 9 == wrong)
        stream = exact.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "whole?"}], temperature=0, stream=True
        )
        pieces = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
        assert "".join(pieces) == "🌍é€" * 6
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_request_chooses_its_own_speculation(exact):
    """sglang#30263: opting out, one request at a time; vllm#40809, sglang#22887: trees. Beside others that do not."""
    exact.book.say("own?", "abcdefghijklmnopqrstuvwxyz0123456789")
    exact.book.rank = lambda place: int(place % 4 == 3)
    choices = [*MODES, None, "ar", "tree", "linear"]

    def ask(number):
        mode = choices[number]
        options = {"metrics": True, **({"mode": mode} if mode else {"tree_budget": 3})}
        return tell(exact.client, bool(number % 2), messages="own?", temperature=0, speculative=options)

    told = at_once(8, ask)
    assert all(one.text == ["abcdefghijklmnopqrstuvwxyz0123456789"] for one in told)
    assert [one.blocks[0]["mode"] for one in told] == [mode or "tree" for mode in choices]
    for one, mode in zip(told, choices, strict=True):
        metrics = one.metrics["speculative_decoding"]
        assert (metrics is None) == (mode == "ar")
        if metrics:
            histogram = metrics["acceptance_histogram"]
            assert sum(histogram) == metrics["num_spec_steps"] == one.blocks[0]["rounds"]
            assert sum(n * count for n, count in enumerate(histogram)) == metrics["num_accepted_draft_tokens"]
            assert metrics["mean_acceptance_length"] == one.blocks[0]["acceptance_length"]
            assert metrics["num_spec_tokens"] == {"tree": 12, None: 3, "linear": 15, "shadow-linear": 15}[mode]
        assert bool(one.blocks[0]["shadow"]) == (mode == "shadow-linear")
    by_mode = dict(zip(choices, told, strict=True))
    assert (
        by_mode["tree"].blocks[0]["rounds"] < by_mode["linear"].blocks[0]["rounds"] < by_mode["ar"].blocks[0]["rounds"]
    )


def test_what_the_template_was_given_shows_in_the_prompt(thinking):
    """z-lab/dflash#133: figures disagreed because thinking was on in one. The prompt's ids tell."""
    thinking.book.say("same?", "Yes")
    prompts = []
    for kwargs in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        answer = thinking.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "same?"}], temperature=0,
            extra_body={"return_token_ids": True, "chat_template_kwargs": kwargs},
        )  # fmt: skip
        prompts.append(answer.prompt_token_ids)
        assert answer.usage.prompt_tokens == len(answer.prompt_token_ids)
    assert prompts[0] == prompts[2]
    assert prompts[1] == [*prompts[0][:-2], ASSISTANT, *b"<think>", GO]
