"""Whether the table of confidences by match length (ddtree.tree.matches) is still right for a drafter, by replay.

    OMP_NUM_THREADS=1 python benchmarks/context_replay.py --keep proposals.pt
    OMP_NUM_THREADS=1 python benchmarks/context_tables.py --proposals proposals.pt --output FILE

Measured by expectation: how often what a match says is true beyond what the drafter expected, along the answers of the
half of the suite that may be used for tuning. Then `mix` is replayed with that table, with the present one moved up and
down (as logits), and with other weights; what each gains in acceptance length over the present one, on both halves.
"""

from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from common import finish, machine, parser
from context_replay import Record, rounds
from ddtree.config import Speculation
from ddtree.tree import Matches, TextIndex, matches

BUDGETS, RANKS, DEPTH, TURNS = (5, 8, 16, 32), 8, 5, 50
Table = tuple[float, ...]


def measured(records: Sequence[Record]) -> Table:
    """The mixture's weight of each level that explains these answers best."""
    seen: list[list[tuple[bool, float]]] = [[] for _ in matches._START]
    for record in records:
        index = TextIndex(record.prompt + record.answer[:1])
        for place in range(1, len(record.answer)):
            found, ahead = Matches(index), record.answer[place : place + DEPTH]
            for depth, token in enumerate(ahead[: len(record.tokens[place - 1])]):
                match = found.behind(tuple(ahead[:depth]))
                if match is not None:
                    row, scores = record.tokens[place - 1][depth][:RANKS], record.log_q[place - 1][depth]
                    share = exp(scores[row.index(match.token)]) if match.token in row else 0.0
                    seen[matches.LEVELS[min(match.length, matches.LONGEST)]].append((match.token == token, share))
            index.append([record.answer[place]])
    table = list(matches._START)
    for level, cases in enumerate(seen):
        for _ in range(TURNS if cases else 0):
            c = table[level]
            table[level] = mean(c / (c + (1 - c) * share) if hit else 0.0 for hit, share in cases)
    return tuple(min(max(c, 0.02), 0.95) for c in table)


def moved(table: Table, by: float) -> Table:
    """Every confidence with its logit moved."""
    return tuple(1 / (1 + exp(-(log(c / (1 - c)) + by))) for c in table)


def lengths(records: Sequence[Record], table: Table, weight: float) -> list[float]:
    """Acceptance length of every budget with a table in place of the present one."""
    present = matches._START, matches._WEIGHT
    matches._START, matches._WEIGHT = table, weight  # type: ignore[assignment]
    try:
        return [
            sum(len(record.answer) - 1 for record in records)
            / sum(rounds(record, Speculation("tree", budget, RANKS, tree_context="mix")) for record in records)
            for budget in BUDGETS
        ]
    finally:
        matches._START, matches._WEIGHT = present  # type: ignore[assignment]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--proposals", type=Path, required=True, help="what context_replay.py --keep wrote")
    args = options.parse_args()
    kept: dict[float, list[Record]] = torch.load(args.proposals, weights_only=False)
    report: dict[str, Any] = machine() | {"budgets": BUDGETS, "temperatures": {}}
    present, weight = matches._START, matches._WEIGHT
    own = {heat: measured([record for record in kept[heat] if not record.held_out]) for heat in kept}
    tables = {f"measured at {heat:g}": (table, weight) for heat, table in own.items()}
    tables |= {f"moved {by:+g}": (moved(present, by), weight) for by in (-1, -0.5, 0.5, 1)}
    tables |= {f"weight {other}": (present, other) for other in (4, 16, 32)}
    for heat, records in kept.items():
        halves = {"tuning": [r for r in records if not r.held_out], "held out": [r for r in records if r.held_out]}
        base = {half: lengths(part, present, weight) for half, part in halves.items()}
        report["temperatures"][f"{heat:g}"] = {"measured": [round(c, 3) for c in own[heat]]} | {
            name: {
                half: round(mean(n / b for n, b in zip(lengths(part, *table), base[half], strict=True)) - 1, 4)
                for half, part in halves.items()
            }
            for name, table in tables.items()
        }
    finish(report, args.output)


if __name__ == "__main__":
    main()
