"""CUDA graphs on a CPU: a graph is its steps, and a replay runs them again into the tensors of the capture."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from ddtree.engine import graphs, runner


def tensors(value: Any) -> list[Tensor]:
    """Every tensor of a result."""
    return [value] if isinstance(value, Tensor) else list(vars(value).values())


class FakeGraph:
    """Stands for graphs.Recorded. `events`: what was captured and replayed, in order, by number of capture."""

    def __init__(self, events: list[str], step: Callable[[], Any]) -> None:
        self._events, self._step = events, step
        self._name = str(sum(event.startswith("capture") for event in events))
        events.append(f"capture {self._name}")
        self.result = step()
        for tensor in tensors(self.result):
            tensor.fill_(-99)  # a capture computes nothing

    def replay(self) -> None:
        """Run the steps; what they give goes where a graph's results lie."""
        self._events.append(f"replay {self._name}")
        for there, found in zip(tensors(self.result), tensors(self._step()), strict=True):
            there.copy_(found)


@contextmanager
def fake_graphs(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A runner's graphs are fakes; what they do, in order."""
    events: list[str] = []
    patch.setattr(graphs, "Recorded", lambda step, pool: FakeGraph(events, step))
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    patch.setattr(runner.DeviceRunner, "__init__", _with_graphs(runner.DeviceRunner.__init__))
    yield events


def _with_graphs(made: Callable[..., None]) -> Callable[..., None]:
    def init(self: runner.DeviceRunner, target: Any, drafter: Any, store: Any, graphs: bool, context: int) -> None:
        made(self, target, drafter, store, True, context)

    return init
