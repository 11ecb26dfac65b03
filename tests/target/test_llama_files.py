"""What LlamaTarget makes of a model folder: every field honoured or refused by name, every damage told by its file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ddtree.errors import DamagedFile, DDTreeError, ModelNotFound, UnsupportedModel
from ddtree.target import LlamaTarget
from llama_oracle import BASE, CPU, LLAMA3, Oracle, assert_near, random_llama, round_weights

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]


def load(folder: Path) -> LlamaTarget:
    return LlamaTarget.load(folder, torch.float32, CPU)


def check(oracle: Oracle) -> None:
    """The folder's logits equal those of the model that was saved."""
    target = load(oracle.folder)
    with torch.inference_mode():
        _, logits = target.prefill(target.allocate(1, 16), torch.tensor([IDS]), torch.tensor([0]))
    assert_near(logits[0], oracle.logits(IDS)[-1])


def edit(folder: Path, **changes: Any) -> None:
    """Change fields of config.json; None with a trailing `_absent` removes one."""
    raw = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        if name.endswith("_absent"):
            del raw[name.removesuffix("_absent")]
        else:
            raw[name] = value
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Oracle(random_llama(num_hidden_layers=1), tmp_path / "llama").folder


def test_shards_with_an_index(tmp_path: Path) -> None:
    oracle = Oracle(random_llama(attention_bias=True), tmp_path, shard="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    check(oracle)
    sorted(tmp_path.glob("*.safetensors"))[-1].unlink()
    with pytest.raises(DamagedFile, match=r"is incomplete: its index names model-.*safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("rope", [LLAMA3, {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.5}])
def test_rope_fields_as_older_files_have_them(tmp_path: Path, rope: dict[str, Any], key: str) -> None:
    """rope_theta at the top level and rope_scaling beside it, instead of rope_parameters."""
    oracle = Oracle(random_llama(rope_parameters=rope), tmp_path)
    scaling = {k: v for k, v in rope.items() if k not in ("rope_type", "rope_theta")} | {key: rope["rope_type"]}
    edit(tmp_path, rope_parameters_absent=None, rope_theta=rope["rope_theta"], rope_scaling=scaling)
    check(oracle)


def test_fields_that_may_be_absent_or_null(tmp_path: Path) -> None:
    oracle = Oracle(random_llama(num_key_value_heads=4, rms_norm_eps=1e-6), tmp_path)
    edit(tmp_path, num_key_value_heads_absent=None, head_dim=None, rms_norm_eps_absent=None, rope_parameters=None)
    edit(tmp_path, rope_scaling=None, tie_word_embeddings_absent=None, quantization_config=None, pretraining_tp=1)
    check(oracle)


def test_weights_of_another_dtype_are_cast(tmp_path: Path) -> None:
    oracle = Oracle(round_weights(random_llama()), tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    check(oracle)


def test_spec(folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    spec = load(folder).spec
    sizes = (spec.vocab_size, spec.hidden_size, spec.num_layers, spec.max_position)
    assert sizes == (61, 32, 1, 256)
    assert (spec.dtype, spec.device, spec.end_ids) == (torch.float32, CPU, (2,))


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([7, 8], None, (7, 8)),
        (2, [5, 6], (5, 6)),
        (2, 5, (5,)),
        (None, None, ()),
        (0, None, (0,)),
    ],
)
def test_end_of_sequence_ids(folder: Path, config: Any, generation: Any, expected: tuple[int, ...]) -> None:
    """generation_config.json has the last word, since it is what generation stops at."""
    edit(folder, eos_token_id=config)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert load(folder).spec.end_ids == expected


UNSUPPORTED = {
    "model_type": "qwen3",
    "hidden_act": "gelu",
    "quantization_config": {"quant_method": "gptq"},
    "pretraining_tp": 2,
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_unsupported_fields_are_named(folder: Path, field: str) -> None:
    value = UNSUPPORTED[field]
    edit(folder, **{field: value})
    with pytest.raises(UnsupportedModel, match=field) as caught:
        load(folder)
    assert caught.value.param == field
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope"])
@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_unsupported_rope_types_are_named(folder: Path, kind: str, field: str) -> None:
    edit(folder, rope_parameters=None)
    edit(folder, **{field: {"rope_type": kind, "factor": 2.0}})
    with pytest.raises(UnsupportedModel, match=f"rope_type '{kind}'"):
        load(folder)


REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@pytest.mark.parametrize("field", REQUIRED)
def test_missing_fields_are_named(folder: Path, field: str) -> None:
    edit(folder, **{f"{field}_absent": None})
    with pytest.raises(DamagedFile, match=field):
        load(folder)


@pytest.mark.parametrize(
    ("rope", "field"),
    [
        ({"rope_type": "linear"}, "factor"),
        *(({k: v for k, v in LLAMA3.items() if k != f}, f) for f in ("factor", "low_freq_factor", "high_freq_factor")),
    ],
)
def test_missing_rope_fields_are_named(folder: Path, rope: dict[str, Any], field: str) -> None:
    edit(folder, rope_parameters=rope)
    with pytest.raises(DDTreeError, match=field):
        load(folder)


@pytest.mark.parametrize("value", ["many", None, [4], 0, -4])
@pytest.mark.parametrize("field", ["num_attention_heads", "hidden_size", "num_hidden_layers"])
def test_values_that_are_no_size_are_named(folder: Path, field: str, value: Any) -> None:
    edit(folder, **{field: value})
    with pytest.raises(DDTreeError, match=field):
        load(folder)


def test_key_heads_that_do_not_divide_the_query_heads_are_named(tmp_path: Path) -> None:
    """Shapes fit the file here, so only the configuration can tell."""
    Oracle(random_llama(num_key_value_heads=4), tmp_path)
    file = tmp_path / "model.safetensors"
    cut = {n: t[:24] if "k_proj" in n or "v_proj" in n else t for n, t in load_file(file).items()}
    save_file({n: t.contiguous() for n, t in cut.items()}, file)
    edit(tmp_path, num_key_value_heads=3)
    with pytest.raises(DDTreeError, match="num_key_value_heads"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("fields", "weight"), [({"attention_bias": True}, "q_proj.bias"), ({"mlp_bias": True}, "gate_proj.bias")]
)
def test_biases_that_the_configuration_asks_for_must_be_there(
    tmp_path: Path, fields: dict[str, bool], weight: str
) -> None:
    Oracle(random_llama(**fields), tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if not n.endswith("bias")}, file)
    with pytest.raises(DamagedFile, match=weight):
        load(tmp_path)


@pytest.mark.parametrize("text", ["{", "", "[1]", "\xff", "null"])
def test_a_configuration_that_is_no_json_object_is_named(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DamagedFile, match=r"config\.json"):
        load(folder)


def test_a_folder_without_configuration(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json does not exist"):
        load(tmp_path)


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"no \.safetensors file"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 7, 100, -1, -1000])
def test_a_truncated_weights_file_is_named(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(DamagedFile, match=r"model\.safetensors"):
        load(folder)


@pytest.mark.parametrize("content", [b"\xff" * 64, b"<!DOCTYPE html><html></html>" * 9])
def test_a_weights_file_of_another_kind_is_named(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(DamagedFile, match=r"model\.safetensors"):
        load(folder)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight"]
)
def test_a_missing_weight_is_named(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DamagedFile, match=name):
        load(folder)


@pytest.mark.parametrize(
    ("field", "value", "weight"),
    [
        ("vocab_size", 62, "model.embed_tokens.weight"),
        ("hidden_size", 64, "model.embed_tokens.weight"),
        ("intermediate_size", 47, "mlp.gate_proj.weight"),
        ("num_hidden_layers", 2, "model.layers.1"),
        ("head_dim", 16, "self_attn.q_proj.weight"),
        ("num_key_value_heads", 1, "self_attn.k_proj.weight"),
    ],
)
def test_weights_of_another_shape_are_named(folder: Path, field: str, value: int, weight: str) -> None:
    assert BASE[field] != value
    edit(folder, **{field: value})
    with pytest.raises(DamagedFile, match=weight):
        load(folder)


@pytest.mark.parametrize("value", ["x", [[1], None], True])
def test_end_ids_that_are_no_ids_are_named(folder: Path, value: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(DamagedFile, match="eos_token_id"):
        load(folder)


@pytest.mark.parametrize(("field", "value"), [("rms_norm_eps", -1), ("rms_norm_eps", 0)])
def test_numbers_that_must_be_positive_are_named(folder: Path, field: str, value: float) -> None:
    edit(folder, **{field: value})
    with pytest.raises(DamagedFile, match=field):
        load(folder)


@pytest.mark.parametrize("rope", [{"rope_type": "linear", "factor": 0}, {"rope_theta": -1}])
def test_rope_that_gives_no_numbers_is_refused(folder: Path, rope: dict[str, Any]) -> None:
    edit(folder, rope_parameters=rope)
    with pytest.raises(DamagedFile, match="must be above 0"):
        load(folder)


def test_integer_weights_are_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file({name: tensor.int() for name, tensor in load_file(file).items()}, file)
    with pytest.raises(DamagedFile, match="quantised folders are not supported"):
        load(folder)


def test_a_bottomless_configuration_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(DamagedFile, match=r"config\.json"):
        load(folder)
