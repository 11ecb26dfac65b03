"""The `openai` client over a real socket: whole answers, streams with every chunk checked, errors as its own."""

import threading

import httpx
import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion import Completion

from ddtree.server.options import ServerOptions

HI = [{"role": "user", "content": "Hi"}]
PIECES = [("Hé", [b"H", b"\xc3", b"\xa9"]), "", ("llo", [b"l", b"lo"]), "!"]
ASK = {"model": "scripted", "messages": HI}


@pytest.fixture
def client(live):
    with live.openai() as client:
        yield client


def chunks(stream) -> list:
    """All chunks of a stream. The client reads loosely, so that each is held against its own types here."""
    found = list(stream)
    for chunk in found:
        told = chunk.model_dump()
        if isinstance(
            chunk, Completion
        ):  # the client has no type of its own for these chunks, whose reason may be null
            for choice in told["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"
        type(chunk).model_validate(told, strict=True)
    return found


OPTIONS = {
    "n": 3,
    "max_tokens": 50,
    "temperature": 0.5,
    "top_p": 0.9,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {"5": 1},
    "seed": 3,
    "stop": ["zz"],
    "logprobs": True,
    "top_logprobs": 2,
    "user": "me",
    "extra_body": {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 1,
        "stop_token_ids": [3],
        "ignore_eos": True,
        "return_token_ids": True,
        "speculative": {"mode": "linear", "metrics": True},
    },
}


def test_a_chat_whole_and_streamed(client, engine):
    engine.pieces, engine.cached_tokens = PIECES, 1
    whole = client.chat.completions.create(**ASK, **OPTIONS)
    ChatCompletion.model_validate(whole.model_dump(), strict=True)
    assert [choice.message.content for choice in whole.choices] == ["Héllo!"] * 3
    assert whole.usage.prompt_tokens_details.cached_tokens == 1
    assert whole.usage.completion_tokens == 21
    assert whole.choices[0].ddtree["mode"] == "linear"
    assert whole.metrics["speculative_decoding"]["num_spec_steps"] == 9

    stream = client.chat.completions.create(**ASK, **OPTIONS, stream=True, stream_options={"include_usage": True})
    told = chunks(stream)
    assert all(isinstance(chunk, ChatCompletionChunk) for chunk in told)
    assert told[-1].choices == []
    assert told[-1].usage == whole.usage
    assert told[-1].metrics == whole.metrics
    for choice in whole.choices:
        mine = [one for chunk in told for one in chunk.choices if one.index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(one.delta.content or "" for one in mine) == choice.message.content
        logprobs = [entry for one in mine if one.logprobs for entry in one.logprobs.content]
        assert logprobs == choice.logprobs.content
        assert bytes(value for entry in logprobs for value in entry.bytes).decode() == choice.message.content
        assert [token for one in mine for token in getattr(one, "token_ids", None) or []] == choice.token_ids
        assert [one.finish_reason for one in mine if one.finish_reason] == [choice.finish_reason]


def test_the_streaming_helper(client, engine):
    """It adds the chunks up by its own rules."""
    engine.pieces = PIECES
    with client.chat.completions.stream(**ASK, logprobs=True) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.done"} <= kinds
    assert final.choices[0].message.content == "Héllo!"
    assert len(final.choices[0].logprobs.content) == 7


@pytest.mark.parametrize("prompt", ["Hi", ["Hi", "Ho"], [72, 105], [[72], [105]]])
def test_completions_whole_and_streamed(client, engine, prompt):
    engine.pieces = PIECES
    ask = {"model": "scripted", "prompt": prompt, "n": 2, "logprobs": 2, "max_tokens": 50}
    whole = client.completions.create(**ask)
    Completion.model_validate(whole.model_dump(), strict=True)
    assert {choice.text for choice in whole.choices} == {"Héllo!"}
    told = chunks(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert told[-1].usage == whole.usage
    for choice in whole.choices:
        mine = [one for chunk in told for one in chunk.choices if one.index == choice.index]
        assert "".join(one.text for one in mine) == choice.text
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            values = [value for one in mine if one.logprobs for value in getattr(one.logprobs, name)]
            assert values == getattr(choice.logprobs, name)
        assert mine[-1].finish_reason == choice.finish_reason


def test_models(client):
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id) == model
    assert model.max_model_len == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"speculative": {"mode": "x"}}}, "speculative.mode"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
        ({"store": True}, "store"),
        ({"top_logprobs": 5}, "top_logprobs"),
    ],
)
def test_refusals_are_bad_requests(client, stream, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASK, stream=stream, **fields)
    assert caught.value.param == param
    assert param in caught.value.message


def test_a_full_queue_is_a_rate_limit(client, live, engine):
    live.server._worker._max_queue, engine.hold = 0, threading.Event()
    body = {"messages": HI, "n": 8}
    running = threading.Thread(target=httpx.post, args=[f"{live.url}/v1/chat/completions"], kwargs={"json": body})
    running.start()
    assert engine.started.wait(10)
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(**ASK)
    engine.hold.set()
    running.join()
    assert caught.value.code == "queue_full"
    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_an_error_in_mid_stream_raises(client, engine):
    engine.error, engine.error_at = RuntimeError("x"), 2
    seen = []
    with pytest.raises(openai.APIError, match="the engine failed"):
        seen.extend(client.chat.completions.create(**ASK, n=2, stream=True))
    assert client.chat.completions.create(**ASK).choices[0].message.content


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = ["Wait. <tool", '_call>{"name": "weather", "argu', 'ments": {"city": "Kö', 'ln"}}</tool_call>']


def test_tools(client, engine):
    engine.pieces = CALL
    ask = {**ASK, "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True}
    whole = client.chat.completions.create(**ask)
    ChatCompletion.model_validate(whole.model_dump(), strict=True)
    (call,) = whole.choices[0].message.tool_calls
    assert whole.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "weather"
    assert call.function.arguments == '{"city": "Köln"}'
    told = [one.delta.tool_calls[0] for one in _choices(client, ask) if one.delta.tool_calls]
    assert told[0].id
    assert told[0].function.name == "weather"
    assert "".join(one.function.arguments for one in told) == call.function.arguments
    with client.chat.completions.stream(**ask) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    assert final.message.content == whole.choices[0].message.content
    back = [*HI, whole.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "Rain"}]
    client.chat.completions.create(**{**ask, "messages": back})
    assert engine.text.chats[-1]["messages"][1]["tool_calls"][0]["id"] == call.id


def _choices(client, ask) -> list:
    return [one for chunk in chunks(client.chat.completions.create(**ask, stream=True)) for one in chunk.choices]


def test_parsed_answers(client, engine):
    """The client turns a pydantic model into a `response_format`, and the answer into the model."""

    class Answer(pydantic.BaseModel):
        city: str
        degrees: int

    engine.pieces = ['{"city": "Kö', 'ln", "degrees": 3}']
    parsed = client.chat.completions.parse(**ASK, response_format=Answer).choices[0].message.parsed
    assert parsed == Answer(city="Köln", degrees=3)
    assert '"degrees"' in engine.params[-1].grammar.source


class TestThinking:
    @pytest.fixture
    def options(self) -> ServerOptions:
        return ServerOptions(("scripted",), reasoning_parser="qwen3")

    def test_thinking_has_a_field_of_its_own(self, client, engine):
        engine.pieces = ["<thi", "nk>Hm", "m.</th", "ink>Yes", "."]
        whole = client.chat.completions.create(**ASK)
        assert whole.choices[0].message.reasoning_content == "Hmm."
        assert whole.choices[0].message.content == "Yes."
        assert whole.usage.completion_tokens_details.reasoning_tokens == 4
        deltas = [one.delta for one in _choices(client, ASK)]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hmm."
        assert "".join(delta.content or "" for delta in deltas) == "Yes."
        client.chat.completions.create(**{**ASK, "messages": [*HI, whole.choices[0].message, *HI]})
        assert engine.text.chats[-1]["messages"][1]["reasoning_content"] == "Hmm."
