"""One rule on one machine: look up, compare, fill in the texts."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddtree.doctor.derive import Free
from ddtree.doctor.rules import OPERATORS, Condition, Rule
from ddtree.errors import InvalidOption

FIELD = re.compile(r"\{([a-z_]+(?:\.[\w-]+)*)(\|gib)?\}")


@dataclass(frozen=True)
class Finding:
    """One fault of this machine."""

    level: str  # fail, unknown or warn
    id: str
    about: str
    what: str
    seen: str  # how it was seen
    mend: str  # the command that mends it
    source: str


class _Unfit(ValueError):
    """A rule asks for something that no machine has, or compares what cannot be compared."""


def apply(rule: Rule, scope: Mapping[str, Any]) -> Finding | None:
    """What the rule finds; None where it does not hold. Raises InvalidOption, naming file, rule and field."""
    part = ""
    try:
        # All are looked up before any is judged, so that a misspelled path shows on the first machine.
        held: dict[str, list[bool]] = {}
        for part, conditions in (("when", rule.when), ("any", rule.any)):  # the error names it
            held[part] = [_holds(condition, scope) for condition in conditions]
        texts: dict[str, str] = {}
        for part in ("about", "what", "seen", "mend"):
            texts[part] = _fill(getattr(rule, part), scope)
    except _Unfit as error:
        raise InvalidOption(f"{rule.where}: {part}: it cannot be applied: {error}", param="rules") from error
    if not all(held["when"]) or (held["any"] and not any(held["any"])):
        return None
    return Finding(rule.level, rule.id, source=rule.source, **texts)


def look_up(path: str, scope: Mapping[str, Any]) -> Any:
    """The value at a dotted path; None where something on the way is not known. Raises ValueError for no such thing."""
    value: Any = scope
    rest = path
    while rest:
        if value is None:
            return None
        if isinstance(value, Free):  # a package's name may hold dots
            return value.get(rest)
        name, _, rest = rest.partition(".")
        if not isinstance(value, Mapping) or name not in value:
            raise _Unfit(f"there is no {path!r}")
        value = value[name]
    return value


def _holds(condition: Condition, scope: Mapping[str, Any]) -> bool:
    value = look_up(condition.path, scope)
    if condition.operator in ("set", "unset"):
        return (value is None) == (condition.operator == "unset")
    wanted = look_up(condition.other, scope) if condition.other else condition.value
    if value is None or wanted is None:
        return False
    try:
        return OPERATORS[condition.operator](value, wanted)
    except (TypeError, ValueError, re.error) as error:
        source = f" (of {condition.other})" if condition.other else ""
        raise _Unfit(
            f"{condition.path} is {value!r}, and {condition.operator!r} does not go with {wanted!r}{source}"
        ) from error


def _fill(text: str, scope: Mapping[str, Any]) -> str:
    def shown(found: re.Match[str]) -> str:
        value = look_up(found[1], scope)
        if value is None:
            return "unknown"
        if found[2]:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise _Unfit(f"{{{found[1]}|gib}} needs a number of MiB, not {value!r}")
            return f"{value / 1024:.1f} GiB"
        return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

    return FIELD.sub(shown, text)
