"""Request bodies: what is read from them, and that nothing is accepted and ignored."""

import json

import httpx
import pytest

from ddtree.config import SamplingParams
from ddtree.server import create_app
from ddtree.server.schemas import NEUTRAL, NEUTRAL_MESSAGE, ChatRequest

pytestmark = pytest.mark.anyio
URL = "/v1/chat/completions"


async def asked(chat, engine, **fields) -> SamplingParams:
    answer = await chat(**fields)
    assert answer.status_code == 200, answer.text
    return engine.params[-1]


async def refused(chat, engine, **fields) -> dict:
    answer = await chat(**fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(answer.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert not engine.prompts
    return error


async def test_the_defaults(chat, engine):
    assert await asked(chat, engine) == SamplingParams(None, 1.0, None, (), False)


async def test_the_server_s_seed_is_for_requests_without_one(engine):
    app = create_app(engine, "scripted", default_seed=7)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for seed in (None, 0, 5):
            await client.post(URL, json={"messages": user(), "seed": seed})
    assert [params.seed for params in engine.params] == [7, 0, 5]
    await app.state.worker.stop(0)


async def test_everything_arrives(chat, engine):
    fields = {"max_tokens": 5, "temperature": 0.8, "seed": -7, "stop": ["a", "is"], "ignore_eos": True}
    assert await asked(chat, engine, **fields) == SamplingParams(5, 0.8, -7, ("a", "is"), True)


@pytest.mark.parametrize("temperature", [0, 0.0, 2, 1])
async def test_temperatures(chat, engine, temperature):
    assert (await asked(chat, engine, temperature=temperature)).temperature == temperature


@pytest.mark.parametrize(("stop", "stops"), [(None, ()), ([], ()), ("x", ("x",)), (list("abcd"), tuple("abcd"))])
async def test_stops(chat, engine, stop, stops):
    assert (await asked(chat, engine, stop=stop)).stop == stops


async def test_both_names_of_the_limit(chat, engine):
    assert (await asked(chat, engine, max_completion_tokens=3)).max_tokens == 3
    assert (await asked(chat, engine, max_completion_tokens=4, max_tokens=4)).max_tokens == 4
    assert (await asked(chat, engine, max_completion_tokens=None, max_tokens=2)).max_tokens == 2


async def test_two_limits_that_differ(chat, engine):
    error = await refused(chat, engine, max_completion_tokens=4, max_tokens=5)
    assert error["param"] == "max_tokens"
    assert "5" in error["message"]
    assert "4" in error["message"]


async def test_every_known_field_may_be_null(chat, engine):
    names = [name for name in [*ChatRequest.model_fields, *NEUTRAL] if name != "messages"]
    assert await asked(chat, engine, **dict.fromkeys(names)) == SamplingParams(None, 1.0, None, (), False)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NEUTRAL.items() for value in values])
async def test_fields_that_ask_for_nothing_are_accepted(chat, engine, name, value):
    await asked(chat, engine, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2), ("n", 0), ("n", True), ("n", "1"), ("top_p", 0.9), ("top_k", 40), ("min_p", 0.1),
        ("presence_penalty", 0.5), ("frequency_penalty", -2), ("repetition_penalty", 1.1), ("logit_bias", {"5": 1}),
        ("logprobs", True), ("logprobs", 0), ("top_logprobs", 3), ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function"}]), ("tool_choice", "auto"), ("parallel_tool_calls", True),
        ("reasoning_effort", "low"), ("store", True), ("metadata", {"a": "b"}), ("service_tier", "flex"),
        ("modalities", ["text", "audio"]), ("chat_template_kwargs", {"enable_thinking": False}),
        ("min_tokens", 4), ("stop_token_ids", [1]), ("speculative", {"mode": "ar"}),
    ],
)  # fmt: skip
async def test_features_that_are_not_here_yet_are_refused_by_name(chat, engine, name, value):
    error = await refused(chat, engine, **{name: value})
    assert error["param"] == name
    assert error["code"] == "unsupported_parameter"
    assert f"`{name}`" in error["message"]
    assert "leave it out" in error["message"]


@pytest.mark.parametrize("value", [None, 1, {}])
async def test_unknown_fields_are_refused_by_name(chat, engine, value):
    error = await refused(chat, engine, temprature=value)
    assert error["param"] == "temprature"
    assert error["code"] == "unknown_parameter"


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("temperature", -0.1, "temperature"), ("temperature", 2.1, "temperature"), ("temperature", "1", "temperature"),
        ("temperature", True, "temperature"), ("max_tokens", 0, "max_tokens"), ("max_tokens", -1, "max_tokens"),
        ("max_tokens", 1.5, "max_tokens"), ("max_tokens", "5", "max_tokens"), ("max_tokens", True, "max_tokens"),
        ("max_completion_tokens", 0, "max_completion_tokens"), ("seed", 1.5, "seed"), ("seed", 2**63, "seed"),
        ("seed", "x", "seed"), ("stop", 5, "stop"), ("stop", ["a", 5], "stop[1]"), ("stop", list("abcde"), "stop"),
        ("stop", "", "stop"), ("stop", ["a", ""], "stop"), ("stream", "true", "stream"), ("stream", 1, "stream"),
        ("stream_options", {"include_usage": True}, "stream_options"), ("ignore_eos", "yes", "ignore_eos"),
        ("model", 5, "model"), ("user", 5, "user"),
    ],
)  # fmt: skip
async def test_wrong_values_are_named(chat, engine, name, value, param):
    error = await refused(chat, engine, **{name: value})
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"include_usage": "yes"}, "stream_options.include_usage"),
        ({"continuous_usage_stats": True}, "stream_options.continuous_usage_stats"),
        ({"include_usge": True}, "stream_options.include_usge"),
        (True, "stream_options"),
    ],
)
async def test_stream_options(chat, engine, options, param):
    assert (await refused(chat, engine, stream=True, stream_options=options))["param"] == param


def user(**fields):
    return [{"role": "user", "content": "Hi", **fields}]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"), ([], "messages"), ("Hi", "messages"), ({"role": "user", "content": "Hi"}, "messages"),
        (["Hi"], "messages[0]"), ([{"content": "Hi"}], "messages[0].role"), ([{"role": "user"}], "messages[0].content"),
        (user(role="wizard"), "messages[0].role"), (user(role=["tool"]), "messages[0].role"),
        (user(content=None), "messages[0].content"), (user(content=5), "messages[0].content"),
        (user(content=[]), "messages[0].content"), (user(content=["Hi"]), "messages[0].content[0]"),
        (user(content=[{"type": "text"}]), "messages[0].content[0].text"),
        (user(content=[{"text": "Hi"}]), "messages[0].content[0].type"),
        (user(content=[{"type": "text", "text": "a", "cache": 1}]), "messages[0].content[0].cache"),
        (user(extra=1), "messages[0].extra"), (user() + user(content=5), "messages[1].content"),
    ],
)  # fmt: skip
async def test_messages_that_cannot_be_read(chat, engine, messages, param):
    assert (await refused(chat, engine, messages=messages))["param"] == param


async def test_missing_messages(http):
    answer = await http.post(URL, json={"model": "scripted"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "missing_required_parameter"
    assert answer.json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ({"role": "tool", "content": "5", "tool_call_id": "x"}, "tool"),
        ({"role": "function", "content": "5", "name": "f"}, "function"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}, "tool_calls"),
        ({"role": "user", "content": "Hi", "name": "Ann"}, "name"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "image_url"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "input_audio"),
    ],
)
async def test_features_of_messages_are_refused_by_name(chat, engine, message, word):
    assert word in (await refused(chat, engine, messages=[message]))["message"]


async def test_what_the_template_gets(chat, engine):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    back = {"role": "assistant", "content": "", **dict.fromkeys(NEUTRAL_MESSAGE)}  # as a client sends it back
    messages = [{"role": "developer", "content": "Be kind."}, {"role": "system", "content": "S"}, back]
    await asked(chat, engine, messages=[*messages, {"role": "user", "content": parts}])
    assert engine.prompts == ["<system>Be kind.<system>S<assistant><user>one\ntwo"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"not json", b"[]", b"5", b"null", b'"text"', b"\xff\xfe", b'{"messages": [}', b"[" * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}", b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": Infinity}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "top_p": NaN}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "stop": "\\udfff"}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "\\udfff": 5}',
    ],
    ids=range(18),
)  # fmt: skip
async def test_bodies_that_are_no_request(http, engine, body):
    answer = await http.post(URL, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert not engine.prompts


async def test_a_body_of_another_kind(http):
    body = json.dumps({"messages": user()})
    answer = await http.post(URL, content=body, headers={"Content-Type": "text/plain"})
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]


async def test_long_values_are_cut_in_messages(chat, engine):
    assert len((await refused(chat, engine, seed="x" * 10_000))["message"]) < 300
    assert len((await refused(chat, engine, **{"x" * 10_000: 1}))["message"]) < 300
    assert len((await chat(model="x" * 10_000)).json()["error"]["message"]) < 300


async def test_a_model_name_that_cannot_be_sent_back(http):
    body = b'{"messages": [{"role": "user", "content": "Hi"}], "model": "\\ud800"}'
    assert (await http.post(URL, content=body, headers={"Content-Type": "application/json"})).status_code == 404


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (b'{"a": "\xff"}', "invalid_json", "UTF-8"),
        (b"[" * 200_000, "invalid_json", "nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "invalid_json", "too many digits"),
        (b'{"\\ud800": 1, "messages": []}', "unknown_parameter", "not valid Unicode"),
        (b'{"messages": [{"role": "user", "content": "", "\\ud800": 1}]}', "unknown_parameter", "`messages[0]` has"),
        (b'{"messages": []}', "invalid_value", "`messages` must hold at least one message"),
        (b'{"messages": 5}', "invalid_value", "`messages` must be a list, not 5"),
        (b'{"messages": [true]}', "invalid_value", "`messages[0]` must be a JSON object, not true"),
    ],
    ids=range(8),
)
async def test_what_is_said_of_broken_bodies(http, body, code, words):
    answer = await http.post(URL, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == code
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("stop", list("abcde"), "`stop` takes at most 4 strings, not 5"),
        ("logprobs", True, "`logprobs` = true is not supported by this server: leave it out or send false"),
        ("audio", {"a": None}, '`audio` = {"a": null} is not supported by this server: leave it out'),
        ("stream", "yes", '`stream` should be a valid boolean, not "yes"'),
        ("messages", [{"role": "user", "content": []}], "`messages[0].content` must hold at least one content part"),
    ],
)  # fmt: skip
async def test_messages_read_plainly(chat, engine, name, value, message):
    assert (await refused(chat, engine, **{name: value}))["message"] == message
