"""From what a request says of an answer's form to a grammar, alone or as a part of a larger one."""

import json
from collections.abc import Mapping
from typing import Any

from llguidance import regex_to_lark

from ddtree.config import Grammar
from ddtree.engine.grammar import check_schema, schema_text
from ddtree.errors import InvalidOption

_ANY_OBJECT = {"type": "object"}


def format_grammar(response_format: Mapping[str, Any] | None) -> Grammar | None:
    """The grammar of OpenAI's response format (plain JSON); None for text. Raises InvalidOption."""
    kind = "text" if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_schema", json.dumps(_ANY_OBJECT))
    if kind != "json_schema":
        raise InvalidOption(
            f"response_format type {kind!r} is none of text, json_object, json_schema", param="response_format"
        )
    schema = (response_format.get("json_schema") or {}).get("schema")
    if not isinstance(schema, dict):
        raise InvalidOption("response_format of type json_schema needs json_schema.schema", param="response_format")
    check_schema(schema, "response_format", "the schema of response_format")
    return Grammar("json_schema", json.dumps(schema))


def structure_grammar(structure: Mapping[str, Any]) -> Grammar:
    """The grammar of vLLM's structured_outputs: one of its fields with its value. Raises InvalidOption."""
    ((kind, value),) = structure.items()
    match kind:
        case "json":
            check_schema(value, "structured_outputs", "the schema of structured_outputs")
            return Grammar("json_schema", json.dumps(value))
        case "json_object":
            return Grammar("json_schema", json.dumps(_ANY_OBJECT))
        case "regex":
            return Grammar("regex", value)
        case "choice":
            return Grammar("lark", "start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in value))
        case "grammar":
            if "%llguidance" in value:  # its options belong to the server: they bound what a mask may cost
                said = "structured_outputs.grammar holds a %llguidance line, which is not supported: leave it out"
                raise InvalidOption(said, param="structured_outputs", code="invalid_grammar")
            return Grammar("lark", value)
    raise InvalidOption(f"structured_outputs {kind!r} is unknown", param="structured_outputs")


def form_rule(form: Grammar) -> str:
    """A form as the rule `form` of a Lark grammar."""
    match form.kind:
        case "json_schema":
            return f"form: %json {schema_text(json.loads(form.source))}"
        case "regex":
            return f"form: /{regex_to_lark(form.source, '')}/"
    return f"form: %lark {{\n{form.source}\n}}"
