"""Tool calls: read out of any stream, told to any template, and forced by a grammar where they are required."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.config import Grammar
from ddtree.engine import Text
from ddtree.engine.grammar import GrammarCompiler
from ddtree.errors import InvalidOption
from ddtree.server.tool_stream import ArgumentsDelta, CallStart, ContentDelta, Delta, ToolSplitter
from ddtree.server.tools import ToolPlan, answer_grammar, read_tools, template_messages

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/name"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"name": {"type": "string"}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": 'clock "ü" \\', "description": "The time."}}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
ODD = {"type": "function", "function": {"name": "odd", "parameters": {"type": "object", "contains": {}}}}
LIST = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
TOOLS = [WEATHER, CLOCK]
GOOD = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
NUMBER = '<tool_call>{"name": 5, "arguments": {}}</tool_call>'
ARRAY = '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'
TIME = '<tool_call>{"name": "clock \\"ü\\" \\\\", "arguments": {}}</tool_call>'


def deltas(text: str, cuts: list[int]) -> tuple[list[Delta], ToolSplitter]:
    splitter = ToolSplitter()
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [d for a, b in pairwise(places) for d in splitter.push(text[a:b])] + splitter.flush(), splitter


def read(text: str, cuts: list[int] | None = None) -> tuple[str, list[tuple[str, str]]]:
    """(content, [(name, arguments)]), put together from the deltas as clients do."""
    content, calls = "", {}
    found, splitter = deltas(text, cuts or [])
    for delta in found:
        for call in delta.as_openai().get("tool_calls", ()):
            if "id" in call:
                assert call["function"]["arguments"] == ""
                assert call["index"] == len(calls)
                calls[call["index"]] = [call["id"], call["function"]["name"], ""]
            else:
                calls[call["index"]][2] += call["function"]["arguments"]
        content += delta.as_openai().get("content", "")
    whole = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in splitter.calls]
    assert whole == [tuple(call) for call in calls.values()]
    assert len({call[0] for call in whole}) == len(whole)
    return content, [call[1:] for call in whole]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("just text", "just text", []),
        ("", "", []),
        ("  \n ", "  \n ", []),
        (GOOD, "", [("get_weather", '{"city": "Köln", "days": 2}')]),
        (f"\n{GOOD}\n{TIME}\n", "", [("get_weather", '{"city": "Köln", "days": 2}'), ('clock "ü" \\', "{}")]),
        (f"Let me see.\n{GOOD}", "Let me see.\n", [("get_weather", '{"city": "Köln", "days": 2}')]),
        (f"{TIME} Done.", " Done.", [('clock "ü" \\', "{}")]),
        ('<tool_call>{"arguments": {"a": [1]},"name": "f"}</tool_call>', "", [("f", '{"a": [1]}')]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>}"}}</tool_call>',
            "", [("f", '{"a": "</tool_call>}"}')],
        ),
        ('<tool_call>{"name": "f", "arguments": {"a": {"b": "\\"}"}}}', "", [("f", '{"a": {"b": "\\"}"}}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool', "", [("f", '{"a": 1</tool')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> and', " and", [("f", '{"a": 1')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1 < 2}}</tool_call>', "", [("f", '{"a": 1 < 2}')]),
        ('<tool_call>{"name": "f", "arguments": {}, "x": 1}</tool_call>', ', "x": 1}', [("f", "{}")]),
        ("<tool_call>oops</tool_call>", "<tool_call>oops</tool_call>", []),
        ("a <tool_call>{}</tool_call> b", "a <tool_call>{}</tool_call> b", []),
        (NUMBER, NUMBER, []),
        (ARRAY, ARRAY, []),
        ('<tool_call>{"name": "f', '<tool_call>{"name": "f', []),
        ("x <tool_ca", "x <tool_ca", []),
        ("<tool_call></tool_call>" + TIME, "<tool_call></tool_call>", [('clock "ü" \\', "{}")]),
    ],
)  # fmt: skip
def test_what_is_a_call(text, content, calls):
    assert read(text) == (content, calls)
    assert read(text, list(range(len(text)))) == (content, calls)


PIECES = st.sampled_from(
    [GOOD, TIME, "<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', '{"a": [1, "}"]}', "}", "{", '"', "\\",
     "</tool_", "<", "\n", " ", "é", '"arguments"', "x", "]"]
)  # fmt: skip


@settings(max_examples=400)
@given(st.lists(PIECES, max_size=10).map("".join), st.lists(st.integers(0, 300), max_size=8))
def test_every_way_of_cutting_gives_the_same(text, cuts):
    whole = read(text)
    assert read(text, cuts) == whole
    assert read(text, list(range(len(text)))) == whole


def test_arguments_stream_as_they_come():
    splitter = ToolSplitter()
    assert splitter.push("Hm.<tool") == [ContentDelta("Hm.")]
    assert splitter.push('_call>{"name": "f", "argu') == []
    start, first = splitter.push('ments": {"city": "Kö')
    assert isinstance(start, CallStart)
    assert (start.index, start.name, start.id[:5]) == (0, "f", "call_")
    assert first == ArgumentsDelta(0, '{"city": "Kö')
    assert splitter.push('ln"') == [ArgumentsDelta(0, 'ln"')]
    assert splitter.push("}}</tool_call>") == [ArgumentsDelta(0, "}")]
    assert splitter.flush() == []


def test_choices():
    assert read_tools(TOOLS, None, None) == ToolPlan(tuple(TOOLS), tuple(t["function"] for t in TOOLS), "auto")
    assert read_tools(TOOLS, "required", False).single
    assert not read_tools(TOOLS, "required", True).single
    assert read_tools(TOOLS, "none", None) == read_tools([], None, None) == read_tools(None, "auto", True) == ToolPlan()
    named = read_tools(TOOLS, {"type": "function", "function": {"name": "get_weather"}}, None)
    assert (named.choice, named.single, named.named) == ("required", True, True)
    assert named.callable == (WEATHER["function"],)
    assert named.tools == tuple(TOOLS)
    for choice, tools in [("required", []), ({"function": {"name": "no"}}, TOOLS), ("any", TOOLS)]:
        with pytest.raises(InvalidOption) as caught:
            read_tools(tools, choice, None)
        assert caught.value.param == "tool_choice"


# grammars, by the real tokenizer


@pytest.fixture(scope="module")
def text(embedded_model) -> Text:
    return Text(embedded_model)


@pytest.fixture(scope="module")
def compiler(text) -> GrammarCompiler:
    return GrammarCompiler(text, 49152, (2, 0))


def accepts(text: Text, compiler: GrammarCompiler, grammar: Grammar, answer: str) -> bool:
    """Whether the whole answer, and its end there, are allowed step by step."""
    matcher = compiler.matcher(grammar)
    for token in [*text.encode(answer), 2]:
        if not matcher.masks([7], [-1])[0, token]:
            return False
        matcher.commit([token])
    assert matcher.error is None
    return True


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln <b>"}}\n</tool_call>'
WRONG = '<tool_call>\n{"name": "get_weather", "arguments": {"town": "Köln"}}\n</tool_call>'
ODD_CALL = '<tool_call>{"name": "odd", "arguments": {"x": []}}</tool_call>'
UNKNOWN = '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("opened", [None, False, True])
@pytest.mark.parametrize(
    ("tools", "choice", "parallel", "good", "bad"),
    [
        (TOOLS, "required", None, [CALL, TIME, f"{CALL}\n{TIME}", f"{TIME}{CALL}{CALL}"], ["", "Hi", WRONG, UNKNOWN]),
        (TOOLS, "required", False, [CALL, TIME], [f"{CALL}\n{TIME}", "Hi", WRONG]),
        (TOOLS, {"function": {"name": "get_weather"}}, None, [CALL], [TIME, f"{CALL}\n{CALL}", WRONG]),
        (TOOLS, "auto", False, [CALL, WRONG, "Hi", "", f"Hi {CALL}", "a < b"], [f"{CALL}\n{TIME}", f"{CALL} and"]),
        ([STRICT, CLOCK], "auto", None, [CALL, TIME, "Hi", "", f"Hi {CALL} and {TIME} so"], [WRONG, f"a {UNKNOWN}"]),
        ([STRICT, CLOCK], "auto", False, [CALL, "Hi", f"Hi {CALL}"], [WRONG, f"{CALL}{TIME}", f"{CALL} so"]),
        ([STRICT, ODD], "auto", None, [CALL, ODD_CALL], [WRONG]),
    ],
)  # fmt: skip
def test_what_a_grammar_of_calls_accepts(text, compiler, tools, choice, parallel, good, bad, opened):
    grammar = answer_grammar(read_tools(tools, choice, parallel), None, opened)
    assert grammar is not None
    begin = ["hm <b> </thin </think>", f"{CALL}{TIME}{WRONG}</think>\n\n"] if opened else [""]
    if opened is False:
        begin += ["<think>hm</think>", f"<think>\n{CALL}{TIME}{WRONG}</think>\n\n"]
    for thought in begin:
        assert [answer for answer in good if not accepts(text, compiler, grammar, thought + answer)] == [], thought
        assert [answer for answer in bad if accepts(text, compiler, grammar, thought + answer)] == [], thought
    if opened:
        assert not accepts(text, compiler, grammar, "never closed")


@pytest.mark.parametrize("opened", [None, False, True])
def test_a_response_format_holds_for_what_is_no_call(text, compiler, opened):
    schema = {"type": "object", "properties": {"ü": {"type": "integer"}}, "required": ["ü"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": False}}
    thought = "" if opened is None else "{ 1 }</think>\n\n" if opened else "<think>{</think>"
    for plan, good, bad in [
        (read_tools(None, None, None), ['{"ü": 5}'], ["{}", CALL]),
        (read_tools(TOOLS, "auto", None), ['{"ü": 5}', CALL, f"{CALL}\n{TIME}"], ["{}", "Hi", f'{CALL}{{"ü": 5}}']),
        (read_tools(TOOLS, "auto", False), ['{"ü": 5}', CALL], ["{}", f"{CALL}\n{TIME}"]),
        (read_tools(TOOLS, "required", None), [CALL], ['{"ü": 5}']),
    ]:
        grammar = answer_grammar(plan, form, opened)
        assert [answer for answer in good if not accepts(text, compiler, grammar, thought + answer)] == []
        assert [answer for answer in bad if accepts(text, compiler, grammar, thought + answer)] == []


def test_free_answers_have_no_grammar():
    assert answer_grammar(read_tools(TOOLS, "auto", None)) is None
    assert answer_grammar(read_tools([ODD], "auto", None), {"type": "text"}, True) is None
    assert answer_grammar(ToolPlan(), None, False) is None
    assert answer_grammar(ToolPlan(), {"type": "json_object"}) == Grammar("json_schema", '{"type": "object"}')


@pytest.mark.parametrize(
    ("plan", "form", "param", "said"),
    [
        (read_tools([WEATHER, ODD], "required", None), None, "tools", "tool 'odd'.*contains"),
        (ToolPlan(), {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}, "response_format", "not"),
        (ToolPlan(), {"type": "json_schema", "json_schema": {"name": "n"}}, "response_format", "schema"),
        (ToolPlan(), {"type": "xml"}, "response_format", "xml"),
        (read_tools([LIST], "required", None), None, "tools", "type object"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused_by_name(plan, form, param, said):
    with pytest.raises(InvalidOption, match=said) as caught:
        answer_grammar(plan, form)
    assert caught.value.param == param


# templates

CHAT = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}},
            {"id": "b", "type": "function", "function": {"name": "clock", "arguments": "not json"}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "wet"},
    {"role": "tool", "tool_call_id": "b", "content": "noon"},
    {"role": "user", "content": "Thanks"},
]


def test_templates_that_know_tools_get_arguments_as_objects():
    messages = template_messages(CHAT, ToolPlan(), True)
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool", "user"]
    assert [c["function"]["arguments"] for c in messages[1]["tool_calls"]] == [{"city": "Köln"}, "not json"]
    assert messages[1]["content"] == ""
    assert CHAT[1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Köln"}'  # the request is not changed


def test_templates_that_know_no_tools_get_them_as_text(text):
    assert not text.renders_tools
    messages = template_messages(CHAT, read_tools(TOOLS, None, None), False)
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "user"]
    assert '"name": "get_weather"' in messages[0]["content"]
    assert (
        read(messages[2]["content"]) == ("", [("get_weather", '{"city": "Köln"}')])
        or "not json" in messages[2]["content"]
    )
    assert messages[3]["content"] == "<tool_response>\nwet\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    shown = text.decode(text.chat(messages))
    for part in ("get_weather", "Köln", "wet", "noon", "Thanks"):
        assert part in shown


def test_tools_join_a_system_message_that_is_there():
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    messages = template_messages(chat, read_tools(TOOLS, None, None), False)
    assert [m["role"] for m in messages] == ["system", "user"]
    assert messages[0]["content"].startswith("Be brief.\n\n# Tools")
    assert template_messages(chat, ToolPlan(), False) == chat
    assert chat[0]["content"] == "Be brief."
