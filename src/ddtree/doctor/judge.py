"""Facts and rules to findings, a verdict, and what each card should get. Pure: looks at nothing but its arguments."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ddtree.doctor.apply import Finding, apply
from ddtree.doctor.derive import view
from ddtree.doctor.facts import Facts
from ddtree.doctor.rules import LISTS, Rule, Tables

ORDER = ("fail", "unknown", "warn")
VERDICTS = {"fine": 0, "would fail": 1, "could not tell": 2}


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
    findings = [finding for rule in tables.rules for finding in _found(rule, seen)]
    hidden = {name for rule in tables.rules for name in rule.hides if any(f.id == rule.id for f in findings)}
    kept = [f for f in findings if not {f.id, f"{f.id}:{f.about}"} & hidden]
    kept.sort(key=lambda finding: ORDER.index(finding.level))
    levels = {finding.level for finding in kept}
    verdict = "would fail" if "fail" in levels else "could not tell" if "unknown" in levels else "fine"
    return Diagnosis(verdict, tuple(kept), tuple(_advice(seen, kept, tables)), tuple(_unseen(facts, seen)))


def _found(rule: Rule, seen: Mapping[str, Any]) -> Iterator[Finding]:
    if rule.level == "off" or rule.engine not in (None, seen["asked"]["engine"]):
        return
    for item in seen[rule.each] if rule.each else [None]:
        finding = apply(rule, {**seen, LISTS[rule.each]: item} if rule.each else seen)
        if finding is not None:
            yield finding


def _advice(seen: Mapping[str, Any], findings: list[Finding], tables: Tables) -> Iterator[Advice]:
    troubled = any(finding.about == "xgrammar" for finding in findings) or "xgrammar" not in seen["packages"]
    grammar = None if seen["asked"]["engine"] == "embedded" else "none" if troubled else "xgrammar"
    for gpu in seen["gpus"]:
        if not gpu["usable"]:
            continue
        name = f"{gpu['name']}, compute capability {gpu['capability']}{_memory(gpu)}"
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


def _memory(gpu: Mapping[str, Any]) -> str:
    free, whole = (gpu[name] and f"{gpu[name] / 1024:.0f}" for name in ("free_mib", "memory_mib"))
    if not free:
        return ""
    return (
        f", {free} of {whole} GiB free" if whole else f", {free} GiB free"
    )  # memory shared with the host has no total


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
        elif found is None and (kind == "model" or facts.asked.loaded_drafter != "none"):
            yield f"the {kind}", "its files could not be read in a child process"
    if facts.torch is None:
        yield "GPUs as torch sees them", "torch could not be imported"
    if facts.asked.engine == "sglang" and "sglang" not in facts.packages:
        yield "the imports of SGLang", "it is not installed"
