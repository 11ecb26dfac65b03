"""DrafterConfig: every field of a z-lab config.json honoured, or refused by name."""

from typing import Any

import pytest

from ddtree.drafter import DrafterConfig
from ddtree.errors import DamagedFile, DDTreeError, DrafterMismatch, UnsupportedModel
from dflash_reference import BASE, HIDDEN, TARGET_LAYERS, VOCAB, change

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = (VOCAB, HIDDEN, TARGET_LAYERS)


def read(**changes: Any) -> DrafterConfig:
    return DrafterConfig.read(change(BASE, changes))


def test_sizes_are_read() -> None:
    c = read()
    assert (c.hidden_size, c.intermediate_size, c.num_layers, c.num_heads, c.num_kv_heads) == (32, 40, 3, 4, 2)
    assert (c.head_dim, c.vocab_size, c.rms_norm_eps, c.rope_theta, c.max_position) == (8, 61, 1e-5, 1000.0, 512)
    assert (c.block_size, c.depths, c.mask_token_id, c.target_layer_ids) == (6, 5, 7, (1, 4))
    assert c.num_target_layers == TARGET_LAYERS
    assert (c.output_multiplier, c.final_logit_softcapping, c.input_embedding_scale) == (1.0, None, 1.0)
    c.check_fits(*SIZES)


def test_the_order_of_taps_is_kept() -> None:
    assert read(dflash_config={"target_layer_ids": [4, 1, 3]}).target_layer_ids == (4, 1, 3)


def test_block_size_at_either_level() -> None:
    assert read(block_size=16).block_size == 16
    assert read(block_size=..., dflash_config={"block_size": 10}).depths == 9


@pytest.mark.parametrize("field", ["output_multiplier", "final_logit_softcapping", "input_embedding_scale"])
def test_optional_factors_at_either_level(field: str) -> None:
    assert getattr(read(**{field: 2.5}), field) == 2.5
    assert getattr(read(dflash_config={field: 0.5}), field) == 0.5


NULLS = {
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "input_embedding_scale": 1.0,
    "num_target_layers": None,
    "num_key_value_heads": 4,
    "head_dim": 8,
}


@pytest.mark.parametrize("field", NULLS)
def test_null_means_absent(field: str) -> None:
    value = {"num_key_value_heads": "num_kv_heads"}.get(field, field)
    assert getattr(read(**{field: None}), value) == NULLS[field]


def test_rope_at_either_place() -> None:
    assert read(rope_theta=5e5).rope_theta == 5e5
    assert read(rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope_theta == 7.0
    scaling = {"type": "linear", "factor": 2.0}
    assert read(rope_scaling=scaling).rope_scaling == scaling
    assert read(rope_scaling=None).rope_scaling == {}


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("changes", "windows", "causal"),
    [
        ({}, (None, None, None), (False, False, False)),
        ({"layer_types": [FULL, FULL, FULL], "sliding_window": 8}, (None, None, None), (False, False, False)),
        ({"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 8}, (8, None, 8), (True, False, True)),
        ({"layer_types": [SLIDING] * 3, "sliding_window": 8, "is_causal": False}, (8, 8, 8), (False, False, False)),
        ({"layer_types": [SLIDING] * 3, "sliding_window": 8, "is_causal": None}, (8, 8, 8), (True, True, True)),
        ({"is_causal": True}, (None, None, None), (True, True, True)),
        ({"is_causal": False}, (None, None, None), (False, False, False)),
    ],
)
def test_windows_and_causality_of_layers(
    changes: dict[str, Any], windows: tuple[int | None, ...], causal: tuple[bool, ...]
) -> None:
    c = read(**changes)
    assert (c.windows, c.causal) == (windows, causal)


@pytest.mark.parametrize(
    ("use", "layers", "windows"),
    [
        (True, 0, (8, 8, 8)),
        (True, 2, (None, None, 8)),
        (True, 3, (None, None, None)),
        (True, 28, (None, None, None)),
        (True, ..., (None, None, None)),
        (False, 0, (None, None, None)),
        (..., 0, (None, None, None)),
    ],
)
def test_sliding_layers_without_layer_types(use: Any, layers: Any, windows: tuple[int | None, ...]) -> None:
    """Layers from max_window_layers on are sliding, if use_sliding_window says so; as transformers has it for Qwen3."""
    fields = {"use_sliding_window": use, "max_window_layers": layers}
    given = {name: value for name, value in fields.items() if value is not ...}
    c = read(sliding_window=8, **given)
    assert c.windows == windows
    assert c.causal == tuple(w is not None for w in windows)


@pytest.mark.parametrize("value", [True, False])
def test_is_causal_in_dflash_config(value: bool) -> None:
    """Some files have the field there, like most of the drafter's own."""
    c = read(layer_types=[SLIDING, FULL, FULL], sliding_window=8, dflash_config={"is_causal": value})
    assert c.causal == (value,) * 3


@pytest.mark.parametrize(("ours", "target"), [(152064, 152576), (152576, 152064), (151936, 152064), (61, 61)])
def test_padded_vocabularies_share_a_head(ours: int, target: int) -> None:
    read(vocab_size=ours).check_fits(target, HIDDEN, TARGET_LAYERS)


MISFITS: dict[str, tuple[dict[str, Any], tuple[int, int, int], tuple[str, ...]]] = {
    "hidden size": ({}, (VOCAB, 64, TARGET_LAYERS), ("hidden_size 32", "64")),
    "vocabulary": ({"vocab_size": 49152}, (151936, HIDDEN, TARGET_LAYERS), ("vocab_size 49152", "151936")),
    "layers": ({}, (VOCAB, HIDDEN, 7), ("num_target_layers 6", "7")),
    "tap beyond the layers": (
        {"num_target_layers": None, "dflash_config": {"target_layer_ids": [1, 6]}},
        SIZES,
        ("target_layer_ids [1, 6]", "0 to 5"),
    ),
    "negative tap": ({"dflash_config": {"target_layer_ids": [-1, 2]}}, SIZES, ("target_layer_ids [-1, 2]",)),
    "no taps": ({"dflash_config": {"target_layer_ids": []}}, SIZES, ("target_layer_ids []",)),
    "mask token": ({"dflash_config": {"mask_token_id": 61}}, SIZES, ("mask_token_id 61", "61 tokens")),
    "negative mask token": ({"dflash_config": {"mask_token_id": -1}}, SIZES, ("mask_token_id -1",)),
}


@pytest.mark.parametrize("case", MISFITS)
def test_another_targets_drafter_is_refused_by_field(case: str) -> None:
    changes, sizes, words = MISFITS[case]
    with pytest.raises(DrafterMismatch) as caught:
        read(**changes).check_fits(*sizes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_last_layer_tap_and_a_last_token_mask_fit() -> None:
    read(dflash_config={"target_layer_ids": [0, 5], "mask_token_id": 60}).check_fits(*SIZES)
    read(num_target_layers=...).check_fits(VOCAB, HIDDEN, 12)


@pytest.mark.parametrize("size", [1, 0, -3])
def test_a_block_that_proposes_nothing_is_refused(size: int) -> None:
    with pytest.raises(UnsupportedModel, match=f"block_size {size}"):
        read(block_size=size).check_fits(*SIZES)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"architectures": ["Qwen3ForCausalLM"]}, "architectures", "Qwen3ForCausalLM"),
    ({"architectures": ["DFlash2DraftModel"]}, "architectures", "DFlash2DraftModel"),
    ({"architectures": []}, "architectures", "DFlashDraftModel is"),
    ({"architectures": ...}, "architectures", "DFlashDraftModel is"),
    ({"architectures": None}, "architectures", "DFlashDraftModel is"),
    ({"hidden_act": "gelu"}, "hidden_act", "gelu"),
    ({"quantization_config": {"bits": 4}}, "quantization_config", "bits"),
    ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "layer_types", "linear_attention"),
]


@pytest.mark.parametrize(("changes", "param", "word"), REFUSED)
def test_what_is_not_supported_is_named(changes: dict[str, Any], param: str, word: str) -> None:
    with pytest.raises(UnsupportedModel, match=param) as caught:
        read(**changes)
    assert caught.value.param == param
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": [FULL] * 2}, "layer_types names 2 layers"),
        ({"layer_types": [SLIDING] * 3}, "sliding_window"),
        ({"layer_types": [SLIDING] * 3, "sliding_window": None}, "sliding_window"),
    ],
)
def test_layer_types_that_contradict_other_fields(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DamagedFile, match=words):
        read(**changes)


TOP = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "block_size")
NESTED = ("mask_token_id", "target_layer_ids")


@pytest.mark.parametrize("field", [*TOP, *NESTED])
def test_missing_fields_are_named(field: str) -> None:
    gone: dict[str, Any] = {field: ...}
    with pytest.raises(DamagedFile, match=field):
        read(**(gone if field in TOP else {"dflash_config": gone}))


@pytest.mark.parametrize("dflash", [..., None, {}])
def test_a_file_without_dflash_config(dflash: Any) -> None:
    raw = change(BASE, {"dflash_config": ...}) | ({} if dflash is ... else {"dflash_config": dflash})
    with pytest.raises(DamagedFile, match="mask_token_id"):
        DrafterConfig.read(raw)


@pytest.mark.parametrize("value", ["many", [4], 0, -4])
@pytest.mark.parametrize("field", ["hidden_size", "num_attention_heads", "num_hidden_layers"])
def test_values_that_are_no_size_are_named(field: str, value: Any) -> None:
    with pytest.raises(DDTreeError, match=field):
        read(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"), [("mask_token_id", None), ("mask_token_id", "<mask>"), ("target_layer_ids", 3)]
)
def test_values_of_another_kind_are_named(field: str, value: Any) -> None:
    with pytest.raises(DDTreeError, match=field):
        read(dflash_config={field: value})


def test_key_heads_that_do_not_divide_the_query_heads_are_named() -> None:
    with pytest.raises(DDTreeError, match="num_key_value_heads"):
        read(num_key_value_heads=3)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"architectures": 5}, "architectures"),
        ({"layer_types": 5}, "layer_types"),
        ({"layer_types": [["x"]] * 3}, "layer_types"),
    ],
)
def test_lists_that_are_none_are_named(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(DDTreeError, match=word):
        read(**changes)


def test_a_block_beyond_all_reason_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="block_size 100000"):
        read(block_size=100_000).check_fits(*SIZES)
