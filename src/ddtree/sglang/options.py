"""The plug-in's options: flags of `sglang serve`, kept in the environment, which SGLang's processes inherit."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddtree.errors import InvalidOption
from ddtree.kernels import PlanRow
from ddtree.kernels.build import MOST_DEPTHS, MOST_RANKS, MOST_ROWS

MODES = ("linear", "shadow-linear", "tree")
PAIRWISE = ("auto", "on", "off")
TEXTS = ("mode", "pairwise")  # options that are no number
REQUEST_FIELDS = ("ddtree_mode", "ddtree_budget")  # keys of a request's custom_params
HELP = {
    "mode": "DDTREE: linear is SGLang's own DFLASH chain; tree verifies a draft tree; shadow-linear verifies both, "
    "commits the chain and counts what the tree would have accepted. Default: tree.",
    "budget": "DDTREE: nodes of the tree, the root not counted. Default: 31.",
    "top_k": "DDTREE: candidate tokens per depth that the tree may use. Default: 8.",
    "pairwise": "DDTREE: whether trees go by the pairwise head of the drafter's folder: auto, if it has one; on, and a "
    "drafter without one is refused; off. A chain never does. Default: auto.",
}


@dataclass(frozen=True)
class Options:
    """What a server was started with."""

    mode: str = "tree"
    budget: int = 31  # nodes without the root; 31 + 1 rows fill a tile
    top_k: int = 8
    pairwise: str = "auto"  # what it is asked to be; the worker's `pairs` are what it is

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InvalidOption(f"{told('mode')}: {self.mode!r} is unknown, choose one of {', '.join(MODES)}")
        if self.pairwise not in PAIRWISE:
            raise InvalidOption(
                f"{told('pairwise')}: {self.pairwise!r} is unknown, choose one of {', '.join(PAIRWISE)}"
            )
        if self.pairwise == "on" and self.mode == "linear":
            raise InvalidOption(f"{told('pairwise')} on is for trees, and mode linear has none: leave it at auto")
        for name, most in (("budget", MOST_ROWS - 1), ("top_k", MOST_RANKS)):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise InvalidOption(f"{told(name)} must be from 1 to {most}, not {value}")

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> "Options":
        """From the environment, where the flags leave theirs. Raises InvalidOption."""
        found: dict[str, Any] = {}
        for name in HELP:
            text = environment.get(variable(name), "")
            if text:
                found[name] = text if name in TEXTS else _whole(name, text)
        return cls(**found)

    def rows(self, block: int) -> int:
        """Rows that the target verifies for one request, the root included. block: the drafter's block size.

        At least a block of them, whatever the budget: SGLang reserves slots by this number, and the drafter's block
        is written to slots too; those behind what is reserved may be another request's.
        Raises InvalidOption where they do not fit the kernels.
        """
        if self.mode == "linear":
            return block
        if not 2 <= block <= MOST_DEPTHS + 1:
            raise InvalidOption(
                f"a tree needs a drafter's block of 2 to {MOST_DEPTHS + 1} tokens, not {block}: set "
                f"--speculative-num-draft-tokens, or {_flag('mode')} linear"
            )
        rows = max(1 + self.budget, block) if self.mode == "tree" else block + self.budget
        if rows > MOST_ROWS:
            raise InvalidOption(
                f"a block of {block} and a budget of {self.budget} make {rows} rows; at most {MOST_ROWS} can be "
                f"verified: lower {told('budget')}"
            )
        return rows

    def plan(self, custom: Mapping[str, Any] | None, block: int) -> PlanRow:
        """What one request verifies; its custom_params may narrow what the server was started with.

        Raises InvalidOption for values that this server cannot honour.
        """
        custom = custom or {}
        mode, budget = custom.get("ddtree_mode", self.mode), custom.get("ddtree_budget", self.budget)
        if mode not in MODES:
            raise InvalidOption(f"ddtree_mode {mode!r} is unknown: choose one of {', '.join(MODES)}")
        if isinstance(budget, bool) or not isinstance(budget, int) or not 1 <= budget <= self.budget:
            raise InvalidOption(f"ddtree_budget must be a whole number from 1 to {self.budget}, not {budget!r}")
        plan = PlanRow(tree=mode != "linear", chain=mode != "tree", budget=budget, ranks=self.top_k, depth=block - 1)
        if plan.rows > self.rows(block):
            raise InvalidOption(
                f"ddtree_mode {mode} needs {plan.rows} rows, but this server verifies {self.rows(block)}: start it "
                f"with {_flag('mode')} {mode}, or ask for a smaller ddtree_budget"
            )
        return plan

    def granted(self, custom: Any, block: int) -> PlanRow:
        """As plan; the server's own for a request that is refused: with overlap it has a round before it is gone."""
        return self.plan(None if self.refusal(custom, block) else custom, block)

    def refusal(self, custom: Any, block: int) -> str | None:
        """Why a request cannot be served as it asks; None where it can."""
        if custom is not None and not isinstance(custom, Mapping):
            return f"custom_params must be an object with names and values, not {custom!r}"
        if not any(name in (custom or {}) for name in REQUEST_FIELDS):
            return None
        if self.mode == "linear":
            return (
                None
                if (custom or {}).get("ddtree_mode") == "linear"
                else (f"this server was started with {told('mode')} linear: requests cannot ask for trees")
            )
        try:
            self.plan(custom, block)
        except InvalidOption as error:
            return str(error)
        return None


def variable(name: str) -> str:
    """The environment's name of an option."""
    return f"DDTREE_SGLANG_{name.upper()}"


_before: dict[str, str | None] = {}  # variables that flags of this process have set: what they were


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give SGLang's parser the plug-in's flags. Those of an earlier server, parsed in this process, end with it."""
    for name, was in _before.items():
        if was is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = was
    _before.clear()
    parser.add_argument(_flag("mode"), choices=MODES, action=_ToEnvironment, help=HELP["mode"])
    for name in ("budget", "top_k"):
        parser.add_argument(_flag(name), type=int, action=_ToEnvironment, help=HELP[name])
    parser.add_argument(_flag("pairwise"), choices=PAIRWISE, action=_ToEnvironment, help=HELP["pairwise"])


class _ToEnvironment(argparse.Action):
    """ServerArgs drops flags that are no field of it; the processes that SGLang starts inherit the environment."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values)
        name = variable(self.dest.removeprefix("speculative_ddtree_"))
        _before.setdefault(name, os.environ.get(name))
        os.environ[name] = str(values)


def _flag(name: str) -> str:
    return f"--speculative-ddtree-{name.replace('_', '-')}"


def told(name: str) -> str:
    """An option as messages call it."""
    return f"{_flag(name)} (${variable(name)})"


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidOption(f"{told(name)} must be a whole number, not {text!r}") from None
