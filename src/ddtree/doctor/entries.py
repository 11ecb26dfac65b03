"""One entry of a file of rules, checked: whatever is wrong is a ValueError that names entry and field."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ddtree.doctor.rules import BARE, ENGINES, LEVELS, LISTS, OPERATORS, Card, Condition, Rule, is_specifier

TEXT = "text"
NUMBER = "a whole number"
KEYS = {"rule": "id", "set": "sglang", "card": "name", "xid": "code", "library": "name"}  # table -> what names an entry
CARD = {name: NUMBER if name in ("low", "high") else TEXT for name in Card.__dataclass_fields__}
LIBRARY = dict.fromkeys(("name", "engine", "module", "needed_by", "mend"), TEXT)
RULE = tuple(name for name in Rule.__dataclass_fields__ if name != "where")


def entries(data: Mapping[str, Any], table: str, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The entries of a table, each with its name for messages."""
    found = data.get(table, [])
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise ValueError(f"{where}: {table} must be written [[{table}]], once for each entry")
    for entry in found:
        yield f"{where}: {table} {entry.get(KEYS[table])!r}", entry


def rule(entry: Mapping[str, Any], name: str) -> Rule:
    """A whole rule."""
    _known(entry, RULE, name)
    for key in ("id", "level", "what", "seen", "mend"):
        _check(is_text(entry.get(key)), name, f"{key} must be text")
    for key in ("about", "source"):
        _check(isinstance(entry.get(key, ""), str), name, f"{key} must be text, not {entry.get(key)!r}")
    level(entry, name)
    _one_of(entry.get("engine"), ENGINES, name, "engine")
    _one_of(entry.get("each"), tuple(LISTS), name, "each")
    fields = dict(entry)
    for key in ("when", "any"):
        given = entry.get(key, [])
        _check(isinstance(given, list), name, f"{key} must be a list of conditions, not {given!r}")
        fields[key] = tuple(condition(one, f"{name}: {key}") for one in given)
    _check(bool(fields["when"] or fields["any"]), name, "it needs conditions in when or any")
    hides = entry.get("hides", [])
    _check(
        isinstance(hides, list) and all(map(is_text, hides)), name, f"hides must be a list of rule ids, not {hides!r}"
    )
    return Rule(**fields | {"hides": tuple(hides), "where": name})


def level(entry: Mapping[str, Any], name: str) -> str:
    """The level of a rule."""
    found = entry.get("level")
    _check(isinstance(found, str) and found in LEVELS, name, f"level must be one of {', '.join(LEVELS)}, not {found!r}")
    return str(found)


def condition(entry: Any, name: str) -> Condition:
    """[path, operator, value]."""
    _check(isinstance(entry, list) and 2 <= len(entry) <= 3, name, f"{entry!r} must be [path, operator, value]")
    path, operator, *rest = entry
    _check(is_text(path), name, f"the path of {entry!r} must be text")
    known = isinstance(operator, str) and (operator in BARE or operator in OPERATORS)
    _check(known, name, f"unknown operator {operator!r}")
    _check(bool(rest) != (operator in BARE), name, f"{operator!r} takes {'no' if operator in BARE else 'a'} value")
    value: Any = rest[0] if rest else None
    if isinstance(value, dict):
        _check(set(value) == {"path"} and is_text(value["path"]), name, f"{value!r} must be {{path = ...}} with text")
        return Condition(path, operator, other=value["path"])
    if operator == "matches":
        _check(is_pattern(value), name, f"{value!r} cannot be used with 'matches': it is no regular expression")
    if operator in ("version", "not version"):
        problem = f"{value!r} cannot be used with {operator!r}: write versions as pip does, such as '>=5,<5.17'"
        _check(is_specifier(value), name, problem)
    _check(operator not in ("in", "not in") or isinstance(value, list), name, f"{operator!r} needs a list")
    return Condition(path, operator, value)


def card(entry: Mapping[str, Any], name: str) -> Card:
    """A family of cards."""
    _known(entry, tuple(CARD), name)
    _typed(entry, CARD, name, optional=("note",))
    return Card(**entry)


def known_set(entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A set that is known to work: versions as text, CUDA as a whole number."""
    _typed(entry, {"sglang": TEXT} | {key: NUMBER if key == "cuda" else TEXT for key in entry}, name)
    return entry


def xid(entry: Mapping[str, Any], name: str) -> tuple[int, str]:
    """A grave error and what it means."""
    fields = {"code": NUMBER, "meaning": TEXT}
    _known(entry, tuple(fields), name)
    _typed(entry, fields, name)
    return entry["code"], entry["meaning"]


def library(entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A system library."""
    _known(entry, tuple(LIBRARY), name)
    _typed(entry, LIBRARY, name)
    _one_of(entry["engine"], (*ENGINES, "both"), name, "engine")
    return entry


def is_text(value: object) -> bool:
    """Whether it is text that is not empty."""
    return isinstance(value, str) and bool(value)


def is_pattern(value: object) -> bool:
    """Whether it is a regular expression."""
    try:
        return isinstance(value, str) and re.compile(value) is not None
    except re.error:
        return False


def _known(entry: Mapping[str, Any], names: tuple[str, ...], name: str) -> None:
    unknown = sorted(set(entry) - set(names))
    _check(not unknown, name, f"unknown field {unknown[:1]}: it may have {', '.join(names)}")


def _typed(entry: Mapping[str, Any], kinds: Mapping[str, str], name: str, optional: tuple[str, ...] = ()) -> None:
    for key, kind in kinds.items():
        if key in optional and key not in entry:
            continue
        _check(key in entry, name, f"the entry lacks {key!r}")
        value = entry[key]
        good = is_text(value) if kind == TEXT else isinstance(value, int) and not isinstance(value, bool)
        _check(good, name, f"{key} must be {kind}, not {value!r}")


def _one_of(value: object, names: tuple[str, ...], name: str, field: str) -> None:
    good = value is None or (isinstance(value, str) and value in names)
    _check(good, name, f"{field} must be one of {', '.join(names)}, not {value!r}")


def _check(good: bool, name: str, problem: str) -> None:
    if not good:
        raise ValueError(f"{name}: {problem}")
