"""Chats with thinking and tools: what goes to which field, whole and streamed, wherever chunks are cut."""

import itertools
import json
import random

import httpx
import pytest

from ddtree.config import Grammar
from ddtree.server.options import ServerOptions
from ddtree.server.schemas.responses import ChatCompletion

pytestmark = pytest.mark.anyio
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Today's weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
CALLS = (
    'Let me see. <tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)


@pytest.fixture
def options() -> ServerOptions:
    return ServerOptions(("scripted",), reasoning_parser="qwen3")


def events(answer: httpx.Response) -> list[dict]:
    assert answer.status_code == 200, answer.text
    *frames, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def message(bodies: list[dict]) -> dict:
    """The message that a stream's deltas add up to; numbers of calls must be in order, their ids sent once."""
    whole: dict = {"role": None, "content": None}
    calls: list[dict] = []
    for choice in (choice for body in bodies for choice in body["choices"]):
        delta = choice["delta"]
        for name in ("role", "content", "reasoning_content"):
            if delta.get(name) is not None:
                whole[name] = (whole.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", []):
            if call["index"] == len(calls):
                assert call["type"] == "function"
                assert call["id"]
                calls.append({"id": call["id"], "type": "function", "function": {"name": "", "arguments": ""}})
            else:
                assert "id" not in call
            for name, piece in call["function"].items():
                calls[call["index"]]["function"][name] += piece
    if calls:
        whole["tool_calls"] = calls
        whole["content"] = whole["content"] or None
    return whole


def reason(bodies: list[dict]) -> str:
    (found,) = [choice["finish_reason"] for body in bodies for choice in body["choices"] if choice["finish_reason"]]
    return found


def anonymous(told: dict) -> dict:
    """A message without the ids of its calls, which are new each time, and without thinking that there is not."""
    told = {name: value for name, value in told.items() if name != "reasoning_content" or value}
    calls = [{**call, "id": "x"} for call in told.get("tool_calls") or []]
    return {**told, "tool_calls": calls} if calls else told


def cut(text: str, places: list[int]) -> list[str]:
    borders = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[low:high] for low, high in itertools.pairwise(borders) if low < high] or [""]


THOUGHT = "<think>\nHm, 5 < 6 </thinking>?\n</think>\n\n"


def cuts(text: str) -> list[list[str]]:
    """The text in one piece, in single characters, and in twelve other ways."""
    chance = random.Random(0)
    return [[text], list(text), *(cut(text, [chance.randrange(999) for _ in range(many)]) for many in range(1, 13))]


@pytest.mark.parametrize("thought", ["", THOUGHT])
@pytest.mark.parametrize("answer", ["Good <b>morning</b>!", CALLS])
async def test_every_cut_gives_the_same_message(chat, engine, thought, answer):
    found = []
    for pieces in cuts(thought + answer):
        engine.pieces = pieces
        whole = (await chat(tools=[WEATHER, TIME])).json()
        bodies = events(await chat(tools=[WEATHER, TIME], stream=True, stream_options={"include_usage": True}))
        ChatCompletion.model_validate(whole)  # what the OpenAPI document tells
        told = whole["choices"][0]
        assert anonymous(message(bodies)) == anonymous(told["message"])
        assert reason(bodies) == told["finish_reason"]
        assert bodies[-1]["usage"]["completion_tokens"] == len(pieces)
        assert bodies[-1]["usage"] == whole["usage"]
        found.append((anonymous(told["message"]), told["finish_reason"]))
    assert all(one == found[0] for one in found)
    said, why = found[0]
    assert bool(thought) == ("reasoning_content" in said)
    assert "think>" not in (said["content"] or "")
    assert why == ("tool_calls" if answer is CALLS else "stop")
    if answer is CALLS:
        called = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in said["tool_calls"]]
        assert called == [("weather", {"city": "Köln"}), ("time", {})]
        assert said["content"].strip() == "Let me see."


async def test_reasoning_tokens(chat, engine):
    """Characters are tokens here: those up to the end of the marker count."""
    for pieces, thinking in ((list(THOUGHT + "Yes."), len(THOUGHT.rstrip())), (list("Yes."), 0), (["<think>", "a"], 2)):
        engine.pieces = pieces
        usage = (await chat()).json()["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": thinking}
        assert usage["completion_tokens"] == len(pieces)


@pytest.mark.parametrize("limit", range(2, 12))
async def test_the_limit_inside_the_thinking(chat, engine, limit):
    engine.pieces = ["<th", "ink>", "a", "b", "c", "</thi", "nk>", "d", "e", "f", "g", "h"]
    whole = (await chat(max_tokens=limit)).json()
    usage = whole["usage"]
    assert usage["completion_tokens"] == limit
    assert usage["completion_tokens_details"]["reasoning_tokens"] == min(limit, 7)
    assert whole["choices"][0]["finish_reason"] == "length"
    said = whole["choices"][0]["message"]
    assert (said["content"] or "") == "defgh"[: max(limit - 7, 0)]
    bodies = events(await chat(max_tokens=limit, stream=True, stream_options={"include_usage": True}))
    assert bodies[-1]["usage"] == usage
    assert (message(bodies).get("reasoning_content") or "") == (said["reasoning_content"] or "")


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_that_the_prompt_opened(chat, engine, stream):
    """By the template, or in a message that is gone on with."""
    engine.pieces = ["so f", "ar</th", "ink>\n\nYes"]
    user = {"role": "user", "content": "Hi"}
    for fields in (
        {"content": "Hi<think>\n"},
        {"messages": [user, {"role": "assistant", "content": "<think>Hm, "}], "continue_final_message": True},
    ):
        answer = await chat(**fields, stream=stream)
        said = message(events(answer)) if stream else answer.json()["choices"][0]["message"]
        assert said["reasoning_content"] == "so far"
        assert said["content"].strip() == "Yes"


async def test_each_choice_has_its_own_thinking_and_calls(chat, engine):
    engine.pieces = cut(THOUGHT + CALLS, [7, 30, 60, 90, 120])
    whole = (await chat(n=2, tools=[WEATHER])).json()
    one, two = (choice["message"] for choice in whole["choices"])
    assert anonymous(one) == anonymous(two)
    ids = [call["id"] for said in (one, two) for call in said["tool_calls"]]
    assert len(set(ids)) == len(ids)
    reasoning = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < reasoning < whole["usage"]["completion_tokens"]


async def test_a_turn_with_tools_there_and_back(chat, engine):
    """A client sends back the message that it got, with the result."""
    engine.pieces = [THOUGHT, CALLS]
    said = (await chat(tools=[WEATHER, TIME])).json()["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "5"} for call in said["tool_calls"]]
    engine.pieces = ["Rain."]
    again = await chat(messages=[{"role": "user", "content": "Hi"}, said, *results], tools=[WEATHER, TIME])
    assert again.json()["choices"][0]["message"]["content"] == "Rain."
    sent = engine.text.chats[-1]
    assert [one["role"] for one in sent["messages"]] == ["user", "assistant", "tool", "tool"]
    assert sent["messages"][1]["reasoning_content"] == said["reasoning_content"]
    assert sent["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"city": "Köln"}
    assert [tool["function"]["name"] for tool in sent["tools"]] == ["weather", "time"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}])
async def test_forced_calls_have_a_grammar(chat, engine, choice):
    assert (await chat(tools=[WEATHER, TIME], tool_choice=choice)).status_code == 200
    assert engine.params[-1].grammar.kind == "lark"
    for free in ("auto", None, "none"):
        assert (await chat(tools=[WEATHER, TIME], tool_choice=free)).status_code == 200
        assert engine.params[-1].grammar is None
    assert not engine.text.chats[-1].get("tools")  # none: the model is not told of them


async def test_calls_are_text_where_no_tools_were_sent(chat, engine):
    engine.pieces = [CALLS]
    for fields in ({}, {"tools": [TIME], "tool_choice": "none"}):
        answer = (await chat(**fields)).json()["choices"][0]
        assert answer["message"]["content"] == CALLS
        assert answer["finish_reason"] == "stop"


async def test_response_formats(chat, engine):
    await chat(response_format={"type": "text"})
    assert engine.params[-1].grammar is None
    await chat(response_format={"type": "json_object"})
    assert isinstance(engine.params[-1].grammar, Grammar)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}})
    assert '"integer"' in engine.params[-1].grammar.source


async def test_fields_that_contradict_each_other(chat, engine):
    for fields, param in (
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "time"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ):
        answer = await chat(**fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
    assert not engine.prompts
