"""Answers of many prompts at once: the engine's own, whatever the company; ends, limits and draws."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddtree.config import SamplingParams
from ddtree.errors import InvalidOption
from ddtree.target import LlamaTarget
from ddtree.training import decode
from ddtree.training.answers import BatchAnswers, EngineAnswers, load_answers
from ddtree.training.config import DataPart, TargetPart
from ddtree.training.decode import Decoder
from llama_oracle import random_llama
from tiny_run import END

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[(7 * row + 3 * i) % 250 for i in range(1 + row * 5 % 37)] for row in range(23)]


def part(folder: Path) -> TargetPart:
    return TargetPart(str(folder), "cpu", "float32")


def test_greedy_answers_are_the_engines(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 8 that shrink to 4, 2 and 1; steps over several spans; limits, ends and the length's end."""
    monkeypatch.setattr(decode, "LEAST", 1)
    monkeypatch.setattr(decode, "LOOK", 5)
    monkeypatch.setattr(decode, "PROMPT_ROWS", 40)
    engine = load_answers(part(tiny_target), DataPart(max_length=128, batch=4))
    assert isinstance(engine, EngineAnswers)
    batch = load_answers(part(tiny_target), DataPart(max_length=128, batch=8, decoder="plain"))
    assert isinstance(batch, BatchAnswers)
    (most,) = Counter(i for ids, _ in engine(PROMPTS[:4], [SamplingParams(60)] * 4) for i in ids[9:]).most_common(1)
    for target in (engine.target, batch.target):
        monkeypatch.setattr(target, "spec", replace(target.spec, end_ids=(END, most[0])))
    batch = BatchAnswers(batch.target, batch.text, 8, 128)  # type: ignore[arg-type]
    params = [SamplingParams(min(3 + 7 * row % 120, 128 - len(p)), 0.0, seed=row) for row, p in enumerate(PROMPTS)]
    ours, theirs = batch(PROMPTS, params), engine(PROMPTS, params)
    assert ours == theirs
    assert any(ids[-1] == most[0] for ids, _ in theirs)
    assert {len(ids) for ids, _ in theirs} > {3, 10}
    assert batch(PROMPTS[::-1], params[::-1]) == theirs[::-1]


def test_graphs_are_refused_on_a_cpu(tiny_target: Path) -> None:
    with pytest.raises(InvalidOption, match="needs a GPU"):
        load_answers(part(tiny_target), DataPart(decoder="graphs"))


def test_too_many_rows_are_refused_by_name(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(decode, "Rows", full)
    batch = load_answers(part(tiny_target), DataPart(max_length=128, batch=8, decoder="plain"))
    with pytest.raises(InvalidOption, match=r"8 answers of 128 tokens \(full\): lower data.batch"):
        batch([[1, 2]], [SamplingParams(3)])


def test_draws_follow_the_distribution(tmp_path: Path) -> None:
    random_llama(vocab_size=13, hidden_size=32, num_hidden_layers=2, head_dim=16).save_pretrained(tmp_path)
    target = LlamaTarget.load(tmp_path, torch.float32, torch.device("cpu"))
    count = 4096
    decoder = Decoder(target, count, 8)
    some = [[1, 2, 3]] * count
    found = decoder.answer(some, [1] * count, [1.3] * count, 5)
    cache = target.allocate(1, 8)
    with torch.inference_mode():
        _, logits = target.prefill(cache, torch.tensor(some[:1]), torch.tensor([0]))
    expected = (logits[0].float() / 1.3).softmax(-1)
    counts = torch.bincount(torch.tensor([ids[0] for ids in found]), minlength=13) / count
    assert float((counts - expected).abs().max()) < 0.03
    assert decoder.answer(some, [1] * count, [1.3] * count, 5) == found
    assert decoder.answer(some, [1] * count, [1.3] * count, 6) != found
    mixed = decoder.answer(some, [2] * count, [0.0, 1.3] * (count // 2), 5)
    assert len({tuple(ids) for ids in mixed[::2]}) == 1
    assert len({tuple(ids) for ids in mixed[1::2]}) > 10
