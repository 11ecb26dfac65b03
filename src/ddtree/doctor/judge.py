"""Facts and rules to findings, a verdict, and what each card should get. Pure: looks at nothing but its arguments."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ddtree.doctor.derive import Free, view
from ddtree.doctor.facts import Facts
from ddtree.doctor.rules import LISTS, OPERATORS, Condition, Rule, Tables
from ddtree.errors import InvalidOption

ORDER = ("fail", "unknown", "warn")
VERDICTS = {"fine": 0, "would fail": 1, "could not tell": 2}
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


@dataclass(frozen=True)
class Advice:
    """What one card should get."""

    index: int | None
    card: str
    family: str | None  # None: no family is known for it
    dtype: str | None  # of the embedded engine, as are its graphs
    graphs: str | None
    attention: str | None  # SGLang's backend for chains and plain decoding
    tree_attention: str | None
    grammar: str | None  # None: the embedded engine brings its own
    note: str


@dataclass(frozen=True)
class Diagnosis:
    """All that is said about one machine."""

    verdict: str
    findings: tuple[Finding, ...]  # worst first
    advice: tuple[Advice, ...]
    unseen: tuple[tuple[str, str], ...]  # what was not looked at, and why

    @property
    def exit_code(self) -> int:
        """0 fine, 1 would fail, 2 could not tell."""
        return VERDICTS[self.verdict]


def judge(facts: Facts, tables: Tables) -> Diagnosis:
    """Apply every rule. Raises InvalidOption for a rule that names something no machine has."""
    seen = view(facts, tables)
    findings = [finding for rule in tables.rules for finding in _apply(rule, seen)]
    hidden = {name for rule in tables.rules for name in rule.hides if any(f.id == rule.id for f in findings)}
    kept = [f for f in findings if not {f.id, f"{f.id}:{f.about}"} & hidden]
    kept.sort(key=lambda finding: ORDER.index(finding.level))
    levels = {finding.level for finding in kept}
    verdict = "would fail" if "fail" in levels else "could not tell" if "unknown" in levels else "fine"
    return Diagnosis(verdict, tuple(kept), tuple(_advice(seen, kept, tables)), tuple(_unseen(facts, seen)))


def _apply(rule: Rule, seen: Mapping[str, Any]) -> Iterator[Finding]:
    if rule.level == "off" or rule.engine not in (None, seen["asked"]["engine"]):
        return
    for item in seen[rule.each] if rule.each else [None]:
        scope = {**seen, LISTS[rule.each]: item} if rule.each else seen
        try:
            # All are looked up before any is judged, so that a misspelled path shows on the first machine.
            when = [_holds(condition, scope) for condition in rule.when]
            some = [_holds(condition, scope) for condition in rule.any]
            about, what, how, mend = (_fill(text, scope) for text in (rule.about, rule.what, rule.seen, rule.mend))
        except (KeyError, TypeError) as error:
            raise InvalidOption(f"the rule {rule.id!r} cannot be applied: {error}", param="rules") from error
        if all(when) and (any(some) or not some):
            yield Finding(rule.level, rule.id, about, what, how, mend, rule.source)


def _holds(condition: Condition, scope: Mapping[str, Any]) -> bool:
    value = look_up(condition.path, scope)
    if condition.operator in ("set", "unset"):
        return (value is None) == (condition.operator == "unset")
    wanted = look_up(condition.other, scope) if condition.other else condition.value
    if value is None or wanted is None:
        return False
    return OPERATORS[condition.operator](value, wanted)


def look_up(path: str, scope: Mapping[str, Any]) -> Any:
    """The value at a dotted path; None where something on the way is not known. Raises KeyError for no such thing."""
    value: Any = scope
    rest = path
    while rest:
        if value is None:
            return None
        if isinstance(value, Free):  # a package's name may hold dots
            return value.get(rest)
        name, _, rest = rest.partition(".")
        if not isinstance(value, Mapping) or name not in value:
            raise KeyError(f"there is no {path!r}")
        value = value[name]
    return value


def _fill(text: str, scope: Mapping[str, Any]) -> str:
    def shown(found: re.Match[str]) -> str:
        value = look_up(found[1], scope)
        if value is None:
            return "unknown"
        if found[2]:
            return f"{value / 1024:.1f} GiB"
        return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

    return FIELD.sub(shown, text)


def _advice(seen: Mapping[str, Any], findings: list[Finding], tables: Tables) -> Iterator[Advice]:
    troubled = any(finding.about == "xgrammar" for finding in findings) or "xgrammar" not in seen["packages"]
    grammar = None if seen["asked"]["engine"] == "embedded" else "none" if troubled else "xgrammar"
    for gpu in seen["gpus"]:
        if not gpu["usable"]:
            continue
        memory = f", {gpu['free_mib'] / 1024:.0f} of {gpu['memory_mib'] / 1024:.0f} GiB free" if gpu["free_mib"] else ""
        name = f"{gpu['name']}, compute capability {gpu['capability']}{memory}"
        card = next((card for card in tables.cards if gpu["sm"] and card.low <= gpu["sm"] <= card.high), None)
        if card is None:
            yield Advice(gpu["index"], name, None, None, None, None, None, None, "no family of cards is known for it")
            continue
        yield Advice(
            gpu["index"],
            name,
            card.name,
            card.dtype,
            card.graphs,
            card.attention,
            card.tree_attention,
            grammar,
            card.note,
        )


def _unseen(facts: Facts, seen: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if not seen["gpus"] and facts.driver.smi == "missing" and facts.driver.version is None:
        yield "GPUs", "there is no nvidia-smi, so this machine is taken to have none"
    elif seen["gpus"] and facts.driver.smi == "missing":
        yield "health and processes of the GPUs", "there is no nvidia-smi"
    if seen["gpus"] and facts.driver.xids is None:
        yield "Xid errors of the GPUs", "the kernel's log may not be read; try with sudo"
    for kind, found in (("model", facts.model), ("drafter", facts.drafter)):
        if found is not None and found.state == "to fetch":
            yield f"the {kind} {found.name}", "it is not on this machine yet: the first start fetches it"
        elif found is None and (kind == "model" or facts.asked.drafter != "none"):
            yield f"the {kind}", "its files could not be read in a child process"
    if facts.torch is None:
        yield "GPUs as torch sees them", "torch could not be imported"
    if facts.asked.engine == "sglang" and "sglang" not in facts.packages:
        yield "the imports of SGLang", "it is not installed"
