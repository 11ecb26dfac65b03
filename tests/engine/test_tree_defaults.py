"""A tree's budget and ranks that nobody chose follow the device; a chosen number always wins."""

from dataclasses import replace

import pytest
import torch

from ddtree import config
from ddtree.config import MODES, EngineConfig, SamplingParams, Speculation
from ddtree.errors import InvalidOption
from scripted import ScriptedDrafter, ScriptedTarget, engine_for, scripted_engine


def numbers(speculation: Speculation) -> tuple[int, int]:
    return speculation.tree_budget, speculation.tree_top_k


@pytest.mark.parametrize("mode", MODES)
def test_what_is_left_out_follows_the_device_and_what_is_given_stays(mode):
    assert numbers(Speculation(mode).settled("cpu")) == (5, 8)
    assert numbers(Speculation(mode).settled("cuda")) == (15, 16)
    assert numbers(Speculation(mode, tree_budget=5).settled("cuda")) == (5, 16)
    assert numbers(Speculation(mode, tree_top_k=8).settled("cuda")) == (15, 8)
    assert numbers(Speculation(mode, 63, 4).settled("cpu")) == (63, 4)
    assert numbers(Speculation(mode).settled("some other device")) == (5, 8)
    settled = Speculation(mode, tree_spine=3, tree_context="off").settled("cuda")
    assert settled == Speculation(mode, 15, 16, 3, "off")


def test_settling_twice_and_other_modes_of_it_change_nothing():
    settled = Speculation("tree").settled("cpu")
    assert numbers(settled.settled("cuda")) == (5, 8)
    assert numbers(replace(settled, mode="linear").settled("cuda")) == (5, 8)
    assert numbers(replace(Speculation("tree"), mode="shadow-linear").settled("cuda")) == (15, 16)


def test_a_budget_that_nobody_chose_fits_the_largest():
    assert EngineConfig(max_tree_budget=3).largest_budget == 3
    assert numbers(Speculation().settled("cpu", 3)) == (3, 8)
    assert numbers(Speculation().settled("cuda", 12)) == (12, 16)
    with pytest.raises(InvalidOption, match="max_tree_budget must be from 5"):
        EngineConfig(speculation=Speculation(tree_budget=5), max_tree_budget=3)
    with pytest.raises(InvalidOption, match="max_tree_budget must be from 1"):
        EngineConfig(max_tree_budget=0)
    engine = engine_for(1, config={"max_tree_budget": 3}, mode="tree")
    assert engine.speculation.tree_budget == 3
    engine.check([0], SamplingParams(), Speculation("tree"))
    assert engine.generate([[0]], [SamplingParams(max_tokens=6, seed=1)], Speculation("tree"))[0].token_ids


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_context_auto_follows_the_device_too(device, monkeypatch):
    monkeypatch.setitem(config.CONTEXTS, device, "branch")
    assert Speculation(tree_context="auto").settled(device).tree_context == "branch"
    assert Speculation(tree_context="mix").settled(device).tree_context == "mix"
    assert Speculation(tree_context="off").settled(device).tree_context == "off"
    assert Speculation(tree_context="auto").settled("some other device").tree_context == "off"


def test_an_engine_tells_the_numbers_of_its_device():
    assert engine_for(1).info()["speculation"] == {
        "mode": "tree", "tree_budget": 5, "tree_top_k": 8, "tree_spine": 0, "tree_context": "off",
    }  # fmt: skip


def test_every_request_is_settled_by_the_engine_that_runs_it(monkeypatch):
    monkeypatch.setitem(config.TREES, "cpu", (3, 2))
    engine = engine_for(1, mode="linear")
    assert numbers(engine.speculation) == (3, 2)
    for asked, expected in [
        (Speculation("tree"), (3, 2)),
        (Speculation("tree", tree_budget=5), (5, 2)),
        (Speculation("shadow-linear", tree_top_k=4), (3, 4)),
    ]:
        request = engine.scheduler.add([0], SamplingParams(), asked)
        assert numbers(request.lane.speculation) == expected
        engine.scheduler.abort(request)


def test_an_engine_on_a_gpu_takes_the_gpu_s(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**33, 2**33))
    target = ScriptedTarget(lambda history: [0.0] * 4, 4)
    target.spec = replace(target.spec, device=torch.device("cuda"))
    drafter = ScriptedDrafter(lambda history: [[0.0] * 4] * 3, 4)
    engine = scripted_engine(target, drafter, mode="shadow-linear")
    assert engine.info()["speculation"] == {
        "mode": "shadow-linear", "tree_budget": 15, "tree_top_k": 16, "tree_spine": 0, "tree_context": "off",
    }  # fmt: skip
    assert numbers(engine.settled(Speculation("tree", tree_budget=15))) == (15, 16)
    assert numbers(scripted_engine(target, drafter, tree_budget=7).speculation) == (7, 16)
    assert numbers(engine.without_drafter().speculation) == (15, 16)
