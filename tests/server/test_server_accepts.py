"""What clients of vLLM and OpenAI send beside the basics: honoured where it can be, refused by name where not."""

import json

import httpx
import pytest

from ddtree.config import Grammar, Speculation
from ddtree.errors import InvalidOption
from ddtree.server import create_app
from ddtree.server.options import ServerOptions

pytestmark = pytest.mark.anyio
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


async def ask(http, url, **fields) -> httpx.Response:
    return await http.post(url, json={**({"messages": HI} if url == CHAT else {"prompt": "Hi"}), **fields})


async def refused(http, url, **fields) -> dict:
    answer = await ask(http, url, **fields)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize("url", [CHAT, TEXT])
async def test_labels(http, engine, url):
    assert (await ask(http, url, metadata={"run": "7"}, user="x")).status_code == 200
    for wrong in ({"a": 1}, {"a": "x" * 513}, {"x" * 65: "a"}, {str(n): "a" for n in range(17)}, "a"):
        assert "metadata" in (await refused(http, url, metadata=wrong))["param"]


async def test_how_much_to_think_is_told_to_the_template(http, engine):
    assert (await ask(http, CHAT, reasoning_effort="low")).status_code == 200
    more = {"enable_thinking": True, "reasoning_effort": "high"}
    assert (await ask(http, CHAT, reasoning_effort="high", chat_template_kwargs=more)).status_code == 200
    assert [chat["template_kwargs"] for chat in engine.text.chats] == [{"reasoning_effort": "low"}, more]
    for fields in ({"reasoning_effort": "a lot"}, {"reasoning_effort": "low", "chat_template_kwargs": more}):
        assert (await refused(http, CHAT, **fields))["param"] == "reasoning_effort"


@pytest.mark.parametrize(
    "fields", [{"tool_choice": "auto"}, {"tool_choice": "none"}, {"tool_choice": "auto", "tools": []}]
)
async def test_a_choice_of_nothing(http, engine, fields):
    assert (await ask(http, CHAT, **fields)).status_code == 200
    assert engine.params[0].grammar is None


STRUCTURES = [
    ({"json": SCHEMA}, Grammar("json_schema", json.dumps(SCHEMA))),
    ({"json": json.dumps(SCHEMA)}, Grammar("json_schema", json.dumps(SCHEMA))),
    ({"json_object": True}, Grammar("json_schema", '{"type": "object"}')),
    ({"regex": "[a-z]+/"}, Grammar("regex", "[a-z]+/")),
    ({"choice": ["yes", 'n"o']}, Grammar("lark", 'start: "yes" | "n\\"o"')),
    ({"grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
    ({"regex": "a", "json": None, "json_object": False, "disable_fallback": False}, Grammar("regex", "a")),
]


@pytest.mark.parametrize("url", [CHAT, TEXT])
@pytest.mark.parametrize(("structure", "grammar"), STRUCTURES)
async def test_structured_outputs(http, engine, url, structure, grammar):
    answer = await ask(http, url, structured_outputs=structure)
    assert answer.status_code == 200, answer.text
    assert engine.params[0].grammar == grammar


@pytest.mark.parametrize("url", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("structure", "param"),
    [
        ({}, "structured_outputs"), ({"regex": "a", "choice": ["a"]}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs"), ({"json": "{"}, "structured_outputs.json"),
        ({"json": "[]"}, "structured_outputs.json"),
        ({"json": 5}, "structured_outputs.json"), ({"json": {"not": {}}}, "structured_outputs"),
        ({"choice": []}, "structured_outputs.choice"), ({"choice": [""]}, "structured_outputs.choice[0]"),
        ({"choice": "a"}, "structured_outputs.choice"), ({"regex": ""}, "structured_outputs.regex"),
        ({"regex": "a", "whitespace_pattern": "x"}, "structured_outputs.whitespace_pattern"),
        ({"grammar": '%llguidance {}\nstart: "a"'}, "structured_outputs"),
        ({"structural_tag": "{}"}, "structured_outputs.structural_tag"), ({"lark": "a"}, "structured_outputs.lark"),
        ("a", "structured_outputs"),
    ],
)  # fmt: skip
async def test_structured_outputs_that_cannot_be(http, url, structure, param):
    error = await refused(http, url, structured_outputs=structure)
    assert error["param"] == param
    assert param.split(".")[-1].partition("[")[0] in error["message"]


@pytest.mark.parametrize("url", [CHAT, TEXT])
async def test_one_form_at_a_time(http, url):
    error = await refused(http, url, structured_outputs={"regex": "a"}, response_format={"type": "json_object"})
    assert error["param"] == "structured_outputs"


@pytest.mark.parametrize("url", [CHAT, TEXT])
async def test_what_the_engine_says_of_a_grammar_names_its_field(http, engine, monkeypatch, url):
    def check(prompt, params, speculation=None):
        raise InvalidOption("the grammar cannot be used", param="response_format", code="invalid_grammar")

    monkeypatch.setattr(engine, "check", check)
    assert (await refused(http, url, structured_outputs={"regex": "("}))["param"] == "structured_outputs"
    assert (await refused(http, url, response_format={"type": "json_object"}))["param"] == "response_format"


async def test_response_formats_of_completions(http, engine):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    for sent in (form, {"type": "json_object"}, {"type": "text"}):
        assert (await ask(http, TEXT, response_format=sent)).status_code == 200
    grammars = [params.grammar for params in engine.params]
    assert grammars == [STRUCTURES[0][1], STRUCTURES[2][1], None]


async def test_a_response_format_without_its_schema(http):
    missing = await refused(http, CHAT, response_format={"type": "json_schema"})
    assert missing["message"] == "`response_format.json_schema` is missing, which type json_schema needs"
    other = await refused(http, CHAT, response_format={"type": "text", "json_schema": {"name": "a"}})
    assert "not with text: leave it out" in other["message"]


@pytest.mark.parametrize("option", ["tree_budget", "tree_top_k", "tree_spine"])
@pytest.mark.parametrize("mode", ["ar", "linear"])
async def test_options_that_a_mode_does_not_read(http, engine, mode, option):
    error = await refused(http, CHAT, speculative={"mode": mode, option: 1})
    assert error["param"] == f"speculative.{option}"
    assert mode in error["message"]
    assert (await ask(http, CHAT, speculative={"mode": mode, option: None})).status_code == 200
    engine.speculation = Speculation(mode)
    assert (await refused(http, CHAT, speculative={option: 1}))["param"] == f"speculative.{option}"
    assert (await ask(http, CHAT, speculative={"mode": "shadow-linear", option: 1})).status_code == 200


async def test_a_context_goes_with_the_modes_that_draft(http, engine):
    error = await refused(http, CHAT, speculative={"mode": "ar", "tree_context": "mix"})
    assert error["param"] == "speculative.tree_context"
    assert "ar" in error["message"]
    for mode in ("linear", "shadow-linear", "tree"):
        assert (await ask(http, CHAT, speculative={"mode": mode, "tree_context": "mix"})).status_code == 200
    engine.speculation = Speculation("ar")
    assert (await refused(http, CHAT, speculative={"tree_context": "off"}))["param"] == "speculative.tree_context"


def tool(parameters):
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"type": "array"}, 'type object, not "array"'), ({"type": "thing"}, '"thing"'), ({"type": 5}, "not 5"),
        ({"properties": []}, "properties must be an object"),
        ({"properties": {"a": 5}}, "properties.a must be a schema"),
        ({"properties": {"a": {"type": "str"}}}, "properties.a.type must be one of null"),
        ({"properties": {"a": {"type": []}}}, "properties.a.type"),
        ({"required": "a"}, "required must be a list of names"),
        ({"required": [1]}, "required"), ({"properties": {"a": {"enum": "x"}}}, "properties.a.enum"),
        ({"properties": {"a": {"items": 5}}}, "properties.a.items"), ({"anyOf": {}}, "anyOf must be a list"),
        ({"anyOf": [{"minimum": "1"}]}, "anyOf[0].minimum must be a number"), ({"minProperties": -1}, "minProperties"),
        ({"$defs": {"x": {"maxLength": 1.5}}}, "$defs.x.maxLength"), ({"pattern": 5}, "pattern"), ({"$ref": 5}, "$ref"),
        ({"properties": {"a": {"multipleOf": 0}}}, "multipleOf"),
        ({"additionalProperties": "no"}, "additionalProperties"),
    ],
)  # fmt: skip
async def test_parameters_that_are_no_schema(http, engine, parameters, said):
    error = await refused(http, CHAT, tools=tool(parameters))
    assert (error["param"], error["code"]) == ("tools[0].function.parameters", "invalid_grammar")
    assert said in error["message"]
    assert not engine.prompts


SOUND = {
    "type": "object",
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "properties": {
        "a": {"type": ["string", "null"], "enum": ["x", None], "minLength": 1.0, "default": {"type": "anything"}},
        "b": {"type": "array", "items": [{"type": "integer"}, True], "additionalItems": False, "x-own": {"type": 5}},
        "c": {"anyOf": [{"$ref": "#/$defs/d"}, {"not": {}}], "exclusiveMinimum": True, "const": {"required": 5}},
        "type": {"type": "string"}, "properties": {"type": "object", "properties": {}}, "required": True,
    },
    "required": ["a"], "additionalProperties": {"type": "number", "multipleOf": 0.5}, "$defs": {"d": {"if": True}},
}  # fmt: skip


@pytest.mark.parametrize("parameters", [SOUND, {}, None, {"type": "object"}, {"properties": {}}])
async def test_parameters_that_are_one(http, parameters):
    answer = await ask(http, CHAT, tools=tool(parameters))
    assert answer.status_code == 200, answer.text


async def test_a_result_belongs_to_a_call(http):
    error = await refused(http, CHAT, messages=[*HI, {"role": "tool", "content": "5"}])
    assert (error["param"], error["code"]) == ("messages[1].tool_call_id", "missing_required_parameter")


@pytest.mark.parametrize(
    ("url", "fields", "param", "message"),
    [
        (TEXT, {"prompt": None}, "prompt", "`prompt` should be text, token ids, or a list of either, not null"),
        (TEXT, {"prompt": 5}, "prompt", "`prompt` should be text, token ids, or a list of either, not 5"),
        (TEXT, {"prompt": [1.5]}, "prompt[0]", "integer"), (TEXT, {"prompt": [1, 1.5]}, "prompt[1]", "integer"),
        (TEXT, {"prompt": [None]}, "prompt[0]", "text, a token id, or a list of token ids, not null"),
        (TEXT, {"prompt": ["a", None]}, "prompt[1]", "string"),
        (TEXT, {"prompt": [[1], [True]]}, "prompt[1][0]", "true"),
        (CHAT, {"max_tokens": 10**308}, "max_tokens", "..."), (TEXT, {"max_tokens": 10**308}, "max_tokens", "..."),
        (CHAT, {"max_completion_tokens": 10**308}, "max_completion_tokens", "..."),
        (CHAT, {"min_tokens": 10**308}, "min_tokens", "..."), (CHAT, {"seed": 10**308}, "seed", "..."),
        (CHAT, {"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name",
         '`tools[0].function.name` should have at least 1 character, not ""'),
    ],
)  # fmt: skip
async def test_messages_are_right_and_short(http, url, fields, param, message):
    error = await refused(http, url, **fields)
    assert error["param"] == param
    assert message in error["message"]
    assert len(error["message"]) < 250


async def test_more_answers_than_the_server_takes(engine):
    engine.max_running = 2
    app = create_app(engine, ServerOptions(("scripted",), max_queue=3))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        for url in (CHAT, TEXT):
            assert (await refused(http, url, n=6))["param"] == "n"
        assert (await refused(http, TEXT, n=3, prompt=["a", "b"]))["param"] == "prompt"
    await app.state.worker.stop(0)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("a",), 'ask for "a", or leave'), (("a", "b"), 'ask for "a" or "b", or leave'),
        (("a", "b", "c"), 'ask for "a", "b" or "c", or leave'),
        (tuple("abcdefg"), 'ask for "a", "b", "c", "d" or "e" (/v1/models lists all 7), or leave'),
    ],
)  # fmt: skip
async def test_the_served_names_are_offered(engine, names, said):
    app = create_app(engine, ServerOptions(names))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        answer = await ask(http, CHAT, model="other")
    assert answer.status_code == 404
    assert said in answer.json()["error"]["message"]
    await app.state.worker.stop(0)


async def test_figures_are_rounded(http, engine, monkeypatch):
    generation = engine.generation

    def with_long_numbers(sequence):
        done = generation(sequence)
        done.tok_s, done.acceptance_length = 40.123456, 2.123456
        return done

    monkeypatch.setattr(engine, "generation", with_long_numbers)
    block = (await ask(http, CHAT)).json()["ddtree"]
    assert (block["tok_s"], block["acceptance_length"]) == (40.12, 2.1235)


BEGIN = '<tool_call>{"name": "f", "arguments": '


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "reason", "arguments"),
    [
        (BEGIN + '{"a": ', "stop", ['{"a": ']),
        (BEGIN + '{"a": 1}', "tool_calls", ['{"a": 1}']),
        (BEGIN + '{"a": 1}}\n', "tool_calls", ['{"a": 1}']),
        (BEGIN + '{"a": 1}}</tool_call>', "tool_calls", ['{"a": 1}']),
        (BEGIN + '{"a": 1}}</tool_call>\n' + BEGIN + '{"b', "stop", ['{"a": 1}', '{"b']),
        (BEGIN + '{"a": 1}}</tool_call>\n' + BEGIN[:-5], "stop", ['{"a": 1}']),
        ('<tool_call>{"arguments": {}, "name": "f"}', "tool_calls", ["{}"]),
        (BEGIN[:20], "stop", []),
    ],
)
async def test_an_answer_that_ends_inside_a_call(http, engine, stream, said, reason, arguments):
    """By a stop string, or an end token: broken arguments are nothing to act on."""
    engine.pieces, engine.stop_reason = [*said], "stop string"
    answer = await ask(http, CHAT, tools=tool({}), stream=stream)
    assert answer.status_code == 200
    if not stream:
        choice = answer.json()["choices"][0]
        found = [call["function"]["arguments"] for call in choice["message"].get("tool_calls", ())]
        assert (choice["finish_reason"], found) == (reason, arguments)
        return
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert chunks[-1]["choices"][0]["finish_reason"] == reason
