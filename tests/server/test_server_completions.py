"""`POST /v1/completions`: whole and streamed answers, several prompts, log-probabilities of the older shape."""

import json

import httpx
import pytest

from ddtree.server.schemas.responses import Completion

pytestmark = pytest.mark.anyio
WORDS = [("Hél", [b"H", b"\xc3", b"\xa9l"]), ("lo", [b"lo"]), "", "!"]


@pytest.fixture
def complete(http):
    async def send(prompt="Hi", **fields) -> httpx.Response:
        return await http.post("/v1/completions", json={"prompt": prompt, **fields})

    return send


def events(answer: httpx.Response) -> list[dict]:
    assert answer.status_code == 200, answer.text
    *frames, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


async def test_a_whole_answer(complete):
    body = (await complete()).json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == "scripted"
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "text": "Hello, wörld 🌍!",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["completion_tokens"] == 6
    assert body["ddtree"]["mode"] == "tree"
    assert "metrics" not in body


async def test_a_stream(complete):
    bodies = events(await complete(stream=True, stream_options={"include_usage": True}))
    assert {body["object"] for body in bodies} == {"text_completion"}
    assert [body["choices"][0]["text"] for body in bodies[:-1]] == ["Hel", "lo", ", wör", "ld 🌍", "!", ""]
    assert [body["choices"][0]["finish_reason"] for body in bodies[:-1]] == [None] * 5 + ["stop"]
    assert bodies[-1]["choices"] == []
    assert bodies[-1]["usage"] == (await complete()).json()["usage"]
    assert all(body["usage"] is None for body in bodies[:-1])
    assert bodies[-2]["ddtree"]["mode"] == "tree"


async def test_several_prompts_and_choices(complete, engine):
    engine.answers = {"a": ["A", "1"], "bb": ["B", "2"]}
    answer = (await complete(["a", "bb"], n=2, max_tokens=5, seed=7)).json()
    assert [(one["index"], one["text"]) for one in answer["choices"]] == [(0, "A1"), (1, "A1"), (2, "B2"), (3, "B2")]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 8
    assert [params.seed for params in engine.params] == [7, 8, 7, 8]
    assert engine.prompts == ["a", "a", "bb", "bb"]
    texts = [""] * 4
    for body in events(await complete(["a", "bb"], n=2, stream=True)):
        for choice in body["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["A1", "A1", "B2", "B2"]


@pytest.mark.parametrize("prompt", ["Hi", [72, 105], ["Hi"], [[72, 105]]])
async def test_echo(complete, prompt):
    whole = (await complete(prompt, echo=True)).json()
    assert whole["choices"][0]["text"] == "HiHello, wörld 🌍!"
    assert whole["usage"]["completion_tokens"] == 6
    bodies = events(await complete(prompt, echo=True, stream=True))
    assert "".join(body["choices"][0]["text"] for body in bodies) == "HiHello, wörld 🌍!"
    assert bodies[0]["choices"][0]["text"] == "HiHel"


async def test_logprobs(complete, engine):
    engine.pieces = WORDS
    block = (await complete(logprobs=2)).json()["choices"][0]["logprobs"]
    assert block["tokens"] == ["H", "\ufffd", "\ufffdl", "lo", "", "!"]
    assert block["token_logprobs"] == [-0.5] * 6
    assert block["text_offset"] == [0, 1, 1, 3, 5, 5]
    assert block["top_logprobs"][0] == {"A": -1.0, "B": -2.0, "H": -0.5}
    assert (await complete(logprobs=0)).json()["choices"][0]["logprobs"]["top_logprobs"][0] == {"H": -0.5}
    joined = {name: [] for name in block}
    for body in events(await complete(logprobs=2, stream=True)):
        for name, values in (body["choices"][0]["logprobs"] or {}).items():
            joined[name] += values
    assert joined == block


async def test_token_ids(complete, engine):
    engine.pieces = WORDS
    body = (await complete(["Hi", "!"], return_token_ids=True, logprobs=1, speculative={"metrics": True})).json()
    Completion.model_validate(body)  # what the OpenAPI document tells
    choice = body["choices"][1]
    assert choice["prompt_token_ids"] == [33]
    assert len(choice["token_ids"]) == 6
    bodies = events(await complete([[33]], return_token_ids=True, stream=True))
    assert bodies[0]["choices"][0]["prompt_token_ids"] == [33]
    told = [token for body in bodies for token in body["choices"][0].get("token_ids", [])]
    assert told == choice["token_ids"]
    assert not any("prompt_token_ids" in body["choices"][0] for body in bodies[1:])


async def test_a_prompt_that_does_not_fit(complete, engine):
    for stream in (False, True):
        answer = await complete(["Hi", "x" * 500], stream=stream)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert answer.json()["error"]["param"] == "prompt"
    engine.text.encode = None  # not reached
    answer = await complete("x" * (engine.max_model_len * 32 + 1))
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_errors_after_the_first_chunk(complete, engine):
    engine.error, engine.error_at = RuntimeError("x"), 2
    *_, last = events(await complete(stream=True))
    assert last["error"]["code"] == "engine_error"
