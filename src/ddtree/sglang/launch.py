"""The command that starts SGLang with DDTREE on a card. Nothing is imported from SGLang, which may not be there."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from ddtree.errors import InvalidOption
from ddtree.sglang import compat
from ddtree.sglang.options import MODES, Options

SM120 = (12, 0)
GRAMMARS = ("xgrammar", "llguidance")  # in the order in which they are taken; SGLang's own default is the first


@dataclass(frozen=True)
class Launch:
    """What a user chose; what SGLang names alike is passed through as it is."""

    target: str  # a folder or hub id
    drafter: str | None  # the same; None: plain decoding
    mode: str = "tree"  # or "ar": plain decoding
    budget: int = Options.budget
    top_k: int = Options.top_k
    context: int | None = None
    pairwise: str = Options.pairwise

    def __post_init__(self) -> None:
        if self.mode == "ar":
            if self.pairwise == "on":
                raise InvalidOption("draft_pairwise on needs a drafter, and mode ar has none: leave it at auto")
        else:
            Options(self.mode, self.budget, self.top_k, self.pairwise)  # refuses what it does not know
            if self.drafter is None:
                raise InvalidOption(f"mode {self.mode} needs a drafter: --drafter FOLDER_OR_HUB_ID", param="mode")


def command(launch: Launch, card: tuple[int, int], passed: Sequence[str], grammars: Sequence[str]) -> list[str]:
    """The words of the command.

    Args:
        card: compute capability of the (first) GPU.
        passed: words that go to SGLang as they are; a flag that is named there is not chosen here.
        grammars: those of GRAMMARS that are installed.
    """
    words = [sys.executable, "-m", "sglang.launch_server", "--model-path", launch.target]
    if launch.context is not None:
        words += ["--context-length", str(launch.context)]
    if launch.mode in MODES:
        words += ["--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(launch.drafter)]
        words += ["--speculative-ddtree-mode", launch.mode]
        words += ["--speculative-ddtree-budget", str(launch.budget), "--speculative-ddtree-top-k", str(launch.top_k)]
        words += ["--speculative-ddtree-pairwise", launch.pairwise]
    trees = launch.mode in ("tree", "shadow-linear")
    # fa3 and trtllm take no mask of a tree; and trtllm's kernels are for SM100 and SM103, not for SM120.
    if (trees or card >= SM120) and not _named(passed, "--attention-backend"):
        words += ["--attention-backend", "triton"]
    if GRAMMARS[0] not in grammars and not _named(passed, "--grammar-backend"):
        words += ["--grammar-backend", next((name for name in GRAMMARS if name in grammars), "none")]
    return [*words, *passed]


def check() -> None:
    """Raises InvalidOption where SGLang is missing, or not a release that the plug-in knows."""
    if find_spec("sglang") is None:
        raise InvalidOption("--engine sglang needs SGLang, which is not installed here: pip install 'ddtree[sglang]'")
    problem = compat.problem(compat.installed())
    if problem is not None:
        raise InvalidOption(problem)


def installed_grammars() -> list[str]:
    """Those of GRAMMARS that can be imported."""
    return [name for name in GRAMMARS if find_spec(name) is not None]


def value(words: Sequence[str], flag: str) -> str | None:
    """What the last `flag` among the words is set to."""
    found = None
    for place, word in enumerate(words):
        if word == flag and place + 1 < len(words):
            found = words[place + 1]
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def _named(passed: Sequence[str], flag: str) -> bool:
    return any(word == flag or word.startswith(f"{flag}=") for word in passed)
