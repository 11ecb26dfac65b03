"""What is trained is what runs: the module against DFlashDrafter on the same features, anchor by anchor."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ddtree.drafter import DFlashDrafter, DrafterConfig
from ddtree.layers.fields import read_config
from ddtree.training.attention import Blocks
from ddtree.training.model import DraftModel
from dflash_reference import (
    BASE,
    CPU,
    HIDDEN,
    TARGET_LAYERS,
    VOCAB,
    assert_near,
    change,
    random_tensors,
    save_checkpoint,
)
from test_drafter_model import CASES

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH = 23
ANCHORS = torch.tensor([[1, 2, 9, 10, 22], [17, 3, 5, 1, 0]])
EXTREME = {"a window of one block": {"layer_types": ["sliding_attention"] * 3, "sliding_window": 2}}


def both(folder: Path, raw: dict[str, Any]) -> tuple[DraftModel, DFlashDrafter, torch.Tensor, torch.Tensor]:
    save_checkpoint(folder, raw, random_tensors(raw))
    generator = torch.Generator().manual_seed(1)
    embedding, head = torch.randn(2, VOCAB, HIDDEN, generator=generator)
    sizes = (VOCAB, HIDDEN, TARGET_LAYERS)
    served = DFlashDrafter.load(
        folder, lambda ids: embedding[ids], lambda hidden: hidden @ head.T, sizes, torch.float32, CPU
    )
    return DraftModel.read(DrafterConfig.read(read_config(folder)), folder), served, embedding, head


@pytest.mark.parametrize("name", [*CASES, *EXTREME])
def test_training_equals_inference_at_every_anchor(tmp_path: Path, name: str) -> None:
    raw = change(BASE, EXTREME[name] if name in EXTREME else CASES[name][0])
    model, served, embedding, head = both(tmp_path, raw)
    config = model.config
    batch, count = ANCHORS.shape
    features = torch.randn(batch, LENGTH, HIDDEN * len(config.target_layer_ids))
    ids = torch.full((batch, count, config.block_size), config.mask_token_id)
    ids[..., 0] = torch.randint(VOCAB, ANCHORS.shape)
    with torch.no_grad():
        hidden = model(embedding[ids], features, Blocks(config, ANCHORS, LENGTH))
        trained = model.logits(hidden.flatten(0, 2), head).view(batch, count, config.depths, VOCAB)
    for row in range(batch):
        for column, anchor in enumerate(ANCHORS[row].tolist()):
            cache = served.allocate(1, LENGTH + config.block_size)
            served.append(cache, features[row : row + 1, :anchor], torch.tensor([0]), [anchor])
            inferred = served.propose(cache, ids[row, column, :1], torch.tensor([anchor]), config.depths)
            assert_near(trained[row, column], inferred[0], 2e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["full layers", "sliding and full", "sliding, not causal", "sliding, causal"])
def test_flex_attention_has_the_same_mask(tmp_path: Path, name: str) -> None:
    raw = change(BASE, CASES[name][0])
    model, _, embedding, _ = both(tmp_path, raw)
    config = model.config
    features = torch.randn(2, LENGTH, HIDDEN * len(config.target_layer_ids))
    ids = torch.randint(VOCAB, (*ANCHORS.shape, config.block_size))
    with torch.no_grad():
        plain = model(embedding[ids], features, Blocks(config, ANCHORS, LENGTH))
        flex = model(embedding[ids], features, Blocks(config, ANCHORS, LENGTH, flex=True))
    assert_near(flex, plain, 1e-5)


def test_a_block_sees_nothing_at_or_behind_its_anchor(tmp_path: Path) -> None:
    model, _, embedding, _ = both(tmp_path, dict(BASE))
    config, anchors = model.config, torch.tensor([[4, 12]])
    ids = torch.randint(VOCAB, (1, 2, config.block_size))
    features = torch.randn(1, LENGTH, HIDDEN * 2)
    changed = features.clone()
    changed[:, 4:] += 1.0
    with torch.no_grad():
        before, after = (model(embedding[ids], f, Blocks(config, anchors, LENGTH)) for f in (features, changed))
    assert torch.equal(before[:, 0], after[:, 0])
    assert not torch.allclose(before[:, 1], after[:, 1])


def test_parameters_are_those_of_the_file_and_all_get_gradients(tmp_path: Path) -> None:
    raw = change(BASE, CASES["attention bias"][0])
    model, _, embedding, _ = both(tmp_path, raw)
    assert set(model.state_dict()) == set(random_tensors(raw))
    ids = torch.randint(VOCAB, (*ANCHORS.shape, model.config.block_size))
    features = torch.randn(2, LENGTH, HIDDEN * 2)
    model(embedding[ids], features, Blocks(model.config, ANCHORS, LENGTH)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
