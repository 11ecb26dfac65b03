"""Seconds of a round's stages. On a GPU by events, which are read once they have passed: nothing waits for them."""

import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

STAGES = ("draft", "build", "verify", "accept", "commit")  # as the engine's


class StageClock:
    """Marks the end of each stage; tells `count` of a stage and its seconds. Without `count` it does nothing."""

    def __init__(self, device: torch.device | str, count: Callable[[str, float], None] | None) -> None:
        self._count, self._cuda = count, torch.device(device).type == "cuda"
        self._round: list[tuple[str, Any]] = []
        self._past: deque[list[tuple[str, Any]]] = deque()

    def start(self) -> None:
        """Begin a round; count those that are over."""
        if self._count is None:
            return
        if self._round:
            self._past.append(self._round)
        while self._past and self._over(self._past[0]):
            done = self._past.popleft()
            for (_, before), (stage, after) in pairwise(done):
                self._count(stage, before.elapsed_time(after) / 1000 if self._cuda else after - before)
        self._round = []
        self.mark("")

    def mark(self, stage: str) -> None:
        """The stage is launched."""
        if self._count is None:
            return
        moment: Any = time.perf_counter()
        if self._cuda:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        self._round.append((stage, moment))

    def _over(self, marks: list[tuple[str, Any]]) -> bool:
        return not self._cuda or bool(marks[-1][1].query())
