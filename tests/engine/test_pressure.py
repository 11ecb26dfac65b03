"""Where a GPU's memory runs short."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddtree.engine import pressure
from ddtree.engine.graphs import aside, recording
from ddtree.engine.pressure import short, starved
from ddtree.engine.runner import DeviceRunner
from ddtree.engine.shapes import Shape
from ddtree.engine.static import StaticBatches
from ddtree.plan import Memory, MemoryPlan, Part

CARD = torch.device("cuda", 0)
PLAN = MemoryPlan((
    Part("target_weights", 700, there=True), Part("attention", 1), Part("logits", 20), Part("states", 300),
    Part("prefill", 4000), Part("graphs", 50_000),
))  # fmt: skip
SHAPE = Shape(batch=1, width=4, depth=3, ranks=2, shadows=False, ends=8)


@pytest.mark.parametrize(("free", "found"), [(4320, True), (4321, False), (10**9, False)])
def test_what_comes_and_goes_has_to_find_room(free: int, found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure, "device_memory", lambda device: Memory("cuda:0", free, 10**9))
    assert short(CARD, PLAN) == found
    assert not short(torch.device("cpu"), PLAN)
    assert not short(CARD, None), "an engine that shares another's caches"


def test_an_error_behind_which_memory_ran_out() -> None:
    memory, other = torch.OutOfMemoryError("5 GiB"), RuntimeError("operation failed")
    assert starved(memory)
    assert not starved(other)
    other.__context__ = memory
    assert starved(other)
    later = RuntimeError("again")
    later.__cause__ = other
    assert starved(later)


@pytest.mark.parametrize("said", ["CUDA error: out of memory\nCompile with ...", "Triton Error [CUDA]: out of memory"])
def test_memory_that_cuda_itself_lacks_counts_as_well(said: str) -> None:
    """For a graph's nodes or a kernel's code; the errors are not torch's OutOfMemoryError."""
    assert starved(RuntimeError(said))


class Attempts:
    """Stands for what allocates: the first time it fails, with a tensor in its hands."""

    def __init__(self, give: Callable[..., Any]) -> None:
        self.kept: list[bool] = []  # whether what earlier ones had allocated was there still, by attempt
        self._give, self._made = give, weakref.WeakSet[torch.Tensor]()

    def __call__(self, *asked: Any) -> Any:
        self.kept.append(len(self._made) > 0)
        held = torch.zeros(4)
        self._made.add(held)
        if len(self.kept) == 1:
            raise torch.OutOfMemoryError("tried to allocate 5 GiB")
        return self._give(*asked)


def test_a_second_attempt_finds_what_the_first_one_had_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error keeps the frames that it went through, and they their tensors: it must be gone by then."""
    batch = SimpleNamespace(ends=torch.zeros(1))
    make = Attempts(lambda shape: SimpleNamespace(shape=shape, stays=False, batch=batch))
    kept = StaticBatches(make)
    assert kept.get(SHAPE).shape == SHAPE
    assert make.kept == [False, False]

    runner = DeviceRunner(None, None, None, True, 64)  # type: ignore[arg-type]
    capture = Attempts(lambda captured: None)
    monkeypatch.setattr(runner, "_capture", capture)
    monkeypatch.setattr(runner._made, "give_up", lambda but: 1)
    captured: Any = SimpleNamespace(shape=SHAPE, starved=False)
    assert runner._finds_memory(captured)
    assert capture.kept == [False, False]


def test_a_batch_that_is_given_up_for_the_next_one_is_kept_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    runner: Any = DeviceRunner(None, None, None, True, 64)  # type: ignore[arg-type]
    captured, seen = SimpleNamespace(batch=object()), []
    runner._current = object()
    monkeypatch.setattr(runner._made, "get", lambda shape: seen.append(runner._current) or captured)
    monkeypatch.setattr(runner, "_tell", lambda *told: None)
    lane = SimpleNamespace(rows=4, depth=3, ranks=2, mode=SimpleNamespace(shadows=False), text=None)
    assert runner.make([SimpleNamespace(lane=lane, ends=())], None) is captured.batch
    assert seen == [None]
    assert runner._current is captured


class Stream:
    """Stands for a stream; what it waits for."""

    def __init__(self) -> None:
        self.waits: list[Stream] = []

    def wait_stream(self, other: "Stream") -> None:
        self.waits.append(other)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """A card that is none; the last of these is the current stream."""
    current = [Stream()]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before = current[-1]
        current.append(stream)
        try:
            yield
        finally:
            current.append(before)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    return current


def test_what_runs_aside_is_waited_for_where_memory_runs_out_too(streams: list[Stream]) -> None:
    """It writes state, workspaces and counters that the next launches use, and these come at once."""
    own = []

    def launch() -> None:
        with aside():
            own.append(streams[-1])
            raise torch.OutOfMemoryError("tried to allocate 5 GiB")

    with pytest.raises(torch.OutOfMemoryError):
        launch()
    assert own[0] is not streams[0]
    assert streams[-1] is streams[0]
    assert streams[0].waits == own


def test_a_recording_that_cannot_be_ended_leaves_the_stream_that_was(
    streams: list[Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __init__(self, graph: object, **options: object) -> None:
            pass

        def __enter__(self) -> None:
            streams.append(Stream())

        def __exit__(self, *error: object) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "graph", Broken)
    with pytest.raises(RuntimeError, match="previous error"), recording(object()):  # type: ignore[arg-type]
        raise torch.OutOfMemoryError("tried to allocate 5 GiB")
    assert streams[-1] is streams[0]
