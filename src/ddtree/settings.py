"""A TOML file becomes frozen dataclasses: every field checked by name, unknown ones refused. Imports nothing heavy."""

import tomllib
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ddtree.errors import DamagedFile, InvalidOption, ModelNotFound

WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
LISTS = {int: "whole numbers", str: "text"}


def read_toml(path: Path, overrides: Sequence[str], shown_in: str, example: str) -> dict[str, Any]:
    """The tables of a file with `overrides` ("fit.steps=100", values as TOML has them; bare words are text) over it.

    Args:
        shown_in: the document that shows such a file, for errors.
        example: an override, for errors.

    Raises ModelNotFound, DamagedFile or InvalidOption, naming the file or the override.
    """
    try:
        if not path.is_file():
            raise ModelNotFound(f"{path} does not exist: name a TOML file, such as {shown_in} shows")
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read ({error.strerror}): give rights to read it") from error
    except (ValueError, RecursionError) as error:  # also of a number of thousands of digits, or tables without end
        raise DamagedFile(f"{path} is not valid TOML ({error}): mend it") from error
    for override in overrides:
        name, equals, value = override.partition("=")
        if not equals:
            raise InvalidOption(f"--set {override!r} has no value: write it as {example}")
        _put(raw, name.strip(), _value(value.strip()))
    return raw


def build(base: Any, raw: dict[str, Any], at: str = "") -> Any:
    """`base`, a dataclass of defaults, with the values of a table over them.

    Raises InvalidOption for an unknown name or a value of another type; what `base` checks itself raises as it does.
    """
    known = {f.name: getattr(base, f.name) for f in fields(base) if f.metadata.get("in_file", True)}
    hints = get_type_hints(type(base))
    changes: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in known:
            raise InvalidOption(f"{at}{name} is unknown: {at.rstrip('.') or 'the file'} has {', '.join(known)}")
        default = known[name]
        if is_dataclass(default):
            if not isinstance(value, dict):
                raise wrong(f"{at}{name}", value, "a table")
            changes[name] = build(default, value, f"{at}{name}.")
        else:
            changes[name] = _typed(f"{at}{name}", value, default, hints[name])
    return replace(base, **changes)


def as_dict(part: Any) -> dict[str, Any]:
    """A part as plain values, tuples as lists: what JSON gives back."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(part).items()}


def at_least(name: str, value: int, low: int) -> None:
    """Raises InvalidOption below `low`."""
    if value < low:
        raise wrong(name, value, f"at least {low}")


def within(name: str, value: float, low: float, high: float) -> None:
    """Raises InvalidOption outside of `low` to `high`."""
    if not low <= value <= high:
        raise wrong(name, value, f"from {_plain(low)} to {_plain(high)}")


def _plain(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def one_of(name: str, value: str, known: Sequence[str]) -> None:
    """Raises InvalidOption for what is not known."""
    if value not in known:
        raise InvalidOption(f"{name} {value!r} is unknown: choose one of {', '.join(known)}", param=name)


def wrong(name: str, value: Any, must: str) -> InvalidOption:
    """The error for a value that cannot be used."""
    return InvalidOption(f"{name} is {value!r}: it must be {must}", param=name)


def _put(raw: dict[str, Any], name: str, value: Any) -> None:
    *tables, last = name.split(".")
    for table in tables:
        raw = raw.setdefault(table, {})
        if not isinstance(raw, dict):
            raise InvalidOption(f"--set {name}: {table} is no table")
    raw[last] = value


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except (ValueError, RecursionError):
        return text


def _typed(name: str, value: Any, default: Any, hint: Any) -> Any:
    if isinstance(default, tuple):
        kind = get_args(hint)[0]
        if not isinstance(value, list) or not all(_is(v, kind) for v in value):
            raise wrong(name, value, f"a list of {LISTS[kind]}")
        return tuple(value)
    if isinstance(default, dict):
        if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
            raise wrong(name, value, "a table of names and text, as FOO = '1'")
        return dict(value)
    kind = type(default)
    if not (_is(value, kind) or (kind is float and _is(value, int))):
        raise wrong(name, value, WORDS[kind])
    return float(value) if kind is float else value


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
