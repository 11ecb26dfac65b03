"""Rules and tables as data: the file that ships, and one of the user's over it. Read and checked here."""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from ddtree.errors import InvalidOption

LEVELS = ("fail", "unknown", "warn", "off")
LISTS = {
    "gpus": "gpu", "imports": "import", "mismatches": "mismatch", "requirements": "requirement",
    "libraries": "library", "spaces": "space",
}  # fmt: skip
ENGINES = ("embedded", "sglang")


def satisfies(version: str, wanted: str) -> bool | None:
    """Whether a version is among those wanted, its local part left out; None where it is not a version."""
    try:
        return SpecifierSet(wanted).contains(Version(version.split("+")[0]), prereleases=True)
    except InvalidVersion:
        return None


# An unknown value makes every one of them false but "unset": what is not known raises no finding.
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "is": lambda value, wanted: bool(value == wanted),
    "is not": lambda value, wanted: bool(value != wanted),
    "in": lambda value, wanted: value in wanted,
    "not in": lambda value, wanted: value not in wanted,
    "<": lambda value, wanted: bool(value < wanted),
    ">": lambda value, wanted: bool(value > wanted),
    ">=": lambda value, wanted: bool(value >= wanted),
    "<=": lambda value, wanted: bool(value <= wanted),
    "matches": lambda value, wanted: re.search(wanted, str(value)) is not None,
    "version": lambda value, wanted: satisfies(str(value), wanted) is True,
    "not version": lambda value, wanted: satisfies(str(value), wanted) is False,
}
BARE = ("set", "unset")


@dataclass(frozen=True)
class Condition:
    """`path operator value`, such as `gpu.sm >= 100`; a value {path = "..."} is looked up too."""

    path: str
    operator: str
    value: Any = None
    other: str | None = None  # the path of the value


@dataclass(frozen=True)
class Rule:
    """One fault: when it is there, and what is said then."""

    id: str
    level: str
    what: str
    seen: str
    mend: str
    source: str = ""  # where it was reported
    engine: str | None = None  # None: both
    each: str | None = None  # the list that is gone through
    about: str = ""  # what a finding is about, for `hides`
    when: tuple[Condition, ...] = ()  # all of them hold
    any: tuple[Condition, ...] = ()  # and one of these, if there are any
    hides: tuple[str, ...] = ()  # findings ("id" or "id:about") that this one explains


@dataclass(frozen=True)
class Card:
    """What a family of cards should get."""

    name: str
    low: int  # compute capability as 90 for 9.0, first and last
    high: int
    dtype: str
    graphs: str
    attention: str
    tree_attention: str
    note: str = ""


@dataclass(frozen=True)
class Tables:
    """All that is data."""

    rules: tuple[Rule, ...] = ()
    sets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # sglang's version -> the set known to work
    cards: tuple[Card, ...] = ()
    xids: Mapping[int, str] = field(default_factory=dict)  # those that mean a broken card
    libraries: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def sonames(self, engine: str) -> list[str]:
        """The system libraries to try."""
        return [name for name, entry in self.libraries.items() if entry["engine"] in (engine, "both")]


def load(extra: Path | None = None) -> Tables:
    """The tables that ship, with those of a file over them: same rule id, set, card or library replaces.

    Raises InvalidOption, naming file and entry, for a file that cannot be used.
    """
    shipped = (files("ddtree.doctor") / "rules.toml").read_text(encoding="utf-8")
    tables = _over(Tables(), tomllib.loads(shipped), "rules.toml")
    if extra is None:
        return tables
    try:
        return _over(tables, tomllib.loads(extra.read_text(encoding="utf-8")), str(extra))
    except (OSError, ValueError) as error:
        raise InvalidOption(f"--rules {str(extra)!r} cannot be read: {error}", param="rules") from error


def _over(tables: Tables, data: Mapping[str, Any], where: str) -> Tables:
    unknown = sorted(set(data) - {"rule", "set", "card", "xid", "library"})
    if unknown:
        raise ValueError(f"it has an unknown table {unknown[0]!r}")
    rules = {rule.id: rule for rule in tables.rules}
    for entry in data.get("rule", []):
        name = f"{where}: rule {entry.get('id')!r}"
        known = rules.get(entry.get("id"))
        # A rule that only changes the level of a known one keeps the rest of it.
        rule = replace(known, level=entry["level"]) if known and set(entry) == {"id", "level"} else _rule(entry, name)
        _check(rule.level in LEVELS, name, f"level must be one of {', '.join(LEVELS)}")
        rules[rule.id] = rule
    cards = {card.name: card for card in tables.cards} | {card.name: card for card in map(_card, data.get("card", []))}
    return Tables(
        tuple(rules.values()),
        {**tables.sets, **{_key(entry, "sglang"): entry for entry in data.get("set", [])}},
        tuple(cards.values()),
        {**tables.xids, **{int(_key(entry, "code")): _key(entry, "meaning") for entry in data.get("xid", [])}},
        {**tables.libraries, **{_key(entry, "name"): _library(entry) for entry in data.get("library", [])}},
    )


def _rule(entry: Mapping[str, Any], name: str) -> Rule:
    unknown = sorted(set(entry) - set(Rule.__dataclass_fields__))
    _check(not unknown, name, f"unknown field {unknown[:1]}")
    for key in ("id", "level", "what", "seen", "mend"):
        _check(isinstance(entry.get(key), str) and bool(entry[key]), name, f"{key} must be text")
    _check(entry.get("engine") in (None, *ENGINES), name, f"engine must be one of {', '.join(ENGINES)}")
    _check(entry.get("each") in (None, *LISTS), name, f"each must be one of {', '.join(LISTS)}")
    _check(bool(entry.get("when") or entry.get("any")), name, "it needs conditions in when or any")
    fields = dict(entry)
    for key in ("when", "any"):
        fields[key] = tuple(_condition(condition, name) for condition in entry.get(key, ()))
    return Rule(**fields | {"hides": tuple(entry.get("hides", ()))})


def _condition(entry: Any, name: str) -> Condition:
    _check(isinstance(entry, list) and 2 <= len(entry) <= 3, name, f"{entry!r} must be [path, operator, value]")
    path, operator, *rest = entry
    _check(operator in BARE or operator in OPERATORS, name, f"unknown operator {operator!r}")
    _check(bool(rest) != (operator in BARE), name, f"{operator!r} takes {'no' if operator in BARE else 'a'} value")
    value: Any = rest[0] if rest else None
    if isinstance(value, dict):
        _check(set(value) == {"path"}, name, f"{value!r} must be {{path = ...}}")
        return Condition(path, operator, other=value["path"])
    try:
        if operator == "matches":
            re.compile(value)
        if operator in ("version", "not version"):
            SpecifierSet(value)
    except (re.error, InvalidSpecifier, TypeError, AttributeError) as error:
        raise ValueError(f"{name}: {value!r} cannot be used with {operator!r}: {error}") from error
    _check(operator not in ("in", "not in") or isinstance(value, list), name, f"{operator!r} needs a list")
    return Condition(path, operator, value)


def _card(entry: Mapping[str, Any]) -> Card:
    try:
        return Card(**entry)
    except TypeError as error:
        raise ValueError(f"card {entry.get('name')!r}: {error}") from error


def _library(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in ("engine", "module", "needed_by", "mend"):
        _key(entry, key)
    return entry


def _key(entry: Mapping[str, Any], key: str) -> Any:
    if key not in entry:
        raise ValueError(f"an entry lacks {key!r}: {dict(entry)}")
    return entry[key]


def _check(good: bool, name: str, problem: str) -> None:
    if not good:
        raise ValueError(f"{name}: {problem}")
