"""Routes and whole answers, inside the process."""

import asyncio
import threading

import httpx
import pytest

from ddtree.errors import InvalidOption
from ddtree.server import create_app
from ddtree.server.options import ServerOptions

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
            "stop_reason": None,
        }
    ]
    prompt = len("<user>Hi")
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 6,
        "total_tokens": prompt + 6,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert body["ddtree"] == {"mode": "tree", "acceptance_length": 2.25, "rounds": 3, "tok_s": 40.0, "shadow": None}


async def test_ids_differ(chat):
    assert (await chat()).json()["id"] != (await chat()).json()["id"]


async def test_the_shadow_is_reported(chat, engine):
    from dataclasses import dataclass

    @dataclass
    class Shadow:
        linear_acceptance_length: float = float("nan")
        tree_acceptance_length: float = 3.0
        agree: bool = True
        overhead: None = None

    engine.shadow, engine.tok_s = Shadow(), float("inf")
    block = (await chat()).json()["ddtree"]
    assert block["shadow"] == {
        "linear_acceptance_length": None,
        "tree_acceptance_length": 3.0,
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
async def test_context_length_exceeded(chat, stream):
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


async def test_a_bug_of_the_server_has_the_shape_too(chat, engine):
    engine.text = None
    answer = await chat()
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"


async def test_a_full_queue_says_when_to_try_again(http, chat, engine):
    http.app.state.worker._max_queue = 0
    engine.hold, engine.max_running = threading.Event(), 8
    running = [asyncio.ensure_future(chat(str(number))) for number in range(7)]
    await asyncio.to_thread(engine.started.wait, 10)
    refused = await chat(n=2, stream=True)
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert refused.json()["error"]["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1
    engine.hold.set()
    assert [(await answer).status_code for answer in running] == [200] * 7


async def test_a_request_that_does_not_fit_the_queue_as_a_whole_leaves_nothing_behind(http, engine, eventually):
    """Several prompts are taken one by one: those before the one that did not fit are given up."""
    http.app.state.worker._max_queue = 0
    refused = await http.post("/v1/completions", json={"prompt": ["a", "b", "c"], "n": 4})
    assert refused.status_code == 429
    assert http.app.state.worker.unfinished == 0
    assert (await http.post("/v1/completions", json={"prompt": "a", "n": 8})).status_code == 200


async def test_more_prompts_than_ever_fit(engine):
    app = create_app(engine, ServerOptions(("scripted",), max_queue=1))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for count, status in ((9, 200), (10, 400)):
            answer = await client.post("/v1/completions", json={"prompt": ["a"] * count})
            assert answer.status_code == status
    await app.state.worker.stop(0)


@pytest.mark.parametrize(
    ("named", "param"),
    [("mode", "speculative.mode"), ("prompt", "messages"), ("logit_bias", "logit_bias"), (None, None)],
)
async def test_refusals_of_the_engine_name_the_body_s_field(chat, engine, monkeypatch, named, param):
    def check(prompt, params, speculation=None):
        raise InvalidOption("cannot be", param=named)

    monkeypatch.setattr(engine, "check", check)
    answer = await chat(speculative={"mode": "linear"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_several_served_names(engine):
    app = create_app(engine, ServerOptions(("first", "other/name")))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        cards = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["root"]) for card in cards] == [("first", "scripted"), ("other/name", "scripted")]
        assert (await client.get("/v1/models/other/name")).json() == cards[1]
        for asked in (None, "first", "other/name"):
            body = {"messages": [{"role": "user", "content": "Hi"}], "model": asked}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.json()["model"] == "first"
        refused = await client.post("/v1/completions", json={"prompt": "Hi", "model": "scripted"})
        assert refused.status_code == 404
    await app.state.worker.stop(0)


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
    for path, schema, required in (
        ("chat/completions", "ChatRequest", "messages"),
        ("completions", "CompletionRequest", "prompt"),
    ):
        route = document["paths"][f"/v1/{path}"]["post"]
        assert "422" not in route["responses"]
        assert "4XX" in route["responses"]
        assert set(route["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
        request = document["components"]["schemas"][schema]
        assert request["required"] == [required]
        assert request["additionalProperties"] is False


async def test_an_app_that_served_nothing_stops(engine):
    app = create_app(engine, ServerOptions(("scripted",)))
    async with app.router.lifespan_context(app):
        pass
    assert not app.state.worker.busy
