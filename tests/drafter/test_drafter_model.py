"""DFlashDrafter against a second, slow implementation of DFlash; and the drafter that ships with the package."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ddtree.drafter import DFlashDrafter
from ddtree.errors import DamagedFile, DrafterMismatch, ModelNotFound, UnsupportedModel
from ddtree.layers import KVCache
from ddtree.target import LlamaTarget
from dflash_reference import (
    BASE,
    CPU,
    HIDDEN,
    TARGET_LAYERS,
    VOCAB,
    Reference,
    assert_near,
    change,
    random_tensors,
    save_checkpoint,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 4}
NO, SOME, ALL = (False,) * 3, (True, False, True), (True,) * 3
# Configuration changes, and what they should mean: windows and causality of the three layers, rope theta.
CASES: dict[str, tuple[dict[str, Any], tuple[int | None, ...], tuple[bool, ...], float]] = {
    "full layers": ({}, (None,) * 3, NO, 1000.0),
    "layer types all full": ({"layer_types": ["full_attention"] * 3}, (None,) * 3, NO, 1000.0),
    "sliding and full": (SLIDING, (4, None, 4), SOME, 1000.0),
    "sliding, not causal": ({**SLIDING, "is_causal": False}, (4, None, 4), NO, 1000.0),
    "sliding, causal": ({**SLIDING, "is_causal": True}, (4, None, 4), ALL, 1000.0),
    "is_causal null": ({**SLIDING, "is_causal": None}, (4, None, 4), SOME, 1000.0),
    "a window longer than the context": ({**SLIDING, "sliding_window": 100}, (100, None, 100), SOME, 1000.0),
    "full layers, causal": ({"is_causal": True}, (None,) * 3, ALL, 1000.0),
    "windows by max_window_layers": (
        {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 5},
        (None, 5, 5),
        (False, True, True),
        1000.0,
    ),
    "attention bias": ({"attention_bias": True}, (None,) * 3, NO, 1000.0),
    "output multiplier": ({"output_multiplier": 0.25}, (None,) * 3, NO, 1000.0),
    "softcapping": ({"final_logit_softcapping": 1.5}, (None,) * 3, NO, 1000.0),
    "multiplier, then softcapping": (
        {"dflash_config": {"output_multiplier": 3.0, "final_logit_softcapping": 2.0}},
        (None,) * 3,
        NO,
        1000.0,
    ),
    "embedding scale": ({"input_embedding_scale": 5.65}, (None,) * 3, NO, 1000.0),
    "embedding scale in dflash_config": ({"dflash_config": {"input_embedding_scale": 0.1}}, (None,) * 3, NO, 1000.0),
    "block size in dflash_config": ({"block_size": ..., "dflash_config": {"block_size": 9}}, (None,) * 3, NO, 1000.0),
    "block of two": ({"block_size": 2}, (None,) * 3, NO, 1000.0),
    "rope_parameters": (
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
        (None,) * 3,
        NO,
        77.0,
    ),
    "mha, three taps": (
        {"num_key_value_heads": 4, "dflash_config": {"target_layer_ids": [0, 2, 5]}},
        (None,) * 3,
        NO,
        1000.0,
    ),
    "mqa, other head_dim": ({"num_key_value_heads": 1, "head_dim": 16, **SLIDING}, (4, None, 4), SOME, 1000.0),
}


@dataclass
class Pair:
    """A loaded drafter and its reference, with an embedding and a head as a target would lend them."""

    drafter: DFlashDrafter
    reference: Reference
    width: int  # of the features

    def features(self, count: int, seed: int = 0) -> Tensor:
        """[1, count, taps * H]."""
        return torch.randn(1, count, self.width, generator=torch.Generator().manual_seed(seed))


def make(
    folder: Path,
    changes: dict[str, Any],
    windows: Sequence[int | None] = (None,) * 3,
    causal: Sequence[bool] = NO,
    theta: float = 1000.0,
    dtype: torch.dtype = torch.float32,
) -> Pair:
    raw = change(BASE, changes)
    tensors = {name: tensor.to(dtype) for name, tensor in random_tensors(raw).items()}
    embedding, head = torch.randn(2, VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9)).to(dtype)
    save_checkpoint(folder, raw, tensors)
    drafter = DFlashDrafter.load(
        folder, lambda ids: embedding[ids], lambda x: x @ head.T, (VOCAB, HIDDEN, TARGET_LAYERS), dtype, CPU
    )
    reference = Reference(raw, tensors, embedding, head, windows, causal, theta)
    return Pair(drafter, reference, tensors["fc.weight"].shape[1])


Maker = Callable[..., Pair]


@pytest.fixture
def pair(tmp_path: Path) -> Maker:
    return lambda changes, *meaning, **options: make(tmp_path / "drafter", changes, *meaning, **options)


@torch.inference_mode()
def append(drafter: DFlashDrafter, cache: KVCache, features: Tensor, pieces: Sequence[int], start: int = 0) -> int:
    """Extend the context of one sequence piece by piece; returns its new length."""
    for size in pieces:
        drafter.append(cache, features[:, start : start + size], torch.tensor([start]))
        start += size
    return start


@torch.inference_mode()
def propose(drafter: DFlashDrafter, cache: KVCache, root: int, position: int, depths: int | None = None) -> Tensor:
    """Logits [depths, V] of one sequence."""
    depths = drafter.config.depths if depths is None else depths
    return drafter.propose(cache, torch.tensor([root]), torch.tensor([position]), depths)[0]


@pytest.mark.parametrize("linear", ["best", "plain"])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(pair: Maker, case: str, linear: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The context grows in uneven pieces; proposals between them leave nothing behind."""
    if linear == "plain":
        monkeypatch.setattr("ddtree.layers.linear.packs", lambda device_type, dtype: False)
    changes, windows, causal, theta = CASES[case]
    both = pair(changes, windows, causal, theta)
    drafter, features = both.drafter, both.features(23)
    cache, start = drafter.allocate(1, 40), 0
    for root, pieces in ((3, []), (11, [1]), (4, [7, 2]), (5, [12, 1])):
        start = append(drafter, cache, features, pieces, start)
        expected = both.reference(features[0, :start], root)
        assert len(expected) == drafter.config.depths
        assert_near(propose(drafter, cache, root, start), expected)


def test_fewer_depths_are_a_prefix(pair: Maker) -> None:
    both = pair(SLIDING, (4, None, 4), SOME)
    cache = both.drafter.allocate(1, 40)
    start = append(both.drafter, cache, both.features(12), [12])
    whole = propose(both.drafter, cache, 3, start)
    for depths in range(1, 6):
        part = propose(both.drafter, cache, 3, start, depths)
        assert part.shape == (depths, VOCAB)
        assert_near(part, whole[:depths], 1e-6)


def test_the_context_is_cut_back(pair: Maker) -> None:
    """A shorter position is enough: what lies behind it is not seen, and the next append overwrites it."""
    both = pair({})
    cache, wrong, right = both.drafter.allocate(1, 40), both.features(20, 1), both.features(20)
    append(both.drafter, cache, right, [8])
    append(both.drafter, cache, wrong, [9], 8)
    assert_near(propose(both.drafter, cache, 3, 8), both.reference(right[0, :8], 3))
    append(both.drafter, cache, right, [5], 8)
    assert_near(propose(both.drafter, cache, 3, 13), both.reference(right[0, :13], 3))


@pytest.mark.parametrize("changes", [{}, SLIDING])
def test_a_batch_equals_each_sequence_alone(pair: Maker, changes: dict[str, Any]) -> None:
    """Contexts of other lengths, grown by other numbers of tokens; the shorter ones pass padding behind their own."""
    both = pair(changes, *(((4, None, 4), SOME) if changes else ()))
    drafter, lengths, grown, roots = both.drafter, [2, 14, 0], [5, 1, 3], [3, 8, 60]
    features = [both.features(40, seed) for seed in range(3)]
    cache = drafter.allocate(3, 40)
    for b, length in enumerate(lengths):
        append(drafter, cache.view([b]), features[b], [length] if length else [])
    for _ in range(2):
        position, most = torch.tensor(lengths), max(grown)
        new = torch.full((3, most, both.width), 100.0)
        for b, count in enumerate(grown):
            new[b, :count] = features[b][0, lengths[b] : lengths[b] + count]
        with torch.inference_mode():
            drafter.append(cache, new, position)
            lengths = [a + b for a, b in zip(lengths, grown, strict=True)]
            logits = drafter.propose(cache, torch.tensor(roots), torch.tensor(lengths), 5)
        for b, root in enumerate(roots):
            assert_near(logits[b], both.reference(features[b][0, : lengths[b]], root))


def test_garbage_in_scratch_slots_does_not_matter(pair: Maker) -> None:
    both = pair(SLIDING, (4, None, 4), SOME)
    cache, features = both.drafter.allocate(2, 40), both.features(9)
    for b, (poison, length) in enumerate([(1e4, 9), (-1e4, 3)]):
        cache.data[:, b] = poison
        append(both.drafter, cache.view([b]), features, [length])
    cache.data[:, :, :, 9 + 6 :] = torch.nan
    with torch.inference_mode():
        logits = both.drafter.propose(cache, torch.tensor([5, 6]), torch.tensor([9, 3]), 5)
    assert_near(logits[0], both.reference(features[0], 5))
    assert_near(logits[1], both.reference(features[0, :3], 6))


def test_bfloat16_is_close(pair: Maker) -> None:
    both = pair({"attention_bias": True}, dtype=torch.bfloat16)
    cache, features = both.drafter.allocate(1, 40), both.features(12).bfloat16()
    start = append(both.drafter, cache, features, [12])
    assert_near(propose(both.drafter, cache, 3, start), both.reference(features[0], 3), 0.03)


def load(folder: Path, sizes: tuple[int, int, int] = (VOCAB, HIDDEN, TARGET_LAYERS)) -> DFlashDrafter:
    return DFlashDrafter.load(folder, lambda ids: ids, lambda x: x, sizes, torch.float32, CPU)


@pytest.mark.parametrize("name", ["fc.weight", "hidden_norm.weight", "layers.2.self_attn.k_norm.weight"])
def test_a_missing_weight_is_named(tmp_path: Path, name: str) -> None:
    tensors = random_tensors(BASE)
    del tensors[name]
    with pytest.raises(DamagedFile, match=name):
        load(save_checkpoint(tmp_path, BASE, tensors))


@pytest.mark.parametrize(
    ("changes", "weight"),
    [
        ({"dflash_config": {"target_layer_ids": [1, 2, 3]}}, "fc.weight"),
        ({"num_hidden_layers": 4}, "layers.3"),
        ({"intermediate_size": 41}, "gate_proj.weight"),
        ({"head_dim": 16}, "q_proj.weight"),
    ],
)
def test_weights_of_another_shape_are_named(tmp_path: Path, changes: dict[str, Any], weight: str) -> None:
    with pytest.raises(DamagedFile, match=weight):
        load(save_checkpoint(tmp_path, change(BASE, changes), random_tensors(BASE)))


@pytest.mark.parametrize("keep", [0, 50, -1])
def test_a_truncated_weights_file_is_named(tmp_path: Path, keep: int) -> None:
    save_checkpoint(tmp_path, BASE, random_tensors(BASE))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(DamagedFile, match=r"model\.safetensors"):
        load(tmp_path)


def test_biases_that_the_configuration_asks_for_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(DamagedFile, match=r"q_proj\.bias"):
        load(save_checkpoint(tmp_path, change(BASE, {"attention_bias": True}), random_tensors(BASE)))


@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_unsupported_rope_types_are_named(tmp_path: Path, field: str) -> None:
    raw = change(BASE, {field: {"rope_type": "yarn", "factor": 4.0}})
    with pytest.raises(UnsupportedModel, match="rope_type 'yarn'"):
        load(save_checkpoint(tmp_path, raw, random_tensors(BASE)))


def test_another_targets_drafter_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, BASE, {})
    with pytest.raises(DrafterMismatch, match="hidden_size"):
        load(tmp_path, (VOCAB, 64, TARGET_LAYERS))
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        load(tmp_path)


def test_the_bundled_drafter_predicts_the_embedded_model(embedded_model: Path, bundled_drafter: Path) -> None:
    """On a text that the target goes on with by itself, the first depths are far better than chance (1 in 49,152)."""
    target = LlamaTarget.load(embedded_model, torch.float32, CPU)
    s = target.spec
    sizes = (s.vocab_size, s.hidden_size, s.num_layers)
    drafter = DFlashDrafter.load(bundled_drafter, target.embed, target.head, sizes, torch.float32, CPU)
    target.tap(drafter.config.target_layer_ids)
    ids, steps = random.Random(0).choices(range(100, 2000), k=6), 40
    cache, context = target.allocate(1, 64), drafter.allocate(1, 64 + drafter.config.block_size)
    guesses: list[int] = []
    with torch.inference_mode():
        features, logits = target.prefill(cache, torch.tensor([ids]), torch.tensor([0]))
        drafter.append(context, features, torch.tensor([0]))
        for _ in range(steps):
            position = torch.tensor([len(ids)])
            ids.append(int(logits.argmax()))
            guesses.append(int(propose(drafter, context, ids[-1], len(ids) - 1, 1).argmax()))
            features, logits = target.prefill(cache, torch.tensor([ids[-1:]]), position)
            drafter.append(context, features, position)
    hits = sum(a == b for a, b in zip(guesses, ids[-steps + 1 :], strict=False))
    assert hits >= steps // 4, f"{hits} of {steps - 1}"


def test_the_bundled_drafter_against_the_reference(bundled_drafter: Path) -> None:
    """The real checkpoint: its tensor names, its sizes and its five taps."""
    raw = json.loads((bundled_drafter / "config.json").read_text())
    tensors = {n: t.float() for n, t in load_file(bundled_drafter / "model.safetensors").items()}
    hidden, count = raw["hidden_size"], raw["num_hidden_layers"]
    small = torch.randn(2, 99, hidden, generator=torch.Generator().manual_seed(0))
    embedding, head = small[0] * 0.1, small[1]
    sizes = (raw["vocab_size"], hidden, raw["num_target_layers"])
    drafter = DFlashDrafter.load(
        bundled_drafter, lambda ids: embedding[ids], lambda x: x @ head.T, sizes, torch.float32, CPU
    )
    reference = Reference(raw, tensors, embedding, head, (None,) * count, (False,) * count, raw["rope_theta"])
    features = torch.randn(1, 10, hidden * 5, generator=torch.Generator().manual_seed(1))
    cache = drafter.allocate(1, 32)
    start = append(drafter, cache, features, [4, 6])
    assert_near(propose(drafter, cache, 3, start), reference(features[0], 3))
