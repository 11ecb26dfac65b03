"""Options that only a GPU can follow: refused elsewhere by name, and followed where the kernels can be used."""

from pathlib import Path

import pytest
import torch

from ddtree.config import EngineConfig, Speculation
from ddtree.drafter import write_vocabulary
from ddtree.engine import loading
from ddtree.engine.loading import load_pair
from ddtree.errors import InvalidOption, UnsupportedModel
from ddtree.kernels import Rounded, backend
from dflash_reference import BASE, change, random_tensors, save_checkpoint
from llama_oracle import random_llama


@pytest.fixture
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names lead to small random models."""
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    drafter.mkdir()
    fields = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 6, "max_position_embeddings": 128}
    random_llama(**fields, head_dim=16).save_pretrained(target)
    raw = change(BASE, {"intermediate_size": 48})
    save_checkpoint(drafter, raw, random_tensors(raw))
    monkeypatch.setattr(loading.models, "resolve_model", lambda name: target)
    monkeypatch.setattr(loading.models, "resolve_drafter", lambda name, model: drafter)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"numerics": "invariant"}, "numerics invariant is a choice in float16 and bfloat16 on a GPU, not in float32"),
        ({"numerics": "fast"}, "numerics fast is a choice"),
        ({"draft_dtype": "int8"}, "draft_dtype int8 needs float16 or bfloat16 on a GPU, not float32 on cpu"),
        ({"draft_dtype": "int8", "drafter": "none"}, "draft_dtype int8 needs a drafter"),
        ({"draft_dtype": "int8", "speculation": Speculation("ar")}, "draft_dtype int8 needs a drafter"),
        ({"draft_vocab": "99", "drafter": "none"}, "draft_vocab 99 needs a drafter, and none is loaded"),
        ({"draft_pairwise": "off", "drafter": "none"}, "draft_pairwise off needs a drafter, and none is loaded"),
        ({"draft_vocab": "full", "speculation": Speculation("ar")}, "draft_vocab full needs a drafter"),
    ],
)
def test_what_only_a_gpu_can_is_refused_elsewhere(options, words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        load_pair(EngineConfig(device="cpu", dtype="float32", **options))


@pytest.mark.parametrize("name", ["numerics", "draft_dtype", "draft_pairwise"])
def test_unknown_values(name: str) -> None:
    with pytest.raises(InvalidOption, match=f"{name} 'int4' is unknown: choose one of auto"):
        EngineConfig(**{name: "int4"})


@pytest.mark.usefixtures("_folders")
@pytest.mark.parametrize("device_type", ["cpu"])
def test_they_are_followed_where_the_kernels_can_be_used(device_type: str, monkeypatch) -> None:
    monkeypatch.setattr(backend, "KINDS", {device_type})
    plain = load_pair(EngineConfig(device=device_type, dtype="bfloat16"))
    other = load_pair(EngineConfig(device=device_type, dtype="bfloat16", draft_dtype="int8", numerics="fast"))
    assert (plain.target.invariant, other.target.invariant) == (True, False)
    for drafter, rounded in ((plain.drafter, False), (other.drafter, True)):
        linears = [drafter.fuse, drafter._head if rounded else drafter.fuse]
        linears += [x for y in drafter.layers for x in (y.query, y.key_value, y.joint, y.out, y.gated.linear, y.down)]
        assert all(linear.rounded is rounded for linear in linears)
    assert not other.target.lm_head.rounded, "what verifies keeps its weights"
    weight = other.target.lm_head.weight.float()
    kept = other.drafter._head.weight
    assert (kept.values.float() * kept.scale[:, None] - weight).abs().max() < weight.abs().max() / 250
    assert other.target.layers[0].down.weight.dtype is torch.bfloat16


@pytest.mark.usefixtures("_folders")
def test_blocks_deeper_than_the_kernels_trees_are_refused(tmp_path: Path, monkeypatch) -> None:
    """At the start: the kernels cannot lay such a round, so every request would fail."""
    raw = change(BASE, {"intermediate_size": 48, "block_size": 65})
    save_checkpoint(tmp_path / "drafter", raw, random_tensors(raw))
    config = EngineConfig(device="cpu", dtype="float32")
    assert load_pair(config).drafter.config.depths == 64
    monkeypatch.setattr(backend, "KINDS", {"cpu"})
    with pytest.raises(UnsupportedModel, match=r"block_size 65 of the drafter is not supported on cpu: .* at most 64"):
        load_pair(config)


@pytest.mark.usefixtures("_folders")
def test_a_cut_head_in_8_bits_is_those_rows_rounded(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(backend, "KINDS", {"cpu"})
    ids, chosen = tmp_path / "list.json", [40, 3, 17, 60, 8]
    write_vocabulary(ids, chosen, 4)
    config = EngineConfig(device="cpu", dtype="bfloat16", draft_dtype="int8", draft_vocab=str(ids))
    pair = load_pair(config)
    kept, vocabulary = pair.drafter._head.weight, pair.drafter.vocabulary
    assert vocabulary.tolist() == sorted(chosen[:4])
    rows = Rounded.of(pair.target.lm_head.weight[vocabulary])
    assert torch.equal(kept.values, rows.values)
    assert torch.equal(kept.scale, rows.scale)
