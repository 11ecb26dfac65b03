"""What training takes from a target, through the kernels and through torch."""

from pathlib import Path

import pytest
import torch

from ddtree.kernels import backend
from ddtree.target import LlamaTarget
from ddtree.training import decode
from ddtree.training.decode import Decoder
from ddtree.training.teacher import Teacher
from llama_oracle import random_llama


def test_features_head_and_embedding_are_the_same(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "max_position_embeddings": 128}
    random_llama(**fields, head_dim=16).save_pretrained(tmp_path)
    ids = torch.tensor([(i * 7) % 61 for i in range(20)], device=device)
    found = []
    for kinds, batched in ((set(), False), ({device.type}, False), ({device.type}, True)):
        monkeypatch.setattr(backend, "KINDS", kinds)
        teacher = Teacher(LlamaTarget.load(tmp_path, torch.float32, device), (0, 1), 40, distribution=True)
        teacher.batched = batched
        features, hidden = teacher.features([ids, ids[:9]], 24)
        assert hidden is not None
        blocks = ids[:12].view(2, 3, 2)
        found.append((features, hidden, teacher.head(torch.float32), teacher.embed(blocks)))
    for plain, kernels, at_once in zip(*found, strict=True):
        assert torch.allclose(plain, kernels, atol=1e-4)
        assert torch.allclose(plain, at_once, atol=1e-4)
    assert torch.equal(found[0][3], found[1][3])
    assert torch.equal(found[0][2], found[1][2])


def test_answers_of_many_rows_are_the_same(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 128}
    random_llama(**fields, head_dim=16).save_pretrained(tmp_path)
    monkeypatch.setattr(decode, "LEAST", 1)
    monkeypatch.setattr(decode, "LOOK", 2)
    prompts = [[(7 * row + i) % 61 for i in range(2 + row)] for row in range(3)]
    found = []
    for kinds in (set(), {device.type}):
        monkeypatch.setattr(backend, "KINDS", kinds)
        decoder = Decoder(LlamaTarget.load(tmp_path, torch.float32, device), 4, 16, graphs=device.type == "cuda")
        found.append(decoder.answer(prompts, [6, 3, 4], [0.0, 0.0, 0.0], 0))
        drawn = decoder.answer(prompts, [6, 3, 4], [0.0, 0.9, 0.0], 0)
        assert (drawn[0], drawn[2]) == (found[-1][0], found[-1][2])
    assert found[0] == found[1]
    assert [len(ids) for ids in found[0]] == [6, 3, 4]
