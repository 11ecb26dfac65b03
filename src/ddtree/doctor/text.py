"""A diagnosis as text for people, and as JSON for programs."""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ddtree.doctor.apply import Finding
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


def shown(text: str) -> str:
    """On one line, without what would steer a terminal: a damaged program may say any bytes."""
    return "".join(letter if letter.isprintable() else " " if letter.isspace() else "\ufffd" for letter in text)


def as_text(facts: Facts, diagnosis: Diagnosis, style: Style = lambda text, level: text, width: int = 0) -> str:
    """A verdict, a paragraph for each finding, the machine, the cards. width: of the terminal; 0: no line is broken."""
    asked = facts.asked
    level = {0: "fine", 1: "fail", 2: "unknown"}[diagnosis.exit_code]
    verdict = style(diagnosis.verdict, level)
    lead = f"{verdict}: the {asked.engine} engine with {shown(asked.model)}: {LEADS[diagnosis.verdict]}"
    parts = [[lead], *paragraphs(diagnosis.findings, style, width), *tables(facts, diagnosis, width)]
    if diagnosis.unseen:
        parts.append(table("not looked at", diagnosis.unseen, width))
    return "\n\n".join("\n".join(part) for part in parts)


def paragraphs(findings: Iterable[Finding], style: Style, width: int) -> list[list[str]]:
    """The lines of each finding; those that one remedy mends are one paragraph."""
    return [_paragraph(same, style, width) for same in _grouped(findings)]


def tables(facts: Facts, diagnosis: Diagnosis, width: int) -> list[list[str]]:
    """The lines about the machine, and about its cards where it has some."""
    cards = [table("cards", _cards(facts, diagnosis), width)] if diagnosis.advice else []
    return [table("machine", _machine(facts), width), *cards]


def _grouped(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Findings of one rule with one remedy belong together: eight like cards are one paragraph."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.id, finding.mend), []).append(finding)
    return list(groups.values())


def _paragraph(same: Sequence[Finding], style: Style, width: int) -> list[str]:
    first = same[0]
    others = sorted({finding.about for finding in same} - {first.about})
    head = style(f"{WORDS[first.level]:<{INDENT - 1}}", first.level)
    return [
        *_wrapped(f"{head} ", first.what, width, INDENT),
        *_wrapped(" " * INDENT + "seen  ", first.seen, width, INDENT + 6),
        *(_wrapped(" " * INDENT + "also  ", ", ".join(others), width, INDENT + 6) if others else []),
        " " * INDENT + f"mend  {shown(first.mend)}",  # never broken: it is to be copied
    ]


def _wrapped(head: str, text: str, width: int, indent: int) -> list[str]:
    text = shown(text)
    room = width - indent
    lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) if room >= 40 else [text]
    return [head + lines[0], *(" " * indent + line for line in lines[1:])]


def table(title: str, rows: Any, width: int) -> list[str]:
    """The lines of a table of two columns."""
    rows = list(rows)
    left = max(len(name) for name, _ in rows)
    lines = [title]
    for name, text in ((shown(name), shown(text)) for name, text in rows):
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
        tried_names = (name if loads else f"{name} (not in the system)" for name, loads in facts.libraries.items())
        yield "libraries", ", ".join(tried_names)
    for kind, found in (("model", facts.model), ("drafter", facts.drafter)):
        if found is not None and found.folder:
            size = f", {found.weights_mib} MiB in 16 bits" if found.weights_mib is not None else ""
            cut = f", drafts of {found.draft_vocab} tokens" if found.draft_vocab is not None else ""
            yield kind, f"{found.name}: {found.folder}{size}{cut}"
    rooms = [f"{s.free_mib / 1024:.0f} GiB for {s.purpose}" for s in system.spaces if s.free_mib is not None]
    if rooms:
        yield "disk", ", ".join(rooms)
    yield "port", f"{facts.port.number} is {'free' if facts.port.free else 'taken'}" if facts.port.number else "any"


def _cards(facts: Facts, diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """What the cards should get from the engine that is asked for; like cards share a line."""
    lines: dict[str, list[str]] = {}
    for advice in diagnosis.advice:
        note = f" ({advice.note})" if advice.note else ""
        if advice.family is None:
            said = note.strip()
        elif facts.asked.engine == "embedded":
            said = f"{advice.family}: --dtype {advice.dtype} --cuda-graphs {advice.graphs}{note}"
        else:
            said = (
                f"{advice.family}: --attention-backend {advice.attention}, for a tree {advice.tree_attention}; "
                f"--grammar-backend {advice.grammar}{note}"
            )
        lines.setdefault(f"{advice.card}; {said}", []).append(str(advice.index))
    for line, indices in lines.items():
        yield f"GPU {','.join(indices)}", line
