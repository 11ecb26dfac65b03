"""What a bench run is asked for: prompts, variants, options. Imports nothing heavy, so a mistake is told at once."""

import json
from dataclasses import dataclass, replace
from importlib.resources import files

from ddtree.config import MODES, SamplingParams, Speculation
from ddtree.errors import InvalidOption

CATEGORIES = ("code", "json", "maths", "chat", "summary", "rewriting", "extraction")


@dataclass(frozen=True)
class Prompt:
    """One user message of the suite."""

    id: str
    category: str
    prompt: str


@dataclass(frozen=True)
class Plan:
    """A bench run: every prompt is answered by every variant, `repeat` times."""

    prompts: tuple[Prompt, ...]
    variants: dict[str, Speculation]  # by the name it has in the report: a mode, or tree@BUDGET
    sampling: SamplingParams
    repeat: int = 1


def load_prompts(limit: int | None = None) -> tuple[Prompt, ...]:
    """The suite's first `limit` prompts (all by default); categories take turns, so that a short run has all kinds."""
    text = files("ddtree.bench").joinpath("prompts.jsonl").read_text(encoding="utf-8")
    prompts = tuple(Prompt(**json.loads(line)) for line in text.splitlines())
    if limit is not None and not 1 <= limit <= len(prompts):
        raise InvalidOption(
            f"limit must be from 1 to {len(prompts)}, the prompts of the suite, not {limit}", param="limit"
        )
    return prompts[:limit]


def make_plan(
    modes: str,
    budgets: str | None,
    base: Speculation,
    sampling: SamplingParams,
    limit: int | None = None,
    repeat: int = 1,
) -> Plan:
    """A plan from what the user typed: `modes` "ar,tree"; `budgets` "7,15" adds the variants tree@7 and tree@15.

    `base` gives the tree's settings for every variant. Raises `InvalidOption` with the value at fault.
    """
    if repeat < 1:
        raise InvalidOption(f"repeat must be at least 1, not {repeat}", param="repeat")
    names = [name.strip() for name in modes.split(",")]
    unknown = [name for name in names if name not in MODES]
    if unknown:
        raise InvalidOption(
            f"modes holds {unknown[0]!r}: give some of {','.join(MODES)}, separated by commas", param="modes"
        )
    variants = {name: replace(base, mode=name) for name in names}
    for budget in budgets.split(",") if budgets is not None else ():
        try:
            speculation = replace(base, mode="tree", tree_budget=int(budget))
        except ValueError as error:
            raise InvalidOption(
                f"budgets holds {budget!r}: give whole numbers such as 7,15,31", param="budgets"
            ) from error
        variants[f"tree@{speculation.tree_budget}"] = speculation
    return Plan(load_prompts(limit), variants, sampling, repeat)
