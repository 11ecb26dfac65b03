"""Tools: what a request offers, what the template is told of it, and what grammar makes an answer call them.

Calls are written as Hermes and Qwen models do: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree.config import Grammar
from ddtree.engine.grammar import check_schema, schema_text
from ddtree.errors import InvalidOption
from ddtree.server.structure import form_rule, format_grammar, structure_grammar

CALL, CALL_END = "<tool_call>", "</tool_call>"
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_SPACE = r"WS: /[ \t\r\n]{1,8}/"
_INTRODUCTION = """# Tools

These functions can be called, each described by a JSON object on a line of its own:
<tools>
{tools}
</tools>

To call one, write its name and its arguments as a JSON object between these tags, for each call anew:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


@dataclass(frozen=True)
class ToolPlan:
    """What a request says of tools."""

    tools: tuple[Mapping[str, Any], ...] = ()  # shown to the model, in OpenAI's shape
    callable: tuple[Mapping[str, Any], ...] = ()  # the functions of those that may be called
    choice: str = "none"  # none, auto, required
    single: bool = False  # at most one call
    named: bool = False  # one function was asked for by its name

    @property
    def parses(self) -> bool:
        """Whether the answer is read for calls (`ToolSplitter`)."""
        return self.choice != "none"

    @property
    def strict(self) -> bool:
        """Whether arguments must follow their schemas even where the model chooses to call."""
        return any(function.get("strict") for function in self.callable)


def read_tools(
    tools: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None, parallel: bool | None
) -> ToolPlan:
    """Reads `tools`, `tool_choice` and `parallel_tool_calls` (OpenAI's shapes, as plain JSON).

    With tool_choice none the tools are not shown. A named function is called exactly once.
    Raises InvalidOption for a choice that names no tool, or that needs tools where there are none.
    """
    if choice is None:
        choice = "auto" if tools else "none"
    if not tools:
        if choice not in ("none", "auto"):
            raise InvalidOption(f"tool_choice {_name(choice)!r} needs tools: send some", param="tool_choice")
        return ToolPlan()
    functions = tuple(tool["function"] for tool in tools)
    if isinstance(choice, str):
        if choice == "none":
            return ToolPlan()
        if choice not in ("auto", "required"):
            raise InvalidOption(f"tool_choice {choice!r} is none of none, auto, required", param="tool_choice")
        return ToolPlan(tuple(tools), functions, choice, parallel is False)
    named = tuple(function for function in functions if function["name"] == _name(choice))
    if not named:
        raise InvalidOption(f"tool_choice names {_name(choice)!r}, which is none of tools", param="tool_choice")
    return ToolPlan(tuple(tools), named[:1], "required", True, True)


def _name(choice: str | Mapping[str, Any]) -> str:
    return choice if isinstance(choice, str) else str(choice.get("function", {}).get("name"))


def template_messages(
    messages: Sequence[Mapping[str, Any]], plan: ToolPlan, renders_tools: bool
) -> list[dict[str, Any]]:
    """Messages as the chat template takes them (plain JSON, content as text or absent).

    Arguments of earlier calls become objects where they are the text of one, as templates expect. A template that does
    not know of tools (`Text.renders_tools`) gets them as text: the tools in the system message, calls in the
    assistant's, results in the user's.
    """
    if renders_tools:
        return [_with_objects(message) for message in messages]
    plain: list[dict[str, Any]] = []
    for message in messages:
        one = _as_text(message)
        follows = plain and message["role"] == "tool" and plain[-1].get("results")
        if follows:  # templates want turns to alternate: results of one answer's calls are one message
            plain[-1]["content"] += "\n" + one["content"]
        else:
            plain.append(one)
    for one in plain:
        one.pop("results", None)
    if plan.tools:
        said = _INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in plan.tools))
        if plain and plain[0]["role"] == "system":
            plain[0]["content"] = f"{plain[0]['content']}\n\n{said}"
        else:
            plain.insert(0, {"role": "system", "content": said})
    return plain


def _with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    read = [{**call, "function": {**call["function"], "arguments": _arguments(call)}} for call in calls]
    return {**message, "content": message.get("content") or "", "tool_calls": read}


def _arguments(call: Mapping[str, Any]) -> Any:
    """A call's arguments: as an object, or as their text where that is no object's."""
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        read = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """One message without anything that only templates with tools know."""
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>", "results": True}
    written = [content] if content else []
    for call in message.get("tool_calls") or ():
        body = {"name": call["function"]["name"], "arguments": _arguments(call)}
        written.append(f"{CALL}\n{json.dumps(body, ensure_ascii=False)}\n{CALL_END}")
    kept = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    return {**kept, "content": "\n".join(written)}


def answer_grammar(
    plan: ToolPlan,
    response_format: Mapping[str, Any] | None = None,
    opened: bool | None = None,
    structure: Mapping[str, Any] | None = None,
) -> Grammar | None:
    """The grammar of an answer; None where it is free.

    tool_choice required: calls whose arguments follow their tools' schemas; auto: free, but at most one call with
    parallel_tool_calls false, and arguments by their schemas where a tool is strict. A response format holds for what
    is no call. Thinking comes before all of it.

    Args:
        response_format: OpenAI's, as plain JSON. Schemas are enforced, strict or not.
        opened: of a model that thinks, whether its answer begins inside the thinking part (`begins_inside`); None:
            the model does not think, or it is not told apart.
        structure: vLLM's structured_outputs, one of its fields with its value; in place of a response format.
    Raises InvalidOption (code invalid_grammar) naming the schema and the part of it that cannot be enforced. Reading a
    large schema takes up to seconds: not for a thread that others wait for.
    """
    form = format_grammar(response_format) if structure is None else structure_grammar(structure)
    if plan.choice == "none" and form is None:
        return None
    if plan.choice == "none" and opened is None:
        return form
    rules = [_SPACE]
    if plan.choice == "none":
        assert form is not None
        rules += ["body: form", form_rule(form)]
    elif plan.choice == "required":
        rules += [f"body: call{'' if plan.single else ' (WS? call)*'}", *_call_rules(plan)]
    elif form is not None:
        rules += [f"body: form | call{'' if plan.single else ' (WS? call)*'}", *_call_rules(plan)]
        rules.append(form_rule(form))
    elif plan.strict:
        rules += ["body: FREE | " + ("head rest" if plan.single else "(head rest)+ FREE"), *_call_rules(plan)]
        rules += ["head[lazy]: HEAD", f"HEAD: {_free(opened, CALL)}", f"FREE: {_free(opened)}"]
    elif plan.single:
        rules += ["body: FREE | upto", "upto[lazy]: UPTO"]
        rules += [f"UPTO: {_free(opened, CALL_END)}", f"FREE: {_free(opened)}"]
    else:
        return None
    return Grammar("lark", "\n".join([*_thinking_rules(opened), *rules]) + "\n")


def _thinking_rules(opened: bool | None) -> list[str]:
    if opened is None:
        return ["start: body"]
    thought = 'thought[suffix="</think>"]: /(?s:.*)/'
    return ["start: thought WS? body" if opened else 'start: (WS? "<think>" thought WS?)? body', thought]


def _free(opened: bool | None, until: str = "") -> str:
    """Any text, up to a marker; not the beginning of a thinking part, which has a rule of its own."""
    text = "/(?s:.*)" + until.replace("/", r"\/") + "/"
    return text if opened is not False else text + r" & ~/[ \t\r\n]*<think>(?s:.*)/ & /(?s:.*)/"


def _call_rules(plan: ToolPlan) -> list[str]:
    """`call`, and `rest`: a call behind its opening marker. Only literals and the arguments' own schemas, whose
    references stay as they are.
    """
    rules = [f'call: "{CALL}" rest', f'rest: WS? object WS? "{CALL_END}"']
    rules.append("object: " + " | ".join(f"object_{n}" for n in range(len(plan.callable))))
    for n, function in enumerate(plan.callable):
        head = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
        rules.append(f'object_{n}: {json.dumps(head, ensure_ascii=False)} arguments_{n} "}}"')
        rules.append(f"arguments_{n}: %json {schema_text(_parameters(function, plan))}")
    return rules


def _parameters(function: Mapping[str, Any], plan: ToolPlan) -> Mapping[str, Any]:
    """The schema of a function's arguments, checked. Under auto that of a tool that is not strict: any object."""
    parameters = function.get("parameters")
    if plan.choice == "auto" and not function.get("strict"):
        return {"type": "object"}
    if parameters is None:
        return _NO_ARGUMENTS
    where = f"the parameters of tool {function['name']!r}"
    if parameters.get("type", "object") != "object":
        said = f"{where} must be a schema of type object, not {parameters['type']!r}"
        raise InvalidOption(said, param="tools", code="invalid_grammar")
    schema = {**parameters, "type": "object"}
    check_schema(schema, "tools", where)
    return schema
