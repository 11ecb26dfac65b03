"""Bodies that are too much to look at, or that hold what cannot be sent back: refused by name, and at once."""

import json
import threading
import time

import httpx
import pytest

from ddtree.server import reading
from ddtree.server.schemas import ChatRequest, CompletionRequest

pytestmark = pytest.mark.anyio
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}
HI = [{"role": "user", "content": "Hi"}]
HALF = "\udc00"


async def post(http, url, body) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await http.post(url, content=content, headers=JSON)


async def refused(http, url, body, status=400) -> dict:
    answer = await post(http, url, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 400
    return error


def call(**function):
    return [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": HALF, "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": HALF}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": HALF, "text": "a"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "tool", "content": "", "tool_call_id": HALF}]}, "messages[0].tool_call_id"),
        ({"messages": call(name=HALF, arguments="")}, "messages[0].tool_calls[0].function.name"),
        ({"model": HALF}, "model"), ({"user": HALF}, "user"), ({"stop": HALF}, "stop"),
        ({"stop": ["a", HALF]}, "stop[1]"),
        ({"tool_choice": HALF}, "tool_choice"), ({"response_format": {"type": HALF}}, "response_format.type"),
        ({"response_format": HALF}, "response_format"), ({"reasoning_effort": HALF}, "reasoning_effort"),
        ({"speculative": {"mode": HALF}}, "speculative.mode"), ({"metadata": {"a": HALF}}, "metadata.a"),
        ({"metadata": {HALF: "a"}}, "metadata"), ({"logit_bias": {HALF: 1}}, "logit_bias"),
        ({"tools": [{"type": "function", "function": {"name": HALF}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {HALF: 1}}}]},
         "tools[0].function.parameters"),
        ({"structured_outputs": {"choice": ["a", HALF]}}, "structured_outputs.choice[1]"),
        ({"stream_options": {HALF: 1}}, "stream_options"), ({HALF: 1}, None), ({HALF * 1000: 1}, None),
        ({"service_tier": HALF}, "service_tier"), ({"store": HALF}, "store"), ({"x": {"y": [HALF]}}, "x.y[0]"),
    ],
)  # fmt: skip
async def test_half_characters_anywhere(http, engine, fields, param):
    error = await refused(http, CHAT, {"messages": HI, **fields})
    assert error["param"] == param
    assert (param or "the body") in error["message"]
    assert not engine.prompts


async def test_half_characters_of_completions_and_in_raw_bytes(http):
    assert (await refused(http, TEXT, {"prompt": ["a", HALF]}))["param"] == "prompt[1]"
    raw = b'{"messages": [{"role": "\xed\xb0\x80", "content": "hi"}]}'
    assert "UTF-8" in (await refused(http, CHAT, raw))["message"]


async def test_whole_characters_of_two_halves(http, engine):
    body = b'{"messages": [{"role": "user", "content": "\\ud83c\\udf0d \\\\ud800"}], "user": "\\ud83c\\udf0d"}'
    assert (await post(http, CHAT, body)).status_code == 200
    assert engine.prompts == ["<user>🌍 \\ud800"]


def many(count):
    return {f"k{number}": 1 for number in range(count)}


TOO_MUCH = {
    "unknown fields": (CHAT, {"messages": HI, **many(200_000)}, ":"),
    "fields": (CHAT, {"messages": HI, **many(1000)}, "1001 fields"),
    "ids": (TEXT, {"prompt": [5] * 1_300_000}, ","),
    "ids beyond the context": (TEXT, {"prompt": [5] * 500_000}, "500000 tokens"),
    "lists of ids": (TEXT, {"prompt": [[5] * 10, [5] * 201]}, "201 tokens"),
    "fractions": (TEXT, {"prompt": [1.5] * 300_000}, "more than 10000 numbers"),
    "messages": (CHAT, {"messages": HI * 201}, "201 messages"),
    "many messages": (CHAT, {"messages": HI * 100_000}, ":"),
    "template arguments": (CHAT, {"messages": HI, "chat_template_kwargs": many(129)}, "at most 128 arguments"),
    "values": (CHAT, {"messages": HI, "chat_template_kwargs": {"a": [0] * 70_000}}, "chat_template_kwargs"),
    "brackets": (CHAT, b'{"a": [' + b"[]," * 200_000 + b"[]]}", "`[` and `{`"),
    "content parts": (CHAT, {"messages": [{"role": "user", "content": [1] * 60_000}]}, "messages[0].content[0]"),
    "stops": (CHAT, {"messages": HI, "stop": [5] * 60_000}, "at most 4 strings"),
    "nested arguments": (
        CHAT,
        b'{"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"a": '
        + b"[" * 500 + b"]" * 500 + b"}}",
        "`chat_template_kwargs` is nested",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_MUCH)
async def test_too_much_is_refused_before_it_is_looked_at(http, engine, name):
    url, body, word = TOO_MUCH[name]
    answer = await post(http, url, body)
    assert answer.status_code in (400, 413)
    assert word in answer.json()["error"]["message"]
    assert not engine.prompts


def test_a_body_that_takes_long_holds_nobody_up(live, monkeypatch):
    """Whatever is done with a large body is done beside the event loop."""
    model_validate, inside, go_on = ChatRequest.model_validate, threading.Event(), threading.Event()

    def slow(value):
        inside.set()
        assert go_on.wait(10)
        return model_validate(value)

    monkeypatch.setattr(ChatRequest, "model_validate", slow)
    body = {"messages": HI, "user": "x" * reading.LARGE_BODY}
    answers = []
    thread = threading.Thread(target=lambda: answers.append(httpx.post(live.url + CHAT, json=body, timeout=20)))
    thread.start()
    assert inside.wait(10)
    began = time.monotonic()
    assert httpx.get(live.url + "/health", timeout=5).status_code == 200
    assert time.monotonic() - began < 4
    assert not answers
    go_on.set()
    thread.join(20)
    assert answers[0].status_code == 200


def test_good_ids_are_taken_as_they_are():
    ids = list(range(1000))
    assert CompletionRequest(prompt=ids).prompts == [ids]
    assert CompletionRequest(prompt=[ids, [1.0]]).prompts == [ids, [1]]
    assert CompletionRequest(prompt=[1.0, 2]).prompts == [[1, 2]]


async def test_compressed_bodies(http, engine):
    body = json.dumps({"messages": HI}).encode()
    answer = await http.post(CHAT, content=body, headers={**JSON, "Content-Encoding": "gzip"})
    assert answer.status_code == 415
    assert answer.json()["error"]["code"] == "unsupported_content_encoding"
    assert "Content-Encoding" in answer.json()["error"]["message"]
    assert (await http.post(CHAT, content=body, headers={**JSON, "Content-Encoding": "identity"})).status_code == 200


async def test_a_long_path_is_cut(http):
    answer = await http.get("/" + "x" * 60_000)
    assert answer.status_code == 404
    assert len(answer.text) < 400
