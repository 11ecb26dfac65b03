"""Stage times, for whoever asks. Without an observer nothing is timed and nothing is synchronised."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

STAGES = ("prefill", "draft", "build", "verify", "accept", "commit")


class Observer(Protocol):
    """Sees a stage begin and end."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """A context around one stage; `name` is one of STAGES."""


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


class Unobserved:
    """The observer that is there when nobody asked."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
