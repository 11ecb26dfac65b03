"""Stage times, for whoever asks. Without an observer nothing is timed and nothing is synchronised."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

STAGES = ("prefill", "draft", "build", "verify", "accept", "commit")

WAYS = (
    "host",  # trees laid and tokens chosen by the host
    "graph",  # one CUDA graph
    "two graphs",  # with the host's part in between
    "launches",  # the kernels of those, launched one by one
)


@dataclass(frozen=True)
class RoundRecord:
    """What one round of a batch did."""

    batch: int  # sequences
    rows: int  # verified, roots included
    drafted: int  # nodes verified, roots excluded
    accepted: list[int]  # nodes per sequence
    depths: list[int]  # of the deepest node per sequence
    modes: list[str]  # per sequence
    committed: int  # tokens, after cuts at ends
    seconds: float
    waiting: int  # requests in the queue
    ran: str = "host"  # how: one of WAYS


class Observer(Protocol):
    """Sees a stage begin and end, and what came of a round."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """A context around one stage; `name` is one of STAGES."""

    def round(self, record: RoundRecord) -> None:
        """A round has ended."""


class StageTimer:
    """Adds up seconds by stage. On a GPU it waits for the device at both ends of a stage, so it slows what it times."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time one stage."""
        started = _now()
        yield
        self.seconds[name] += _now() - started

    def round(self, record: RoundRecord) -> None:
        """Nothing: this one looks at stages alone."""


class Unobserved:
    """The observer that is there when nobody asked."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def round(self, record: RoundRecord) -> None:
        """Nothing."""


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
