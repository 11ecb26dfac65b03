"""Where a GPU's memory runs short."""

import pytest
import torch

from ddtree.engine import pressure
from ddtree.engine.pressure import short, starved
from ddtree.plan import Memory, MemoryPlan, Part

CARD = torch.device("cuda", 0)
PLAN = MemoryPlan((
    Part("target_weights", 700, there=True), Part("attention", 1), Part("logits", 20), Part("states", 300),
    Part("prefill", 4000), Part("graphs", 50_000),
))  # fmt: skip


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
