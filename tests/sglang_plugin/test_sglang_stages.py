"""Stage times, which must wait for nothing."""

import time

import pytest

from ddtree.sglang.stages import StageClock


def test_without_a_reader_nothing_is_timed() -> None:
    clock = StageClock("cpu", None)
    clock.start()
    clock.mark("draft")
    assert clock._round == []


def test_each_stage_has_its_own_time() -> None:
    told: list[tuple[str, float]] = []
    clock = StageClock("cpu", lambda stage, seconds: told.append((stage, seconds)))
    clock.start()
    time.sleep(0.02)
    clock.mark("draft")
    clock.mark("verify")
    assert told == []
    clock.start()
    assert [stage for stage, _ in told] == ["draft", "verify"]
    assert told[0][1] >= 0.02 > told[1][1] >= 0


def test_rounds_on_a_gpu_are_read_when_they_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        made: list["Event"] = []  # noqa: RUF012

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.over, self.place = False, len(self.made)
            self.made.append(self)

        def record(self) -> None: ...

        def query(self) -> bool:
            return self.over

        def elapsed_time(self, other: "Event") -> float:
            return 250.0 * (other.place - self.place)

    monkeypatch.setattr("torch.cuda.Event", Event)
    told: list[tuple[str, float]] = []
    clock = StageClock("cuda", lambda stage, seconds: told.append((stage, seconds)))
    for _ in range(3):
        clock.start()
        clock.mark("draft")
    assert told == []  # nobody waited
    for event in Event.made:
        event.over = True
    clock.start()
    assert told == [("draft", 0.25)] * 3
