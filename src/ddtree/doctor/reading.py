"""The file of rules and tables that ships, and one of the user's over it, read and checked."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from ddtree.doctor.apply import apply
from ddtree.doctor.entries import KEYS, card, entries, is_text, known_set, level, library, rule, xid
from ddtree.doctor.rules import Rule, Tables
from ddtree.doctor.sample import sample, scope
from ddtree.errors import InvalidOption


def load(extra: Path | None = None) -> Tables:
    """The tables that ship, with those of a file over them: same rule id, set, card or library replaces.

    Raises InvalidOption, naming file, entry and field, for a file that cannot be used.
    """
    shipped = (files("ddtree.doctor") / "rules.toml").read_text(encoding="utf-8")
    tables = _over(Tables(), tomllib.loads(shipped), "rules.toml")
    if extra is None:
        return tables
    try:
        return _over(tables, _toml(extra), str(extra))
    except OSError as error:
        raise InvalidOption(f"--rules {str(extra)!r} cannot be read: {error.strerror}", param="rules") from error
    except (ValueError, InvalidOption) as error:
        raise InvalidOption(f"--rules cannot be used: {error}", param="rules") from error


def _toml(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error


def _over(tables: Tables, data: Mapping[str, Any], where: str) -> Tables:
    unknown = sorted(set(data) - set(KEYS))
    if unknown:
        raise ValueError(f"{where} has an unknown table {unknown[0]!r}: it may have {', '.join(KEYS)}")
    rules = {one.id: one for one in tables.rules}
    changed = [_rule(entry, name, rules) for name, entry in entries(data, "rule", where)]
    twice = next((one for one in changed if sum(other.id == one.id for other in changed) > 1), None)
    if twice is not None:
        raise ValueError(f"{where}: the rule {twice.id!r} is there twice: leave one out")
    rules |= {one.id: one for one in changed}
    cards = {one.name: one for one in tables.cards}
    cards |= {one.name: one for one in (card(entry, name) for name, entry in entries(data, "card", where))}
    sets = {entry["sglang"]: known_set(entry, name) for name, entry in _named(data, "set", where)}
    libraries = {entry["name"]: library(entry, name) for name, entry in _named(data, "library", where)}
    merged = Tables(
        tuple(rules.values()),
        {**tables.sets, **sets},
        tuple(cards.values()),
        {**tables.xids, **dict(xid(entry, name) for name, entry in entries(data, "xid", where))},
        {**tables.libraries, **libraries},
    )
    _try(changed, merged)
    return merged


def _named(data: Mapping[str, Any], table: str, where: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    for name, entry in entries(data, table, where):
        if KEYS[table] not in entry:
            raise ValueError(f"{name}: the entry lacks {KEYS[table]!r}")
        if not is_text(entry[KEYS[table]]):
            raise ValueError(f"{name}: {KEYS[table]} must be text")
        yield name, entry


def _rule(entry: Mapping[str, Any], name: str, known: Mapping[str, Rule]) -> Rule:
    """A rule of the file; one that only changes the level of a known rule keeps the rest of it."""
    if set(entry) != {"id", "level"} or not is_text(entry["id"]):
        return rule(entry, name)
    if entry["id"] not in known:
        near = _nearest(entry["id"], known) or ": a rule of your own also needs what, seen, mend and conditions"
        raise ValueError(f"{name}: no rule that ships has this id{near}")
    return replace(known[entry["id"]], level=level(entry, name))


def _try(rules: Iterable[Rule], tables: Tables) -> None:
    """Every path is looked up once, whatever engine and list a rule is for; and what a rule hides must be there."""
    ids = [one.id for one in tables.rules]
    seen = sample(tables)
    for one in rules:
        apply(one, scope(one, seen))
        for hidden in one.hides:
            if hidden.partition(":")[0] not in ids:
                raise ValueError(f"{one.where}: hides: there is no rule {hidden!r}{_nearest(hidden, ids)}")


def _nearest(name: str, names: Iterable[str]) -> str:
    near = get_close_matches(name.partition(":")[0], list(names), 1)
    return f": did you mean {near[0]!r}?" if near else ""
