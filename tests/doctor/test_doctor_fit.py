"""What contexts take, against the engine's own plan; and what raises no finding."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_gguf import tiny_llama, write_gguf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from ddtree.doctor import Facts, judge, load
from ddtree.doctor.checkpoints import look
from ddtree.doctor.facts import Asked, Checkpoint
from ddtree.doctor.fit import load_of, lower, needs, planner_of
from ddtree.doctor.record import build, from_json, to_json
from ddtree.drafter import DFlashDrafter
from ddtree.engine.memory import Planner
from ddtree.plan import MIB, Load
from ddtree.target import LlamaTarget
from dflash_reference import BASE, random_tensors, save_checkpoint
from faults_machine import llama_8b
from llama_oracle import random_llama
from machines import cpu, gpu, sglang, with_asked

TABLES = load()
HALF = torch.bfloat16
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny Llama and its drafter."""
    target, drafter = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    model = random_llama(vocab_size=61, hidden_size=32, num_hidden_layers=6, max_position_embeddings=512)
    model.save_pretrained(target)
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(target / "tokenizer.json"))
    save_checkpoint(drafter, BASE, random_tensors(BASE))
    return target, drafter


def seen(model: Path, drafter: Path | None = None, **asked: Any) -> Facts:
    """A machine with these files, as its recording is read back."""
    found = json.loads(json.dumps(look(str(model), str(drafter or "none"))))
    target = build(Checkpoint, found["model"])
    draft = build(Checkpoint, found["drafter"]) if drafter else None
    return with_asked(replace(cpu(), model=target, drafter=draft), **asked)


def engine_plan(folders: tuple[Path, Path], load: Load, *, drafts: bool) -> dict[str, int]:
    target = LlamaTarget.load(folders[0], HALF, CPU)
    sizes = (target.spec.vocab_size, target.spec.hidden_size, target.spec.num_layers)
    drafter = DFlashDrafter.load(folders[1], target.embed, target.head, sizes, HALF, CPU) if drafts else None
    return Planner(target, drafter, 64, None)(load).facts()


@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({}, Load(8, 512, 64)),
        ({"max_model_len": 100, "max_running_requests": 3, "max_tree_budget": 1}, Load(3, 100, 1)),
    ],
)
def test_contexts_are_those_of_the_engines_plan(
    folders: tuple[Path, Path], asked: dict[str, int], wanted: Load, drafts: bool
) -> None:
    facts = seen(folders[0], folders[1] if drafts else None, **asked)
    load, planner = load_of(facts), planner_of(facts)
    assert load == wanted
    assert planner is not None
    ours, theirs = planner(load).facts(), engine_plan(folders, wanted, drafts=drafts)
    assert ours["target_context"] == theirs["target_context"] > 0
    assert ours.get("drafter_context") == theirs.get("drafter_context")
    assert ("drafter_context" in ours) == drafts
    assert needs(facts)["least_mib"] * MIB < theirs["total"], "a lower bound"


def test_contexts_of_a_gguf_file(tmp_path: Path) -> None:
    facts = seen(write_gguf(tmp_path / "tiny.gguf", tiny_llama()))
    assert facts.model is not None
    assert facts.model.context is not None
    assert facts.model.context.layers == 2
    assert load_of(facts) == Load(8, facts.model.context.longest, 64)


def test_a_drafter_that_is_not_here_yet_makes_the_bound_lower() -> None:
    without = replace(llama_8b(gpu()), drafter=Checkpoint("org/drafter", "to fetch"))
    assert needs(without)["least_mib"] < needs(llama_8b(gpu()))["least_mib"]
    assert "9 slots of 131137 positions" in needs(without)["sum"]


@pytest.mark.parametrize("unknown", ["context", "weights_mib"])
def test_what_is_not_known_leaves_the_weights_alone(unknown: str) -> None:
    facts = llama_8b(gpu())
    assert facts.model is not None
    dark = replace(facts, model=replace(facts.model, **{unknown: None}))
    assert (needs(dark)["least_mib"], needs(dark)["sum"], lower(dark, 1)) == (None, None, None)
    assert judge(dark, TABLES).findings == ()


def test_recordings_of_before_are_judged_by_weights_alone() -> None:
    plain = to_json(llama_8b(gpu()))
    for name in ("max_model_len", "max_running_requests", "max_tree_budget"):
        del plain["asked"][name]
    del plain["system"]["memory_total_mib"], plain["model"]["context"], plain["drafter"]["context"]
    facts = from_json(plain)
    assert (facts.asked, facts.system.memory_total_mib) == (Asked(), None)
    assert judge(facts, TABLES).findings == ()


def test_sglang_plans_by_itself() -> None:
    facts = llama_8b(sglang())
    assert needs(facts)["least_mib"] is None
    assert judge(facts, TABLES).findings == ()


def test_on_a_cpu_contexts_may_be_more_than_is_free_now() -> None:
    """The engine warns of it and starts."""
    facts = llama_8b(cpu(), max_model_len=65_536)
    small = replace(facts, system=replace(facts.system, memory_mib=20_000))
    assert needs(small)["least_mib"] > 20_000
    assert judge(small, TABLES).findings == ()
    (found,) = judge(replace(small, system=replace(small.system, memory_total_mib=90_000)), TABLES).findings
    assert found.id == "memory-contexts"


@pytest.mark.parametrize("room", [17_450, 24_000, 40_000, 100_000, 143_771])
def test_what_is_advised_fits_and_one_more_does_not(room: int) -> None:
    facts = llama_8b(gpu())
    words = (lower(facts, room) or "").replace("--", "").split()
    told = {
        name.replace("-", "_"): int(value.rstrip(","))
        for name, to, value in zip(words, words[1:], words[2:], strict=False)
        if to == "to"
    }
    assert told, words
    ways = [told] if "and" in words else [{name: value} for name, value in told.items()]
    for way in ways:
        assert lower(with_asked(facts, **way), room) is None
        last = "max_model_len" if "max_model_len" in way else "max_running_requests"
        assert lower(with_asked(facts, **way | {last: way[last] + 1}), room) is not None


def test_a_room_that_the_weights_alone_fill_takes_no_request() -> None:
    assert "not even one request fits" in (lower(llama_8b(gpu()), 17_000) or "")


def test_a_model_length_beyond_the_models_is_counted_as_the_models() -> None:
    assert load_of(with_asked(cpu(), max_model_len=9000)) == Load(8, 8192, 64)
