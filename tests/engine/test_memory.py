"""What an engine's memory plan counts, against what is really allocated; what does not fit is refused at the start."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddtree.config import EngineConfig, Speculation
from ddtree.drafter import DFlashDrafter
from ddtree.engine import Engine
from ddtree.engine import memory as planning
from ddtree.engine.memory import LIBRARIES, Planner, tensor_bytes
from ddtree.errors import InvalidOption
from ddtree.kernels import backend
from ddtree.layers import Workspaces
from ddtree.plan import GIB, MIB, Load, Memory
from ddtree.target import LlamaTarget
from dflash_reference import BASE, random_tensors, save_checkpoint
from llama_oracle import random_llama
from scripted import CharText, ScriptedTarget, engine_for, scripted_engine

CPU = torch.device("cpu")
KEYS = [
    "target_weights", "drafter_weights", "target_context", "drafter_context",
    "attention", "logits", "states", "prefill",
]  # fmt: skip


def llama() -> torch.nn.Module:
    return random_llama(vocab_size=61, hidden_size=32, num_hidden_layers=6, max_position_embeddings=512)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaTarget, DFlashDrafter, Path]:
    folder, drafter_folder = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    llama().save_pretrained(folder)
    save_checkpoint(drafter_folder, BASE, random_tensors(BASE))
    target = LlamaTarget.load(folder, torch.float32, CPU)
    sizes = (target.spec.vocab_size, target.spec.hidden_size, target.spec.num_layers)
    drafter = DFlashDrafter.load(drafter_folder, target.embed, target.head, sizes, torch.float32, CPU)
    target.tap(drafter.config.target_layer_ids)
    return target, drafter, drafter_folder


def engine(models, **config) -> Engine:
    return Engine(models[0], models[1], CharText([]), EngineConfig(**config))  # type: ignore[arg-type]


def test_caches_take_what_was_planned(models):
    made = engine(models, max_running_requests=3, max_model_len=100, max_tree_budget=20)
    plan, store = made.info()["memory"], made._store
    assert [*plan] == [*KEYS, "total"]
    assert plan["total"] == sum(plan[key] for key in KEYS)
    assert plan["target_context"] == store.cache.data.nbytes
    assert plan["drafter_context"] == store.drafter_cache.data.nbytes
    assert all(plan[key] > 0 for key in KEYS)
    assert made.without_drafter().info()["memory"] == plan, "it shares the memory"


def test_weights_are_those_of_the_files_and_what_is_derived_from_them(models):
    target, drafter, folder = models
    stored = sum(tensor.nbytes for tensor in random_tensors(BASE).values())
    assert stored <= tensor_bytes(drafter) < stored + 4096, folder
    parameters = sum(parameter.nbytes for parameter in llama().parameters())
    assert parameters <= tensor_bytes(target) < parameters + 4096


def test_what_several_hold_counts_once():
    class Holder:
        pass

    Holder.__module__ = "ddtree.of_a_test"
    weight, one = torch.zeros(100), Holder()
    one.parts = [weight, weight[:50], {"again": weight}, (torch.zeros(7),), one]
    assert tensor_bytes(one) == 107 * 4


@pytest.mark.parametrize("drafts", [True, False])
def test_attention_by_kernels_takes_what_was_planned(models, drafts, monkeypatch):
    monkeypatch.setattr(backend, "KINDS", {"cpu"})
    target, drafter = models[0], models[1] if drafts else None
    planner, load = Planner(target, drafter, 128, None), Load(requests=3, context=300, budget=40)
    length, rows = planner.length(load), planner.rows(load)
    caches = [target.allocate(4, length)] + ([drafter.allocate(4, length)] if drafter else [])
    works = [Workspaces().get(4, rows, target.heads, caches[0])]  # three sequences are padded to four
    if drafter:
        drafter._device_place(caches[1], 4, drafter.config.block_size, torch.zeros(4, dtype=torch.int64), attends=True)
        works += drafter._work._made.values()
    tables = [target.rope.turns(torch.arange(length))] + ([drafter._turns] if drafter else [])
    taken = sum(t.nbytes for work in works for t in vars(work).values() if isinstance(t, torch.Tensor))
    assert planner(load).facts()["attention"] == taken + sum(table.nbytes for table in tables)


def test_a_plan_grows_with_every_number_of_its_load(models):
    for kinds, speculation in [(set(), None), ({"cpu"}, Speculation("shadow-linear", 15))]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "KINDS", kinds)
            planner = Planner(models[0], models[1], 64, speculation)
            load = Load(3, 300, 40)
            for name in ("requests", "context", "budget"):
                sizes = [planner(replace(load, **{name: value})).total for value in range(1, 100)]
                assert sizes == sorted(sizes), (kinds, name)
                assert sizes[0] < sizes[-1]


def test_graphs_and_libraries_are_lines_of_their_own(models, monkeypatch):
    monkeypatch.setattr(planning, "usable", lambda device: True)
    monkeypatch.setattr(models[0], "spec", replace(models[0].spec, device=torch.device("cuda")))
    monkeypatch.setattr(models[0], "allocate", models[1].allocate)  # a cache that is here
    plan = Planner(models[0], models[1], 64, Speculation("tree", 31, 16))(Load(5, 300, 64))
    assert plan.facts()["libraries"] == LIBRARIES
    graphs = next(part for part in plan.parts if part.name == "graphs")
    assert graphs.note == "rounds of up to 8 x 32 rows"
    logits = 61 * 32 * 4
    assert graphs.size > (8 + 4 + 2 + 1) * logits
    single = Planner(models[0], models[1], 64, None)(Load(5, 300, 64))
    pool = plan.facts()["prefill"] - single.facts()["prefill"]
    assert pool > 128 * models[0].config.intermediate_size * 4, "graphs of prompts have a pool of their own"


def test_an_engine_that_does_not_fit_is_refused_before_its_caches_are_made(models, monkeypatch):
    allocated = []
    monkeypatch.setattr(planning, "device_memory", lambda device: Memory("cuda:0", 20 * MIB, GIB))
    monkeypatch.setattr("ddtree.engine.engine.device_memory", planning.device_memory)
    allocate = LlamaTarget.allocate
    monkeypatch.setattr(LlamaTarget, "allocate", lambda *args: allocated.append(args[1:]) or allocate(*args))
    with pytest.raises(InvalidOption, match=r"(?s)does not fit.*target weights.*lower") as caught:
        engine(models, max_running_requests=16)
    assert allocated == [(1, 1)], "a probe alone"
    lowered = {}
    for way in str(caught.value).rpartition("; lower ")[2].replace(", or ", ", ").replace(" and ", ", ").split(", "):
        name, _, value = way.partition(" to ")
        lowered[name] = int(value)
    engine(models, **{"max_running_requests": 16, **lowered})


def test_a_chosen_budget_is_not_advised_away(monkeypatch):
    monkeypatch.setattr("ddtree.engine.engine.device_memory", lambda device: Memory("here", 40_000, 40_000))
    with pytest.raises(InvalidOption) as caught:
        engine_for(1, config={"max_running_requests": 8}, mode="tree", tree_budget=60)
    said = str(caught.value)
    assert "max_tree_budget to" not in said or int(said.partition("max_tree_budget to ")[2].split()[0].strip(",")) >= 60


def test_a_card_has_what_is_free_and_what_torch_keeps(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * GIB)
    assert planning.device_memory(torch.device("cuda", 1)) == Memory("cuda:1", 6 * GIB, 80 * GIB)


def test_an_engine_without_a_drafter_has_no_lines_for_one():
    plan = scripted_engine(ScriptedTarget(lambda history: [0.0] * 4, 4), None).info()["memory"]
    assert [*plan] == [key for key in KEYS if "drafter" not in key] + ["total"]
