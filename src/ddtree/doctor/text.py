"""A diagnosis as text for people, and as JSON for programs."""

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from ddtree.doctor.facts import Facts
from ddtree.doctor.judge import Diagnosis
from ddtree.doctor.record import to_json

WORDS = {"fail": "FAIL", "unknown": "?", "warn": "warn"}
LEADS = {
    "fine": "nothing was found that would keep it from starting",
    "would fail": "it would not start, or not work",
    "could not tell": "something that matters could not be seen",
}
INDENT = 6
Style = Callable[[str, str], str]  # text and level -> text


def as_json(facts: Facts, diagnosis: Diagnosis) -> dict[str, Any]:
    """All that was found and seen, as plain data."""
    return {
        "verdict": diagnosis.verdict,
        "exit_code": diagnosis.exit_code,
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "cards": [asdict(advice) for advice in diagnosis.advice],
        "not_looked_at": [{"what": what, "why": why} for what, why in diagnosis.unseen],
        "facts": to_json(facts),
    }


def as_text(facts: Facts, diagnosis: Diagnosis, style: Style = lambda text, level: text, width: int = 0) -> str:
    """A verdict, a paragraph for each finding, the machine, the cards. width: of the terminal; 0: no line is broken."""
    asked = facts.asked
    level = {0: "fine", 1: "fail", 2: "unknown"}[diagnosis.exit_code]
    lead = (
        f"{style(diagnosis.verdict, level)}: the {asked.engine} engine with {asked.model}: {LEADS[diagnosis.verdict]}"
    )
    parts = [[lead]]
    for finding in diagnosis.findings:
        head = style(f"{WORDS[finding.level]:<{INDENT - 1}}", finding.level)
        parts.append(
            [
                *_wrapped(f"{head} ", finding.what, width),
                *_wrapped(" " * INDENT + "seen  ", finding.seen, width),
                " " * INDENT + f"mend  {finding.mend}",  # never broken: it is to be copied
            ]
        )
    parts.append(_table("machine", _machine(facts), width))
    if diagnosis.advice:
        parts.append(_table("cards", _cards(diagnosis), width))
    if diagnosis.unseen:
        parts.append(_table("not looked at", diagnosis.unseen, width))
    return "\n\n".join("\n".join(part) for part in parts)


def _wrapped(head: str, text: str, width: int) -> list[str]:
    room = width - INDENT - 6
    lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) if room >= 40 else [text]
    rest = " " * (INDENT + 6 if "seen" in head else INDENT)
    return [head + lines[0], *(rest + line for line in lines[1:])]


def _table(title: str, rows: Any, width: int) -> list[str]:
    rows = list(rows)
    left = max(len(name) for name, _ in rows)
    lines = [title]
    for name, text in rows:
        room = width - left - 4
        pieces = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) if room >= 40 else [text]
        lines.append(f"  {name:<{left}}  {pieces[0]}")
        lines += [" " * (left + 4) + piece for piece in pieces[1:]]
    return lines


def _machine(facts: Facts) -> Iterator[tuple[str, str]]:
    system, torch = facts.system, facts.torch
    memory = f", {system.memory_mib / 1024:.0f} GiB of memory free" if system.memory_mib is not None else ""
    yield "host", f"{system.platform} {system.machine}, {system.cores} cores{memory}"
    yield "Python", f"{system.python}, {system.executable}"
    if torch is not None:
        yield "torch", f"{torch.version}, " + (f"built for CUDA {torch.cuda}" if torch.cuda else "a build for CPUs")
    if facts.driver.version:
        yield "driver", f"{facts.driver.version}, CUDA up to {facts.driver.cuda or 'unknown'}"
    others = [f"{name} {version}" for name, version in facts.packages.items() if name not in ("ddtree", "torch")]
    if others:
        yield "packages", ", ".join(others)
    tried = [f"{entry.module} {entry.seconds:.0f} s" for entry in facts.imports if entry.ok]
    if tried:
        yield "imports", ", ".join(tried)
    if facts.libraries:
        yield "libraries", ", ".join(name + ("" if loads else " (missing)") for name, loads in facts.libraries.items())
    for kind, found in (("model", facts.model), ("drafter", facts.drafter)):
        if found is not None and found.folder:
            size = f", {found.weights_mib} MiB in 16 bits" if found.weights_mib is not None else ""
            yield kind, f"{found.name}: {found.folder}{size}"
    known = [space for space in system.spaces if space.free_mib is not None]
    if known:
        yield "disk", ", ".join(f"{(s.free_mib or 0) / 1024:.0f} GiB for {s.purpose}" for s in known)
    yield "port", f"{facts.port.number} is {'free' if facts.port.free else 'taken'}" if facts.port.number else "any"


def _cards(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    for advice in diagnosis.advice:
        note = f" ({advice.note})" if advice.note else ""
        if advice.family is None:
            yield f"GPU {advice.index}", f"{advice.card}:{note}"
            continue
        yield (
            f"GPU {advice.index}",
            f"{advice.card}: {advice.family}{note}; embedded: --dtype {advice.dtype} --cuda-graphs {advice.graphs}; "
            f"SGLang: --attention-backend {advice.attention}, with a tree {advice.tree_attention}, "
            f"--grammar-backend {advice.grammar}",
        )
