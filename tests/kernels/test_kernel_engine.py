"""The whole engine with rounds on the device, against rounds laid by the host: the same tokens, rounds and counts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddtree.config import EngineConfig, SamplingParams, Speculation
from ddtree.drafter import DFlashDrafter, PairwiseHead
from ddtree.engine import Engine
from ddtree.engine.ops import DeviceOps, HostOps
from ddtree.engine.runner import DeviceRunner, HostRunner
from ddtree.kernels import backend
from ddtree.target import LlamaTarget
from dflash_reference import BASE, change, random_tensors, save_checkpoint
from llama_oracle import random_llama
from scripted import CharText

# In the interpreter it takes minutes.
pytestmark = [] if torch.cuda.is_available() else [pytest.mark.full]
LANES = [
    (Speculation("tree", 7, 3), SamplingParams(max_tokens=9, ignore_eos=True, seed=1)),
    (Speculation("linear"), SamplingParams(max_tokens=7, temperature=0.8, seed=2, ignore_eos=True)),
    (Speculation("shadow-linear", 6, 4), SamplingParams(max_tokens=8, temperature=1.3, seed=3, ignore_eos=True)),
    (Speculation("ar"), SamplingParams(max_tokens=4, ignore_eos=True)),
    (Speculation("tree", 5, 2, 2), SamplingParams(max_tokens=6, temperature=0.7, seed=5, ignore_eos=True)),
]
HOST_LANE = (
    Speculation("tree", 7, 3),
    SamplingParams(max_tokens=5, temperature=0.9, top_p=0.8, seed=4, logprobs=2, presence_penalty=0.5, min_tokens=3),
)
FILTERED = [
    (Speculation("tree", 7, 3), SamplingParams(max_tokens=6, temperature=0.9, top_p=0.8, seed=1, ignore_eos=True)),
    (Speculation("linear"), SamplingParams(max_tokens=6, temperature=0.9, top_k=5, seed=2, ignore_eos=True)),
    (Speculation("ar"), SamplingParams(max_tokens=4, temperature=1.2, min_p=0.2, seed=3, ignore_eos=True)),
    (Speculation("shadow-linear", 6, 4), SamplingParams(max_tokens=5, temperature=0.7, top_k=9, top_p=0.6, seed=4)),
    LANES[1],
]
PENALIZED = [
    (Speculation("tree", 7, 3), SamplingParams(max_tokens=9, ignore_eos=True, frequency_penalty=-0.3, seed=1)),
    (Speculation("linear"), SamplingParams(max_tokens=6, temperature=0.8, top_p=0.9, repetition_penalty=0.8, seed=2)),
    (Speculation("shadow-linear", 6, 4), SamplingParams(max_tokens=6, presence_penalty=-0.4, logit_bias=((7, 0.3),))),
    (Speculation("ar"), SamplingParams(max_tokens=4, temperature=0.7, repetition_penalty=1.2, seed=4, logprobs=1)),
    LANES[4],
]
CONTEXTS = [
    (replace(speculation, tree_context=context), replace(params, max_tokens=20))
    for (speculation, params), context in zip(LANES, ["mix", "branch", "mix", "off", "branch"], strict=True)
]
GRAPHS = [True, False] if torch.cuda.is_available() else [True]  # there are none elsewhere


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, drafter = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    model = random_llama(vocab_size=61, hidden_size=32, num_hidden_layers=3, head_dim=16, max_position_embeddings=64)
    model.save_pretrained(target)
    raw = change(BASE, {"num_hidden_layers": 1, "num_target_layers": 3, "dflash_config": {"target_layer_ids": [0, 1]}})
    return target, save_checkpoint(drafter, raw, random_tensors(raw))


def load(folders: tuple[Path, Path], device: torch.device, ids: range | None = None, **config) -> Engine:
    target = LlamaTarget.load(folders[0], torch.float32, device)
    sizes = (target.spec.vocab_size, target.spec.hidden_size, target.spec.num_layers)
    vocabulary = None if ids is None else torch.tensor(ids, device=device)
    head = target.draft_head(vocabulary)
    drafter = DFlashDrafter.load(folders[1], target.embed, head, sizes, torch.float32, device, vocabulary=vocabulary)
    speculation = Speculation("tree", 7, 3)
    return Engine(
        target, drafter, CharText([]), EngineConfig(speculation=speculation, max_running_requests=3, **config)
    )


def with_head(engine: Engine) -> Engine:
    """Its drafter gets a head that moves much, of most tokens."""
    assert engine.drafter is not None
    generator = torch.Generator().manual_seed(1)
    ids = torch.arange(61)[torch.arange(61) % 7 != 3]
    factors = (torch.randn(len(ids), 6, generator=generator), torch.randn(len(ids), 6, generator=generator))
    gate = torch.randn(6, 32, generator=generator) * 0.2
    head = PairwiseHead.of(ids, 61, factors, torch.zeros(6), gate, "mark").to(engine.target.spec.device)
    engine.drafter.pairwise = head
    return Engine(engine.target, engine.drafter, engine.text, engine.config)


def watch_rows(monkeypatch: pytest.MonkeyPatch, ops: type) -> dict:
    """(sequence, position) -> tokens and parents of the rows that are laid, where Python lays or launches them.

    Sequences are counted as they come: places in a batch move up when one ends, a round later on a GPU.
    """
    found: dict = {}
    seen: list = []
    build = ops.build

    def watch(self, batch, proposal):
        build(self, batch, proposal)
        state, n = batch.state, batch.state.width
        for index, lane in enumerate(batch.lanes):
            if not any(lane is one for one in seen):
                seen.append(lane)
            if not state.done[index] and lane.depth:
                number = next(i for i, one in enumerate(seen) if one is lane)
                real = state.parents[index, :n] >= 0
                rows = state.tokens[index, :n][real].tolist(), state.parents[index, :n][real].tolist()
                found.setdefault((number, int(state.position[index])), rows)

    monkeypatch.setattr(ops, "build", watch)
    return found


def answers(engine: Engine, lanes) -> list:
    requests = [engine.scheduler.add([5, 9, 2 + i], params, spec) for i, (spec, params) in enumerate(lanes)]
    finished = {}
    while engine.scheduler.has_work:
        for request, chunk in engine.scheduler.step():
            assert chunk.error is None
            if chunk.generation:
                finished[request] = chunk.generation
    return [finished[request] for request in requests]


def facts(generation) -> tuple:
    return (
        generation.token_ids,
        generation.rounds,
        generation.speculative,
        generation.shadow,
        generation.finish_reason,
    )


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize(
    ("lanes", "ids"),
    [
        (LANES, None),
        ([*LANES[:2], HOST_LANE], None),
        (FILTERED, None),
        (PENALIZED, None),
        (CONTEXTS, None),
        ([*CONTEXTS[:2], HOST_LANE], None),
        (LANES[:3], range(1, 61, 2)),
        (CONTEXTS[:2], range(1, 61, 2)),
    ],
    ids=[
        "device alone", "with the host's part", "filters", "penalties", "with texts", "with texts and the host's part",
        "drafts of a part of the vocabulary", "and with texts",
    ],
)  # fmt: skip
def test_rounds_on_the_device_equal_rounds_of_the_host(folders, device, lanes, ids, graphs, monkeypatch) -> None:
    monkeypatch.setattr(backend, "KINDS", set())
    host = load(folders, device, ids)
    assert isinstance(host.scheduler._runner, HostRunner)
    expected = answers(host, lanes)
    monkeypatch.setattr(backend, "KINDS", {device.type})
    engine = load(folders, device, ids, cuda_graphs=graphs)
    assert isinstance(engine.scheduler._runner, DeviceRunner)
    found = answers(engine, lanes)
    assert [facts(g) for g in found] == [facts(g) for g in expected]
    assert [[e.token_id for e in g.logprobs] for g in found] == [[e.token_id for e in g.logprobs] for g in expected]
    assert max(g.speculative.accepted for g in found) > 0


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize(
    ("lanes", "ids"),
    [(LANES, None), ([*LANES[:2], HOST_LANE], None), (LANES[:3], range(1, 61, 2)), (CONTEXTS, None)],
    ids=["device alone", "with the host's part", "drafts of a part of the vocabulary", "with texts"],
)
def test_rounds_by_pair_scores_equal_rounds_of_the_host(folders, device, lanes, ids, graphs, monkeypatch) -> None:
    """Sequences that ask for other numbers of candidates are in one batch; the head has a say on both sides."""
    monkeypatch.setattr(backend, "KINDS", set())
    with monkeypatch.context() as patch:
        marginal = watch_rows(patch, HostOps)
        plain = answers(load(folders, device, ids), lanes)
    by_host = watch_rows(monkeypatch, HostOps)
    expected = answers(with_head(load(folders, device, ids)), lanes)
    monkeypatch.setattr(backend, "KINDS", {device.type})
    engine = with_head(load(folders, device, ids, cuda_graphs=graphs))
    python = engine.info()["rounds"] == "kernels"  # else a graph lays them
    by_device = watch_rows(monkeypatch, DeviceOps) if python else by_host
    assert isinstance(engine.scheduler._runner, DeviceRunner)
    assert engine.info()["draft_pairwise"] == "on"
    found = answers(engine, lanes)
    assert [facts(g) for g in found] == [facts(g) for g in expected]
    assert [g.token_ids for g in found] == [g.token_ids for g in plain]
    assert by_host != marginal, "the head changed nothing"
    assert by_device == by_host


def test_a_pairwise_head_is_in_the_memory_plan(folders, device, monkeypatch) -> None:
    monkeypatch.setattr(backend, "KINDS", {device.type})
    engine = load(folders, device)
    paired = with_head(load(folders, device))
    sizes = [{part.name: part.size for part in e._store.plan.parts} for e in (engine, paired)]
    assert sizes[1]["drafter_weights"] > sizes[0]["drafter_weights"]
    assert sizes[1]["logits"] > sizes[0]["logits"]
