"""Streamed answers, event by event, and what the `openai` client makes of both kinds over a real socket."""

import json
import threading

import httpx
import openai
import pytest

from ddtree.errors import InvalidOption

HI = [{"role": "user", "content": "Hi"}]


def events(answer: httpx.Response) -> list[dict]:
    """The JSON of each event; checks the frame."""
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    *frames, done, end = answer.text.split("\n\n")
    assert done == "data: [DONE]"
    assert end == ""
    assert all(frame.startswith("data: {") and "\n" not in frame for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


@pytest.mark.anyio
@pytest.mark.parametrize("usage", [False, True])
async def test_the_events_of_a_stream(chat, usage):
    options = {"stream_options": {"include_usage": True}} if usage else {}
    bodies = events(await chat(stream=True, **options))
    assert len({(body["id"], body["created"], body["model"], body["object"]) for body in bodies}) == 1
    assert bodies[0]["id"].startswith("chatcmpl-")
    assert bodies[0]["object"] == "chat.completion.chunk"
    if usage:
        last = bodies.pop()
        prompt = len("<user>Hi")
        assert last["choices"] == []
        assert last["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": 6,
            "total_tokens": prompt + 6,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }
        assert all(body["usage"] is None for body in bodies)
    else:
        assert all("usage" not in body for body in bodies)
    choices = [body["choices"][0] for body in bodies]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        *({"content": text} for text in ["Hel", "lo", ", wör", "ld 🌍", "!"]),
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None] * 6 + ["stop"]
    assert all(choice["index"] == 0 and choice["logprobs"] is None for choice in choices)
    assert bodies[-1]["ddtree"]["mode"] == "tree"
    assert bodies[-1]["ddtree"]["acceptance_length"] == 2.25
    assert all("ddtree" not in body for body in bodies[:-1])


@pytest.mark.anyio
async def test_headers_against_buffering(chat):
    headers = (await chat(stream=True)).headers
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("error", "code"), [(RuntimeError("x"), "engine_error"), (InvalidOption("no", code="odd"), "odd")]
)
async def test_an_error_after_the_first_chunk_is_an_event(chat, engine, error, code):
    engine.error, engine.error_at = error, 2
    *chunks, last = events(await chat(stream=True))
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "Hel", "lo"]
    assert set(last) == {"error"}
    assert last["error"]["code"] == code
    assert (await chat()).status_code == 200


def test_openai_client_whole(live):
    answer = live.openai().chat.completions.create(model="scripted", messages=HI, temperature=0, seed=5)
    assert answer.choices[0].message.content == "Hello, wörld 🌍!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.ddtree["mode"] == "tree"


@pytest.mark.parametrize("limit", [None, 1, 2, 3, 5, 6, 50])
def test_streamed_equals_not_streamed(live, limit):
    create = live.openai().chat.completions.create
    whole = create(model="scripted", messages=HI, max_tokens=limit)
    chunks = list(
        create(model="scripted", messages=HI, max_tokens=limit, stream=True, stream_options={"include_usage": True})
    )
    told = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in told) == whole.choices[0].message.content
    assert told[0].delta.role == "assistant"
    assert told[-1].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage
    assert not chunks[-1].choices


def test_the_client_may_send_its_messages_back(live):
    client = live.openai()
    said = client.chat.completions.create(model="scripted", messages=HI).choices[0].message
    client.chat.completions.create(model="scripted", messages=[*HI, said, *HI])
    client.chat.completions.create(model="scripted", messages=[*HI, said.model_dump(), *HI])


@pytest.mark.parametrize("stream", [False, True])
def test_errors_reach_the_client_as_its_own(live, stream):
    create = live.openai().chat.completions.create
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="scripted", messages=HI, store=True, stream=stream)
    assert caught.value.param == "store"
    assert caught.value.code == "unsupported_parameter"
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="scripted", messages=[{"role": "user", "content": "x" * 999}], stream=stream)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt-4o", messages=HI, stream=stream)
    assert missing.value.code == "model_not_found"


def test_an_engine_failure_reaches_the_client(live, engine):
    create = live.openai().chat.completions.create
    engine.error = RuntimeError("x")
    with pytest.raises(openai.InternalServerError):
        create(model="scripted", messages=HI)
    engine.error, engine.error_at = RuntimeError("x"), 1
    with pytest.raises(openai.APIError, match="the engine failed"):
        list(create(model="scripted", messages=HI, stream=True))
    assert create(model="scripted", messages=HI).choices[0].message.content


def test_chunks_come_as_they_are_made(live, engine):
    """Each piece must arrive before the engine is let into the next round."""
    engine.hold = threading.Semaphore(0)
    engine.hold.wait = lambda timeout: engine.hold.acquire(timeout=timeout)
    engine.hold.set = lambda: engine.hold.release(100)
    engine.hold.release()
    stream = iter(live.openai().chat.completions.create(model="scripted", messages=HI, stream=True))
    assert next(stream).choices[0].delta.role == "assistant"
    assert next(stream).choices[0].delta.content == "Hel"
    engine.hold.release()
    assert next(stream).choices[0].delta.content == "lo"
    engine.hold.release(2)  # the empty piece brings no chunk
    assert next(stream).choices[0].delta.content == ", wör"


def test_the_openai_client_lists_the_model(live):
    client = live.openai()
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").max_model_len == 200
