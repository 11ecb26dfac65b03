"""A machine's facts as JSON, and back: what `--record` writes and `--replay` reads."""

import json
import types
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ddtree.doctor.facts import Facts
from ddtree.errors import InvalidOption

FORMAT = 1  # raised when a field changes its meaning
T = TypeVar("T")


def to_json(facts: Facts) -> dict[str, Any]:
    """Plain data that `from_json` reads back to equal facts."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(facts)))
    return {"ddtree_doctor": FORMAT, **plain}


def from_json(value: Any) -> Facts:
    """The facts of a recording. Raises ValueError, naming the field, when it is not one."""
    if not isinstance(value, dict) or value.get("ddtree_doctor") != FORMAT:
        raise ValueError(f"it is not a recording of format {FORMAT}")
    return build(Facts, {key: entry for key, entry in value.items() if key != "ddtree_doctor"})


def write(facts: Facts, path: Path) -> None:
    """Write a recording. Raises InvalidOption when that cannot be done."""
    try:
        path.write_text(json.dumps(to_json(facts), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidOption(f"--record {str(path)!r} was not written: {error.strerror}", param="record") from error


def read(path: Path) -> Facts:
    """Read a recording. Raises InvalidOption when it is none."""
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidOption(
            f"--replay {str(path)!r} cannot be read ({error}): give a file that `ddtree doctor --record` wrote",
            param="replay",
        ) from error


def build(kind: type[T], value: Any, where: str = "recording") -> T:
    """`value` as `kind`, a dataclass made of dataclasses, tuples, dicts, None and plain values. Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object")
    hints = get_type_hints(kind)
    unknown = sorted(set(value) - set(hints))
    if unknown:
        raise ValueError(f"{where} has an unknown field {unknown[0]!r}")
    try:
        return kind(**{name: _build(hints[name], entry, f"{where}.{name}") for name, entry in value.items()})
    except TypeError as error:
        missing = [f.name for f in fields(kind) if f.name not in value]  # type: ignore[arg-type]  # a dataclass
        raise ValueError(f"{where} lacks one of {', '.join(missing)}") from error


def _build(hint: Any, value: Any, where: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _build(next(part for part in inner if part is not type(None)), value, where)
    if is_dataclass(hint) and isinstance(hint, type):
        return build(hint, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list")
        return tuple(_build(inner[0], entry, f"{where}[{index}]") for index, entry in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{where} must be an object")
        return {str(key): _build(inner[1], entry, f"{where}.{key}") for key, entry in value.items()}
    if hint is Any:
        return value
    number = hint is float and isinstance(value, int) and not isinstance(value, bool)
    if not number and (not isinstance(value, hint) or (hint is int and isinstance(value, bool))):
        raise ValueError(f"{where} must be {hint.__name__}, not {value!r}")
    return value
