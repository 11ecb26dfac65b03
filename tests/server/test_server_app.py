"""Routes and whole answers, inside the process."""

import asyncio
import threading

import pytest

from ddtree.errors import ContextLengthExceeded
from ddtree.server import create_app

pytestmark = pytest.mark.anyio


async def test_health_and_models(http, engine):
    assert (await http.get("/health")).json() == {"status": "ok"}
    models = (await http.get("/v1/models")).json()
    assert models["object"] == "list"
    (card,) = models["data"]
    assert set(card) == {"id", "object", "created", "owned_by", "root", "parent", "max_model_len"}
    assert card["id"] == "scripted"
    assert card["object"] == "model"
    assert card["owned_by"] == "ddtree"
    assert card["max_model_len"] == engine.max_model_len
    assert card["parent"] is None
    assert (await http.get("/v1/models/scripted")).json() == card
    missing = await http.get("/v1/models/other/name")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_a_whole_answer_has_openai_s_shape(chat):
    answer = await chat("Hi", model="scripted")
    assert answer.status_code == 200
    body = answer.json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == "scripted"
    assert isinstance(body["created"], int)
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello, wörld 🌍!"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt = len("<user>Hi")
    assert body["usage"] == {"prompt_tokens": prompt, "completion_tokens": 6, "total_tokens": prompt + 6}
    assert body["ddtree"] == {"mode": "tree", "acceptance_length": 2.25, "rounds": 3, "tok_s": 40.0, "shadow": None}


async def test_ids_differ(chat):
    assert (await chat()).json()["id"] != (await chat()).json()["id"]


async def test_the_shadow_is_reported(chat, engine):
    from dataclasses import dataclass

    @dataclass
    class Shadow:
        linear_acceptance_length: float = 2.0
        tree_acceptance_length: float = float("nan")
        agree: bool = True
        overhead: None = None

    engine.shadow, engine.tok_s = Shadow(), float("inf")
    block = (await chat()).json()["ddtree"]
    assert block["shadow"] == {
        "linear_acceptance_length": 2.0,
        "tree_acceptance_length": None,
        "agree": True,
        "overhead": None,
    }
    assert block["tok_s"] is None


async def test_max_tokens_gives_length(chat):
    body = (await chat(max_tokens=2)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["message"]["content"] == "Hello"
    assert body["usage"]["completion_tokens"] == 2


async def test_two_requests_in_turn_of_different_lengths(chat, engine):
    long = (await chat("a long one " * 10)).json()
    short = (await chat("s", max_tokens=1)).json()
    assert long["usage"]["prompt_tokens"] > short["usage"]["prompt_tokens"]
    assert short["choices"][0]["message"]["content"] == "Hel"
    assert engine.closed == 2


async def test_unknown_model(chat, engine):
    answer = await chat(model="gpt-4o")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert error["type"] == "invalid_request_error"
    assert "gpt-4o" in error["message"]
    assert "scripted" in error["message"]
    assert not engine.prompts


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("raised", ["at the call", "in the generator"])
async def test_context_length_exceeded(chat, engine, stream, raised):
    if raised == "at the call":

        def stream_refusing(prompt, params):
            raise ContextLengthExceeded("the prompt has too many tokens", param="prompt")

        engine.stream = stream_refusing
    answer = await chat("x" * 500, stream=stream)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_template_that_refuses(chat, stream):
    answer = await chat("untemplatable", stream=stream)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the chat template refuses this"


async def test_other_paths_and_methods(http):
    missing = await http.get("/v1/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "invalid_request_error"
    assert "/v1/nothing" in missing.json()["error"]["message"]
    wrong = await http.get("/v1/chat/completions")
    assert wrong.status_code == 405
    assert wrong.json()["error"]["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST"
    slash = await http.post("/v1/chat/completions/", json={})
    assert slash.status_code == 404
    assert slash.json()["error"]["code"] == "not_found"


async def test_head_of_health(http):
    assert (await http.head("/health")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_failure_is_a_500_and_the_server_goes_on(chat, http, engine, stream, caplog):
    engine.error = RuntimeError("secret detail")
    answer = await chat(stream=stream)
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert error["type"] == "server_error"
    assert error["code"] == "engine_error"
    assert "RuntimeError" in error["message"]
    assert "secret" not in error["message"]
    assert "secret detail" in caplog.text
    assert (await http.get("/health")).status_code == 200
    assert (await chat()).json()["choices"][0]["finish_reason"] == "stop"


async def test_a_stream_that_just_ends_is_a_failure(chat, engine):
    engine.pieces = []
    assert (await chat()).status_code == 500


@pytest.mark.parametrize("error", [RuntimeError("the device is lost"), SystemExit(1)])
async def test_after_the_engine_died_nothing_is_called_healthy(chat, http, engine, error):
    """One failure that the probe repeats, and one that ends the thread at once."""
    engine.error, engine.error_once = error, False
    engine.hold = threading.Event()
    requests = [asyncio.ensure_future(chat(f"number {number}")) for number in range(3)]
    await asyncio.to_thread(engine.started.wait, 10)
    await asyncio.sleep(0.05)
    engine.hold.set()
    answers = await asyncio.wait_for(asyncio.gather(*requests), 10)
    assert [answer.status_code for answer in answers] == [500, 503, 503]
    health = await http.get("/health")
    assert health.status_code == 503
    assert health.json()["error"]["code"] == "engine_dead"
    assert (await chat()).status_code == 503
    assert (await http.get("/v1/models")).status_code == 200


async def test_a_bug_of_the_server_has_the_shape_too(chat, engine):
    engine.text = None
    answer = await chat()
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"


async def test_first_come_first_served_one_at_a_time(chat, engine):
    engine.hold = threading.Event()
    requests = []
    for number in range(5):
        requests.append(asyncio.ensure_future(chat(f"{number}", stream=bool(number % 2))))
        await asyncio.sleep(0.02)
    engine.hold.set()
    answers = await asyncio.gather(*requests)
    assert [answer.status_code for answer in answers] == [200] * 5
    assert engine.prompts == [f"<user>{number}" for number in range(5)]
    assert engine.most_active == 1


async def test_a_bad_request_does_not_wait_for_its_turn(chat, engine):
    engine.hold = threading.Event()
    running = asyncio.ensure_future(chat())
    await asyncio.to_thread(engine.started.wait, 10)
    refused = await asyncio.wait_for(chat("untemplatable"), 5)
    assert refused.status_code == 400
    assert not running.done()
    engine.hold.set()
    assert (await running).status_code == 200


async def test_the_openapi_document_says_what_is_true(http):
    document = (await http.get("/openapi.json")).json()
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert "422" not in chat["responses"]
    assert "4XX" in chat["responses"]
    request = document["components"]["schemas"]["ChatRequest"]
    assert request["required"] == ["messages"]
    assert request["additionalProperties"] is False


async def test_an_app_that_served_nothing_stops(engine):
    app = create_app(engine, "scripted")
    async with app.router.lifespan_context(app):
        pass
    assert app.state.worker.busy is False
