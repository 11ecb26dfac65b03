"""Rules and tables as data, and what their operators mean. `reading` makes them of files."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

LEVELS = ("fail", "unknown", "warn", "off")
LISTS = {
    "gpus": "gpu", "imports": "import", "mismatches": "mismatch", "requirements": "requirement",
    "libraries": "library", "spaces": "space",
}  # fmt: skip
ENGINES = ("embedded", "sglang")


def satisfies(version: str, wanted: str) -> bool | None:
    """Whether a version is among those wanted, its local part left out; None where it is not a version.

    Raises InvalidSpecifier (a ValueError) where `wanted` does not say which versions.
    """
    specifiers = SpecifierSet(wanted)
    try:
        return specifiers.contains(Version(version.split("+")[0]), prereleases=True)
    except InvalidVersion:
        return None


def is_specifier(text: object) -> bool:
    """Whether a text says which versions are meant, as pip writes it."""
    try:
        return isinstance(text, str) and SpecifierSet(text) is not None
    except InvalidSpecifier:
        return False


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
    where: str = ""  # file and entry, for messages; no field of the file


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
