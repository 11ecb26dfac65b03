"""Forms of an answer by the real tokenizer: alone, behind thinking, and beside tools; and what a template refuses."""

import pytest

from ddtree.engine import Text
from ddtree.engine.grammar import GrammarCompiler
from ddtree.errors import InvalidOption
from ddtree.server.tools import ToolPlan, answer_grammar, read_tools

TIME = {"type": "function", "function": {"name": "time", "description": "The time."}}
CALL = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
FORMS = [
    ({"regex": "[a-c]+/\\d"}, ["abc/7", "a/0"], ["abc", "a/b", ""]),
    ({"choice": ["yes", 'n"ö/', "a\\b"]}, ["yes", 'n"ö/', "a\\b"], ["no", "ye", ""]),
    ({"grammar": 'start: "<" word "}"\nword: W\nW: /[xyz]+/'}, ["<xyz}"], ["xyz", "<x"]),
    ({"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}, ['{"a": 5}'], ["{}"]),
    ({"json_object": True}, ["{}", '{"a": []}'], ["[]", "a"]),
]


@pytest.fixture(scope="module")
def text(embedded_model) -> Text:
    return Text(embedded_model)


@pytest.fixture(scope="module")
def compiler(text) -> GrammarCompiler:
    return GrammarCompiler(text, 49152, (2, 0))


def accepts(text, compiler, grammar, answer) -> bool:
    matcher = compiler.matcher(grammar)
    for token in [*text.encode(answer), 2]:
        if not matcher.masks([7], [-1])[0, token]:
            return False
        matcher.commit([token])
    return True


@pytest.mark.parametrize("opened", [None, False, True])
@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize(("structure", "good", "bad"), FORMS, ids=[next(iter(form[0])) for form in FORMS])
def test_what_a_form_accepts(text, compiler, structure, good, bad, tools, opened):
    plan = read_tools([TIME], None, None) if tools else ToolPlan()
    grammar = answer_grammar(plan, None, opened, structure)
    assert grammar is not None
    thought = "" if opened is None else "hm yes </think>\n\n" if opened else "<think>hm yes</think>"
    for answer in good:
        assert accepts(text, compiler, grammar, thought + answer), answer
    for answer in bad:
        assert not accepts(text, compiler, grammar, thought + answer), answer
    assert accepts(text, compiler, grammar, thought + CALL) is tools


def test_tools_that_must_be_called_leave_no_room_for_a_form(text, compiler):
    grammar = answer_grammar(read_tools([TIME], "required", None), None, None, {"choice": ["yes"]})
    assert accepts(text, compiler, grammar, CALL)
    assert not accepts(text, compiler, grammar, "yes")


@pytest.mark.parametrize("structure", [{"regex": "("}, {"regex": "(?<=a)b"}, {"grammar": "begin: x"}, {"grammar": "?"}])
@pytest.mark.parametrize("opened", [None, True])
def test_forms_that_do_not_compile(compiler, structure, opened):
    with pytest.raises(InvalidOption) as caught:
        compiler.matcher(answer_grammar(ToolPlan(), None, opened, structure))
    assert caught.value.code == "invalid_grammar"


HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("name", ["self", "messages", "conversation", "conversations", "tools", "tokenize"])
def test_arguments_that_are_not_the_template_s_alone(text, name):
    with pytest.raises(InvalidOption, match=name) as caught:
        text.chat(HI, template_kwargs={name: 1})
    assert caught.value.param == "chat_template_kwargs"


def test_arguments_at_fault_are_named(text, monkeypatch):
    monkeypatch.setattr(text._tokenizer, "chat_template", "{{ messages[0].content }}{{ (x or 1) + 1 }}{{ y.z.z }}")
    with pytest.raises(InvalidOption) as caught:
        text.chat(HI, template_kwargs={"x": "a"})
    assert caught.value.param == "messages"  # it refuses anything: y is not there
    monkeypatch.setattr(text._tokenizer, "chat_template", "{{ messages[0].content }}{{ (x or 1) + 1 }}")
    assert text.decode(text.chat(HI, template_kwargs={"x": 2})) == "Hi3"
    with pytest.raises(InvalidOption, match="chat_template_kwargs") as caught:
        text.chat(HI, template_kwargs={"x": "a"})
    assert caught.value.param == "chat_template_kwargs"
