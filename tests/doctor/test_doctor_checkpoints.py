"""What names stand for, and what their files say; nothing is downloaded, converted or written."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from tiny_gguf import tiny_llama, write_gguf

from ddtree.doctor.checkpoints import look, summary
from ddtree.doctor.facts import Checkpoint
from ddtree.doctor.record import build

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
    (path / "tokenizer.json").write_text("{}")
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
    assert (target.state, target.folder, target.weights_mib, target.refusal) == ("here", model, 2, None)
    assert target.config["num_hidden_layers"] == 8
    assert drafter is not None
    assert (drafter.state, drafter.weights_mib, drafter.refusal, drafter.misfit) == ("here", 2, None, None)


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
    assert "cannot be read as a GGUF file" in (seen(str(path))[0].problem or "")


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
    assert "damaged" in (seen(model)[0].problem or "")


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
