"""Engines whose rounds on the device are compared with the host's: fixtures and helpers of the tests of graphs.

Loaded models where there is a card; else scripted ones, and graphs that are fakes (graph_fakes.py).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ddtree.config import EngineConfig, SamplingParams, Speculation
from ddtree.drafter import DFlashDrafter
from ddtree.engine import Engine, RoundRecord, Text
from ddtree.engine.observer import Unobserved
from ddtree.engine.prompts import Prompts
from ddtree.kernels import backend
from ddtree.target import LlamaTarget
from dflash_reference import BASE, change, random_tensors, save_checkpoint
from graph_fakes import fake_graphs
from llama_oracle import random_llama
from scripted import ScriptedDrafter, ScriptedTarget
from scripted_text import END, FIRST_PIECE, byte_text

VOCAB = FIRST_PIECE + 3  # more than the tokenizer has, and no multiple of 32
TREE, LINEAR, SHADOW = Speculation("tree", 7, 3), Speculation("linear"), Speculation("shadow-linear", 6, 4)
CONFIG = {"speculation": TREE, "max_running_requests": 2, "max_tree_budget": 8, "max_model_len": 40}
Lane = tuple[Speculation, SamplingParams]
Make = Callable[..., Engine]
# Only where they run in the interpreter.
LONG = [] if torch.cuda.is_available() else [pytest.mark.full]


def only_long(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test with LONG."""
    for mark in LONG:
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Text]:
    target, drafter = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    model = random_llama(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, head_dim=16, max_position_embeddings=64, eos_token_id=END
    )
    model.save_pretrained(target)
    changes = {"vocab_size": VOCAB, "num_hidden_layers": 1, "num_target_layers": 2, "block_size": 5}
    raw = change(BASE, {**changes, "dflash_config": {"target_layer_ids": [0, 1]}})
    return target, save_checkpoint(drafter, raw, random_tensors(raw)), byte_text(tmp_path_factory.mktemp("text"))


class Records(Unobserved):
    """Keeps what rounds tell of themselves."""

    def __init__(self) -> None:
        self.found: list[RoundRecord] = []

    def round(self, record: RoundRecord) -> None:
        self.found.append(record)

    @property
    def ways(self) -> set[str]:
        return {record.ran for record in self.found}


@pytest.fixture
def loaded(folders, device) -> Make:
    """Makes engines of random models, where `device` is."""

    def load(**config) -> Engine:
        target = LlamaTarget.load(folders[0], torch.float32, device)
        sizes = (target.spec.vocab_size, target.spec.hidden_size, target.spec.num_layers)
        drafter = DFlashDrafter.load(folders[1], target.embed, target.head, sizes, torch.float32, device)
        return Engine(target, drafter, folders[2], EngineConfig(**CONFIG | config))

    return load


@pytest.fixture
def scripted(folders, monkeypatch) -> Make:
    """Makes engines whose models are functions of the history: so the interpreter has the round's kernels alone."""

    def says(seen: Sequence[int]) -> list[float]:
        draw = torch.Generator().manual_seed(sum(seen[-3:]) % 97)
        return (4 * torch.rand(VOCAB, generator=draw)).tolist()

    def drafts(seen: tuple[int, ...]) -> list[list[float]]:
        rows = []
        for _ in range(4):
            rows.append([value if 32 <= token < 127 else 0.0 for token, value in enumerate(says(seen))])
            seen = (*seen, max(range(VOCAB), key=rows[-1].__getitem__))
        return rows

    # Scripted models have no padded prompts.
    monkeypatch.setattr("ddtree.engine.engine.DevicePrompts", lambda *parts: Prompts(*parts[:3]))

    def load(**config) -> Engine:
        target = ScriptedTarget(says, VOCAB, (END,))
        return Engine(target, ScriptedDrafter(drafts, 5), folders[2], EngineConfig(**CONFIG | config))  # type: ignore[arg-type]

    return load


@pytest.fixture
def either(request) -> Make:
    """Loaded models where there is a card, else scripted ones."""
    return request.getfixturevalue("loaded" if torch.cuda.is_available() else "scripted")


def answers(engine: Engine, lanes: Sequence[Lane], stop_after: int | None = None) -> tuple[list[tuple], Records]:
    """Everything that is to be the same, by lane. stop_after: steps until the first one is given up."""
    requests = [engine.scheduler.add([5, 9, 2 + i], params, spec) for i, (spec, params) in enumerate(lanes)]
    records = engine.scheduler.observer = Records()
    finished, steps = {}, 0
    while engine.scheduler.has_work:
        steps += 1
        if steps == stop_after:
            engine.scheduler.abort(requests[0])
        for request, chunk in engine.scheduler.step():
            assert chunk.error is None
            if chunk.generation:
                finished[request] = chunk.generation
    return [
        (g.token_ids, g.rounds, g.speculative, g.shadow, g.finish_reason, [e.token_id for e in g.logprobs])
        for g in (finished[request] for request in requests if request in finished)
    ], records


@contextmanager
def graphs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str] | None]:
    """Rounds run on the device as graphs, real ones where there is a card. Any other way fails."""
    monkeypatch.setattr(backend, "KINDS", {device.type})
    monkeypatch.setattr("ddtree.engine.runner.run_round", lambda batch: pytest.fail("a round was launched one by one"))
    if device.type == "cuda":
        yield None
        return
    with fake_graphs(monkeypatch) as events:
        yield events
