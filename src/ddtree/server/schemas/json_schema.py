"""Whether a JSON schema is one at all: the shapes of its keywords, as the drafts of JSON Schema have them."""

from collections.abc import Callable
from typing import Any

from ddtree.server.problems import echo, shorten

TYPES = ("null", "boolean", "object", "array", "number", "integer", "string")
_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")  # lists of schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by name
_ONE = (
    "additionalProperties", "unevaluatedProperties", "additionalItems", "unevaluatedItems", "contains",
    "propertyNames", "not", "if", "then", "else",
)  # fmt: skip


def _is_count(value: object) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)  # type: ignore[operator, call-overload]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_type(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(one, str) and one in TYPES for one in value)
    return isinstance(value, str) and value in TYPES


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_SHAPES: dict[str, tuple[Callable[[object], bool], str]] = {
    "type": (_is_type, f"one of {', '.join(TYPES)}, or a list of them"),
    "required": (_are_names, "a list of names"),
    "enum": (lambda value: isinstance(value, list), "a list"),
    "pattern": (lambda value: isinstance(value, str), "text"),
    "$ref": (lambda value: isinstance(value, str), "text"),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),  # type: ignore[operator]
    "minimum": (_is_number, "a number"),
    "maximum": (_is_number, "a number"),
    # true or false in draft 4
    "exclusiveMinimum": (lambda value: isinstance(value, int | float), "a number"),
    "exclusiveMaximum": (lambda value: isinstance(value, int | float), "a number"),
    **dict.fromkeys(_COUNTS, (_is_count, "a whole number that is not negative")),
}


def fault_of(schema: object) -> str | None:
    """What is wrong with the first part that no JSON schema may have, and where; None for a sound one.

    It says nothing of what a schema means: whether its references lead anywhere, or whether it can be enforced.
    """
    todo: list[tuple[str, object]] = [("", schema)]
    while todo:
        where, part = todo.pop()
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            return f"{shorten(where)} must be a schema, not {echo(part)}"
        for name, (fits, wanted) in _SHAPES.items():
            if name in part and not fits(part[name]):
                return f"{shorten(_under(where, name))} must be {wanted}, not {echo(part[name])}"
        below = _below(part, where)
        if isinstance(below, str):
            return below
        todo += reversed(below)
    return None


def _below(part: dict[str, Any], where: str) -> list[tuple[str, object]] | str:
    """The schemas inside of one, each with its place; or what is wrong with what should hold them."""
    below: list[tuple[str, object]] = [(_under(where, name), part[name]) for name in _ONE if name in part]
    for name in _NAMED:
        held, place = part.get(name, {}), _under(where, name)
        if not isinstance(held, dict):
            return f"{shorten(place)} must be an object, not {echo(held)}"
        below += [(f"{place}.{key}", one) for key, one in held.items()]
    for name in (*_SCHEMAS, "items"):
        place = _under(where, name)
        if name == "items" and not isinstance(part.get(name), list):  # before draft 2020 it may be a list
            below += [(place, part[name])] if name in part else []
        elif name in part:
            if not isinstance(part[name], list):
                return f"{shorten(place)} must be a list of schemas, not {echo(part[name])}"
            below += [(f"{place}[{number}]", one) for number, one in enumerate(part[name])]
    return below


def _under(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
