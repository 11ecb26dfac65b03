"""Request bodies: what is read from them, and that nothing is accepted and ignored."""

import json
from dataclasses import replace

import httpx
import pytest

from ddtree.config import SamplingParams, Speculation
from ddtree.server import create_app
from ddtree.server.options import ServerOptions
from ddtree.server.schemas import NEUTRAL_CHAT, NEUTRAL_COMPLETION, NEUTRAL_MESSAGE, ChatRequest, CompletionRequest

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


async def complete(http, engine, **fields) -> SamplingParams:
    answer = await http.post("/v1/completions", json={"prompt": "Hi", **fields})
    assert answer.status_code == 200, answer.text
    return engine.params[-1]


async def test_the_defaults(chat, http, engine):
    assert await asked(chat, engine) == SamplingParams(temperature=1.0)
    assert await complete(http, engine) == SamplingParams(temperature=1.0, max_tokens=16)
    assert engine.speculations == [engine.speculation] * 2


async def test_the_server_s_seed_is_for_requests_without_one(engine):
    app = create_app(engine, ServerOptions(("scripted",), default_seed=7))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for seed in (None, 0, 5):
            await client.post(URL, json={"messages": user(), "seed": seed})
    assert [params.seed for params in engine.params] == [7, 0, 5]
    await app.state.worker.stop(0)


EVERYTHING = {
    "max_tokens": 5,
    "min_tokens": 2,
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "presence_penalty": 0.5,
    "frequency_penalty": -2,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": -100, "70": 1.5},
    "seed": -7,
    "stop": ["a", "is"],
    "stop_token_ids": [3, 4],
    "ignore_eos": True,
}
ARRIVED = SamplingParams(
    **{**EVERYTHING, "stop": ("a", "is"), "stop_token_ids": (3, 4), "logit_bias": ((5, -100.0), (70, 1.5))}
)


async def test_everything_arrives(chat, http, engine):
    assert await asked(chat, engine, **EVERYTHING, logprobs=True, top_logprobs=3) == replace(ARRIVED, logprobs=3)
    assert await asked(chat, engine, **EVERYTHING, logprobs=True) == replace(ARRIVED, logprobs=0)
    assert await asked(chat, engine, **EVERYTHING, logprobs=False, top_logprobs=0) == ARRIVED
    assert await complete(http, engine, **EVERYTHING, logprobs=5) == replace(ARRIVED, logprobs=5)
    assert await complete(http, engine, **EVERYTHING) == ARRIVED


async def test_whole_numbers_may_have_a_point(chat, engine):
    """JSON knows one kind of number."""
    params = await asked(chat, engine, max_tokens=5.0, n=1.0, seed=7.0, stop_token_ids=[3.0])
    assert (params.max_tokens, params.seed, params.stop_token_ids) == (5, 7, (3,))
    assert all(isinstance(value, int) for value in (params.max_tokens, params.seed, *params.stop_token_ids))


@pytest.mark.parametrize("top_k", [-1, 0])
async def test_no_top_k(chat, engine, top_k):
    assert (await asked(chat, engine, top_k=top_k)).top_k == 0


async def test_speculation_of_one_request(chat, http, engine):
    engine.speculation = Speculation("tree", 7, 4, 2)
    await asked(chat, engine, speculative={"mode": "ar"})
    await asked(chat, engine, speculative={"tree_budget": 15, "tree_top_k": 3, "tree_spine": 0})
    await complete(http, engine, speculative={"mode": "shadow-linear", "tree_spine": 1})
    await asked(chat, engine, speculative={"mode": "linear", "tree_context": "mix"})
    await asked(chat, engine, speculative={})
    await asked(chat, engine, speculative=None)
    assert engine.speculations == [
        Speculation("ar", 7, 4, 2),
        Speculation("tree", 15, 3, 0),
        Speculation("shadow-linear", 7, 4, 1),
        Speculation("linear", 7, 4, 2, "mix"),
        engine.speculation,
        engine.speculation,
    ]


@pytest.mark.parametrize(
    ("speculative", "param"),
    [
        ({"mode": "eagle"}, "speculative.mode"), ({"mode": 5}, "speculative.mode"),
        ({"tree_budget": 0}, "speculative.tree_budget"), ({"tree_budget": 9999}, "speculative.tree_budget"),
        ({"tree_top_k": "4"}, "speculative.tree_top_k"), ({"tree_spine": -1}, "speculative.tree_spine"),
        ({"tree_context": "some"}, "speculative.tree_context"), ({"tree_context": 5}, "speculative.tree_context"),
        ({"num_speculative_tokens": 3}, "speculative.num_speculative_tokens"), ("tree", "speculative"),
    ],
)  # fmt: skip
async def test_speculation_that_cannot_be(chat, engine, speculative, param):
    error = await refused(chat, engine, speculative=speculative)
    assert error["param"] == param
    assert param in error["message"]


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


async def test_every_known_field_may_be_null(chat, http, engine):
    names = [name for name in [*ChatRequest.model_fields, *NEUTRAL_CHAT] if name != "messages"]
    assert await asked(chat, engine, **dict.fromkeys(names)) == SamplingParams(temperature=1.0)
    names = [name for name in [*CompletionRequest.model_fields, *NEUTRAL_COMPLETION] if name != "prompt"]
    assert await complete(http, engine, **dict.fromkeys(names)) == SamplingParams(temperature=1.0, max_tokens=16)


@pytest.mark.parametrize(("name", "value"), [(name, one) for name, values in NEUTRAL_CHAT.items() for one in values])
async def test_fields_that_ask_for_nothing_are_accepted(chat, engine, name, value):
    await asked(chat, engine, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [(name, one) for name, values in NEUTRAL_COMPLETION.items() for one in values]
)
async def test_the_same_of_completions(http, engine, name, value):
    await complete(http, engine, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 2), ("prompt_logprobs", 1), ("verbosity", "low"), ("store", True), ("documents", [{"text": "a"}]),
        ("service_tier", "flex"), ("modalities", ["text", "audio"]), ("functions", [{"name": "f"}]), ("echo", True),
        ("use_beam_search", True), ("skip_special_tokens", False), ("include_stop_str_in_output", True),
        ("chat_template", "{{ x }}"), ("guided_json", {}), ("priority", 1),
    ],
)  # fmt: skip
async def test_features_that_are_not_here_are_refused_by_name(chat, engine, name, value):
    error = await refused(chat, engine, **{name: value})
    assert error["param"] == name
    assert error["code"] == "unsupported_parameter"
    assert f"`{name}`" in error["message"]
    assert "leave it out" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "b"}, "suffix"), ({"best_of": 3}, "best_of"), ({"best_of": 2, "n": 3}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"), ({"logprobs": 6}, "logprobs"), ({"logprobs": True}, "logprobs"),
        ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt[0]"), ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"), ({"prompt": ["a", 5]}, "prompt[1]"), ({"prompt": {}}, "prompt"),
        ({"prompt": None}, "prompt"), ({"prompt": [True]}, "prompt[0]"), ({"prompt": [[1], "a"]}, "prompt[1]"),
        ({"prompt": ["a"] * 129}, "prompt"), ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"messages": []}, "messages"), ({"top_logprobs": 2}, "top_logprobs"), ({"tools": []}, "tools"),
    ],
)  # fmt: skip
async def test_completions_that_are_refused(http, engine, fields, param):
    answer = await http.post("/v1/completions", json={"prompt": "Hi", **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert param in answer.json()["error"]["message"]
    assert not engine.prompts


async def test_prompts_in_every_form(http, engine):
    for prompt in ("Hi", ["Hi", ""], [72, 105], [[72], [105, 33]]):
        await complete(http, engine, prompt=prompt)
    assert engine.prompts == ["Hi", "Hi", "", "Hi", "H", "i!"]


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
        ("model", 5, "model"), ("user", 5, "user"), ("n", 0, "n"), ("n", 129, "n"), ("n", True, "n"), ("n", "1", "n"),
        ("top_p", 0, "top_p"), ("top_p", 1.1, "top_p"), ("top_k", -2, "top_k"), ("top_k", 1.5, "top_k"),
        ("min_p", 2, "min_p"), ("presence_penalty", 2.1, "presence_penalty"), ("logprobs", 1, "logprobs"),
        ("frequency_penalty", -2.1, "frequency_penalty"), ("repetition_penalty", 0, "repetition_penalty"),
        ("logit_bias", {"a": 1}, "logit_bias"), ("logit_bias", {"-1": 1}, "logit_bias"),
        ("logit_bias", [], "logit_bias"),
        ("logit_bias", {"1": 101}, "logit_bias.1"), ("logit_bias", {"1": "x"}, "logit_bias.1"),
        ("logit_bias", {"5": 1, "05": 2}, "logit_bias"), ("logit_bias", {"9" * 20: 2}, "logit_bias"),
        ("top_logprobs", 3, "top_logprobs"), ("top_logprobs", 21, "top_logprobs"), ("min_tokens", -1, "min_tokens"),
        ("stop_token_ids", [-1], "stop_token_ids[0]"), ("stop_token_ids", 5, "stop_token_ids"),
        ("return_token_ids", 1, "return_token_ids"),
        ("chat_template_kwargs", [], "chat_template_kwargs"),
        ("tool_choice", "required", "tool_choice"), ("tool_choice", "all", "tool_choice"),
        ("parallel_tool_calls", True, "parallel_tool_calls"), ("tools", [{"type": "function"}], "tools[0].function"),
        ("tools", [{"type": "web_search"}], "tools[0].type"), ("tools", {}, "tools"),
        ("response_format", {"type": "xml"}, "response_format.type"), ("response_format", "json", "response_format"),
        ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
        ("response_format", {"type": "text", "json_schema": {"name": "a"}}, "response_format.json_schema"),
        ("continue_final_message", True, "continue_final_message"),
    ],
)  # fmt: skip
async def test_wrong_values_are_named(chat, engine, name, value, param):
    error = await refused(chat, engine, **{name: value})
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize(
    ("stream_options", "param"),
    [
        ({"include_usage": "yes"}, "stream_options.include_usage"),
        ({"continuous_usage_stats": True}, "stream_options.continuous_usage_stats"),
        ({"include_usage": False, "continuous_usage_stats": True}, "stream_options.continuous_usage_stats"),
        ({"include_obfuscation": True}, "stream_options.include_obfuscation"),
        ({"include_usge": True}, "stream_options.include_usge"),
        (True, "stream_options"),
    ],
)
async def test_stream_options(chat, engine, stream_options, param):
    assert (await refused(chat, engine, stream=True, stream_options=stream_options))["param"] == param


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
        (user(reasoning_content="x"), "messages[0].reasoning_content"), (user(tool_calls=[]), "messages[0].tool_calls"),
        (user(tool_call_id="x"), "messages[0].tool_call_id"), ([{"role": "assistant"}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        (user(extra=1), "messages[0].extra"), (user() + user(content=5), "messages[1].content"),
    ],
)  # fmt: skip
async def test_messages_that_cannot_be_read(chat, engine, messages, param):
    assert (await refused(chat, engine, messages=messages))["param"] == param


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


async def test_tool_turns_reach_the_template(chat, engine):
    said = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm."}
    result = {"role": "tool", "content": "5", "tool_call_id": "c1", "name": "f"}
    await asked(chat, engine, messages=[*user(), said, result])
    assert engine.text.chats[-1]["messages"][1:] == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "5", "name": "f", "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize("arguments", ["", "{", "[]", "5", '{"a": NaN}', '{"a": "\\ud800"}', "[" * 5000])
async def test_arguments_of_earlier_calls(chat, engine, arguments):
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    messages = [*user(), {"role": "assistant", "tool_calls": [call]}]
    if not arguments:  # a call without arguments
        await asked(chat, engine, messages=messages)
    else:
        error = await refused(chat, engine, messages=messages)
        assert error["param"] == "messages[1].tool_calls[0].function.arguments"


async def test_the_template_gets_its_arguments(chat, engine):
    await asked(chat, engine, chat_template_kwargs={"enable_thinking": False})
    await asked(chat, engine, add_generation_prompt=False)
    messages = [*user(), {"role": "assistant", "content": "Once"}]
    await asked(chat, engine, messages=messages, continue_final_message=True, add_generation_prompt=False)
    await asked(chat, engine, messages=messages, continue_final_message=True)
    given = [{name: value for name, value in call.items() if name != "messages"} for call in engine.text.chats]
    on = {"add_generation_prompt": False, "continue_final_message": True}
    assert given == [{"template_kwargs": {"enable_thinking": False}}, {"add_generation_prompt": False}, on, on]
    error = await refused_late(chat, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert error["param"] == "continue_final_message"


async def refused_late(chat, **fields) -> dict:
    answer = await chat(**fields)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


async def test_missing_messages(http):
    answer = await http.post(URL, json={"model": "scripted"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "missing_required_parameter"
    assert answer.json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ({"role": "function", "content": "5", "name": "f"}, "function"),
        ({"role": "assistant", "content": None, "function_call": {"name": "f"}}, "function_call"),
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
        b'{"messages": [{"role": "user", "content": "Hi"}], "best_of": NaN}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"a": [NaN]}}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"\\ud800": 1}}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "logit_bias": {"5": NaN}}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "top_p": NaN}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "stop": "\\udfff"}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "\\udfff": 5}',
    ],
    ids=range(22),
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
    answer = await http.post(URL, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model"


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (b'{"a": "\xff"}', "invalid_json", "UTF-8"),
        (b"[" * 100_000, "invalid_json", "nested too deeply"),
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
        ("store", True, "`store` = true is not supported by this server: leave it out or send false"),
        ("audio", {"a": None}, '`audio` = {"a": null} is not supported by this server: leave it out'),
        ("stream", "yes", '`stream` should be a valid boolean, not "yes"'),
        ("messages", [{"role": "user", "content": []}], "`messages[0].content` must hold at least one content part"),
    ],
)  # fmt: skip
async def test_messages_read_plainly(chat, engine, name, value, message):
    assert (await refused(chat, engine, **{name: value}))["message"] == message
