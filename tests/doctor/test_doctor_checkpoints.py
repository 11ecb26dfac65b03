"""What names stand for, and what their files say; nothing is downloaded, converted or written."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from tiny_gguf import tiny_llama, write_gguf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from ddtree.config import DRAFT_VOCABULARY
from ddtree.doctor import judge, load
from ddtree.doctor.checkpoints import look, summary
from ddtree.doctor.facts import Checkpoint
from ddtree.doctor.record import build
from ddtree.doctor.text import as_text
from ddtree.drafter import write_vocabulary
from ddtree.models import resolve_model
from machines import cpu

pytestmark = pytest.mark.usefixtures("empty_cache")

LLAMA = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
DFLASH = {
    "architectures": ["DFlashDraftModel"], "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "block_size": 8, "num_target_layers": 8,
    "dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 3, 5]},
}  # fmt: skip


def folder(path: Path, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(path / "tokenizer.json"))
    save_file({"weight": torch.zeros(1024, 1024, dtype=dtype)}, path / "model.safetensors")
    return str(path)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return folder(tmp_path / "model", LLAMA)


def seen(model: str, drafter: str = "none", engine: str = "embedded") -> tuple[Checkpoint, Checkpoint | None]:
    found = json.loads(json.dumps(look(model, drafter, engine)))
    return build(Checkpoint, found["model"]), build(Checkpoint, found["drafter"]) if found["drafter"] else None


def test_a_pair_that_fits(model: str, tmp_path: Path) -> None:
    target, drafter = seen(model, folder(tmp_path / "drafter", DFLASH))
    assert (target.state, target.folder, target.weights_mib, target.refusal, target.damage) == (
        "here",
        model,
        2,
        None,
        None,
    )
    assert target.config["num_hidden_layers"] == 8
    assert drafter is not None
    assert (drafter.state, drafter.weights_mib, drafter.refusal) == ("here", 2, None)
    assert (drafter.misfit, drafter.damage) == (None, None)


def test_a_drafter_with_a_list_of_draft_tokens(model: str, tmp_path: Path) -> None:
    where = tmp_path / "drafter"
    assert seen(model, folder(where, DFLASH))[1].draft_vocab is None  # type: ignore[union-attr]
    write_vocabulary(where / DRAFT_VOCABULARY, [7, 319, 5], 2)
    _, drafter = seen(model, str(where))
    assert drafter is not None
    assert (drafter.draft_vocab, drafter.damage) == (2, None)
    machine = replace(cpu(), drafter=drafter)
    assert f"{where}, 2 MiB in 16 bits, drafts of 2 tokens" in as_text(machine, judge(machine, load()))
    write_vocabulary(where / DRAFT_VOCABULARY, [7, 320], 2)
    _, damaged = seen(model, str(where))
    assert damaged is not None
    assert "token 320, and the target's vocabulary has 320" in (damaged.damage or "")


@pytest.mark.parametrize(
    ("dtype", "mib"), [(torch.float32, 2), (torch.float16, 2), (torch.float64, 2), (torch.int8, 1), (torch.uint8, 1)]
)
def test_weights_count_as_they_are_loaded(tmp_path: Path, dtype: torch.dtype, mib: int) -> None:
    assert seen(folder(tmp_path / "m", LLAMA, dtype))[0].weights_mib == mib


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 32000}, "vocab_size 32000"),
        ({"hidden_size": 128}, "hidden_size 128"),
        ({"num_target_layers": 36}, "num_target_layers 36"),
        ({"num_target_layers": None, "dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 9]}}, "[1, 9]"),
        ({"dflash_config": {"mask_token_id": 4000, "target_layer_ids": [1]}}, "mask_token_id 4000"),
    ],
)
def test_a_drafter_of_another_model(model: str, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    _, drafter = seen(model, folder(tmp_path / "drafter", DFLASH | changes))
    assert drafter is not None
    assert words in (drafter.misfit or "")


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 512},  # padded for another machine (vllm#46435)
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},  # nested in another layout (Rapid-MLX#1007)
        {"rope_theta": 1e6},
        {"layer_types": ["sliding_attention"], "sliding_window": 128},  # ik_llama.cpp#2021
    ],
)
def test_a_drafter_that_only_looks_otherwise(model: str, tmp_path: Path, changes: dict[str, Any]) -> None:
    _, drafter = seen(model, folder(tmp_path / "drafter", DFLASH | changes))
    assert drafter is not None
    assert (drafter.refusal, drafter.misfit) == (None, None)


def test_what_the_embedded_engine_refuses(tmp_path: Path) -> None:
    target, drafter = seen(
        folder(tmp_path / "m", LLAMA | {"model_type": "qwen3"}),
        folder(tmp_path / "d", DFLASH | {"architectures": ["DFlash2DraftModel"]}),
    )
    assert "model_type 'qwen3'" in (target.refusal or "")
    assert drafter is not None
    assert "DFlash2DraftModel" in (drafter.refusal or "")
    assert drafter.misfit is None


def test_the_embedded_pair_before_it_is_fetched() -> None:
    target, drafter = seen("smollm2-135m", "auto")
    assert (target.state, target.problem) == ("to fetch", None)
    assert target.weights_mib is not None
    assert target.weights_mib > 200
    assert drafter is not None
    assert (drafter.state, drafter.problem, drafter.misfit) == ("here", None, None)


@pytest.mark.parametrize("inside", [False, True])
def test_a_gguf_file_is_read_and_not_converted(tmp_path: Path, inside: bool) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    target, _ = seen(str(tmp_path if inside else path))
    assert (target.state, target.folder, target.refusal) == ("here", str(path), None)
    assert (target.config["num_hidden_layers"], target.weights_mib) == (2, 1)
    path.write_bytes(path.read_bytes()[:100])
    assert "cannot be read as a GGUF file" in (seen(str(path))[0].damage or "")


@pytest.mark.parametrize("converted", [False, True])
def test_what_the_first_start_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converted: bool) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    if converted:
        resolve_model(str(path))
    assert seen(str(path))[0].to_write is not converted
    assert seen("smollm2-135m")[0].to_write


def test_nothing_is_written(tmp_path: Path, model: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    for name in ("smollm2-135m", model, "org/model", "nothing", str(tmp_path)):
        look(name, "auto")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["nothing", "", "a/b/c", "~nobody-there/x", "x" * 5000])
def test_a_name_that_stands_for_nothing(name: str) -> None:
    target, _ = seen(name)
    assert (target.state, target.name) == ("missing", name)
    assert target.problem


def test_a_folder_that_is_not_whole(model: str, tmp_path: Path) -> None:
    weights = tmp_path / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    found = seen(model)[0]
    assert (found.state, found.problem, found.folder) == ("missing", None, model)
    assert "damaged" in (found.damage or "")


def test_a_field_of_another_kind_is_told_in_the_words_of_loading(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", LLAMA | {"max_position_embeddings": "8192"})
    words = "max_position_embeddings of the model must be a whole number, not '8192': fetch config.json again"
    found = seen(path)[0]
    assert (found.damage, found.refusal, found.state) == (words, None, "here")
    assert seen(path, engine="sglang")[0].damage is None, "SGLang reads it its own way"
    (finding,) = judge(replace(cpu(), model=found), load()).findings
    assert (finding.id, finding.level, finding.seen) == ("model-damaged", "fail", words)
    assert finding.mend == f"copy or download again what is in {path}"


SHAPES = {
    "model.embed_tokens.weight": (320, 64), "model.norm.weight": (64,), "lm_head.weight": (320, 64),
    "model.layers.7.self_attn.q_proj.weight": (64, 64), "model.layers.7.self_attn.k_proj.weight": (32, 64),
    "model.layers.7.self_attn.o_proj.weight": (64, 64), "model.layers.7.mlp.up_proj.weight": (96, 64),
    "model.layers.7.mlp.down_proj.weight": (64, 96), "model.layers.7.input_layernorm.weight": (64,),
}  # fmt: skip
DRAFT_SHAPES = {"fc.weight": (64, 192), "norm.weight": (64,), "layers.0.mlp.gate_proj.weight": (96, 64)}


def save(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, path / "model.safetensors")


@pytest.mark.parametrize("wrong", [None, *SHAPES])
def test_weights_of_other_shapes_than_the_configuration_asks_for(model: str, tmp_path: Path, wrong: str | None) -> None:
    save(tmp_path / "model", SHAPES | ({wrong: (7, 5)} if wrong else {}))
    said = f"weight {wrong!r} in {model} has shape (7, 5), config.json asks for {SHAPES[wrong]}" if wrong else None
    assert seen(model)[0].damage == said


@pytest.mark.parametrize("wrong", [None, *DRAFT_SHAPES])
def test_weights_of_a_drafter_of_other_shapes(model: str, tmp_path: Path, wrong: str | None) -> None:
    path = folder(tmp_path / "drafter", DFLASH)
    save(tmp_path / "drafter", DRAFT_SHAPES | ({wrong: (7, 5)} if wrong else {}))
    drafter = seen(model, path)[1]
    assert drafter is not None
    assert (drafter.damage is None) == (wrong is None)
    assert wrong is None or f"weight {wrong!r}" in (drafter.damage or "")


@pytest.mark.parametrize("text", ["{}", "", '{"version": "1.0"}'])
def test_a_tokenizer_that_is_none(model: str, tmp_path: Path, text: str) -> None:
    assert seen(model)[0].damage is None
    (tmp_path / "model/tokenizer.json").write_text(text)
    assert (seen(model)[0].damage or "").startswith(f"the tokenizer in {model} cannot be read (")


def test_names_that_sglang_does_not_know(tmp_path: Path) -> None:
    """`serve --engine sglang` resolves the embedded model and .gguf files; other names of the cache it hands on."""
    converted = resolve_model(str(write_gguf(tmp_path / "tiny.gguf", tiny_llama())))
    assert seen(converted.name)[0].problem is None
    problem = seen(converted.name, engine="sglang")[0].problem or ""
    assert "which SGLang does not know" in problem
    assert str(converted) in problem
    assert seen(str(converted), engine="sglang")[0].problem is None
    assert seen("smollm2-135m", engine="sglang")[0].problem is None
    for drafter, known in (("auto", True), ("smollm2-135m-dflash", False)):
        found = seen("smollm2-135m", drafter, "sglang")[1]
        assert found is not None
        assert ("which SGLang does not know" in (found.problem or "")) is not known


def test_files_that_only_sglang_reads(model: str, tmp_path: Path) -> None:
    (tmp_path / "model/model.safetensors").rename(tmp_path / "model/pytorch_model.bin")
    assert "pickled" in (seen(model)[0].problem or "")
    target, _ = seen(model, engine="sglang")
    assert (target.state, target.problem, target.weights_mib) == ("here", None, None)
    assert target.config["vocab_size"] == 320


def test_a_snapshot_that_is_not_whole_is_to_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part/config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **options: str(tmp_path / "part"))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert seen("org/model")[0].state == "to fetch"


def test_hub_ids_are_looked_up_on_this_machine_alone(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def snapshot(name: str, **options: Any) -> str:
        asked.append((name, options))
        if name == "org/here":
            return model
        raise FileNotFoundError(name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    target, drafter = seen("org/here", "org/elsewhere")
    assert (target.state, target.folder) == ("here", model)
    assert drafter is not None
    assert (drafter.state, drafter.problem) == ("to fetch", None)
    assert all(options["local_files_only"] for _, options in asked)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    target, drafter = seen("org/elsewhere", "auto")
    assert (target.state, "HF_HUB_OFFLINE" in (target.problem or "")) == ("missing", True)
    assert drafter is not None
    assert "no drafter is known" in (drafter.problem or "")


@pytest.mark.parametrize(
    ("raw", "linear", "quantised"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, True, None),
        ({"text_config": {"full_attention_interval": 4, "vocab_size": 7}}, True, None),
        ({"layer_types": ["full_attention"], "quantization_config": {"quant_method": "fp8"}}, False, "fp8"),
        ({"quantization_config": None}, False, None),
    ],
)
def test_what_of_a_configuration_is_kept(raw: dict[str, Any], linear: bool, quantised: str | None) -> None:
    kept = summary(raw)
    assert (kept["linear_attention"], kept["quantisation"]) == (linear, quantised)
    assert kept.get("vocab_size") == raw.get("text_config", {}).get("vocab_size")
