"""GGUF files become folders that transformers loads as the same model; what cannot be converted is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError
from tiny_gguf import SPECIAL, TOKENS, byte_level_tokenizer, tiny_llama, write_gguf
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from ddtree.errors import DamagedFile, DDTreeError, UnsupportedModel
from ddtree.models import convert, resolve_model

pytestmark = pytest.mark.usefixtures("empty_cache")

Change = Callable[[gguf.GGUFWriter], None]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def logits(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(40)[None] % len(TOKENS), position_ids=torch.arange(40)[None] * 7).logits


def load(folder: Path) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def rope_factors(writer: gguf.GGUFWriter, *, scale: float = 1.0) -> None:
    plain, scaled = (
        LlamaForCausalLM(tiny_llama(rope_parameters=parameters, head_dim=64).config).model.rotary_emb.inv_freq
        for parameters in ({"rope_type": "default", "rope_theta": LLAMA3["rope_theta"]}, LLAMA3)
    )
    writer.add_tensor("rope_freqs.weight", (plain / scaled * scale).numpy())


@pytest.mark.parametrize(
    ("changes", "change"),
    [
        ({}, None),
        ({"tie_word_embeddings": False}, None),
        ({"num_key_value_heads": 4}, None),
        ({"num_key_value_heads": 1, "head_dim": 32}, None),
        ({"rope_parameters": LLAMA3, "head_dim": 64}, rope_factors),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
            lambda writer: (
                writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
                writer.add_rope_scaling_factor(4.0),
            ),
        ),
    ],
    ids=["tied", "untied", "all heads", "one head", "llama3", "linear"],
)
def test_the_same_model(tmp_path: Path, changes: dict, change: Change | None) -> None:
    model = tiny_llama(**changes)
    folder = resolve_model(str(write_gguf(tmp_path / "tiny.gguf", model, change=change)))
    loaded = load(folder)
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.config.tie_word_embeddings == model.config.tie_word_embeddings
    assert loaded.config.rms_norm_eps == 1e-5
    assert loaded.generation_config.eos_token_id == 2


def test_rope_factors_of_one_scale_nothing(tmp_path: Path) -> None:
    model = tiny_llama()
    ones = np.ones(model.config.head_dim // 2, dtype=np.float32)
    path = write_gguf(tmp_path / "tiny.gguf", model, change=lambda writer: writer.add_tensor("rope_freqs.weight", ones))
    assert torch.equal(logits(load(resolve_model(str(path)))), logits(model))


def test_quantised_weights_are_what_the_gguf_library_makes_of_them(tmp_path: Path) -> None:
    model, kind = tiny_llama(), gguf.GGMLQuantizationType.Q8_0
    loaded = load(resolve_model(str(write_gguf(tmp_path / "tiny.gguf", model, kind=kind))))
    name = "model.layers.1.mlp.up_proj.weight"
    original = model.state_dict()[name].numpy()
    expected = gguf.quants.dequantize(gguf.quants.quantize(original, kind), kind)
    assert torch.equal(loaded.state_dict()[name], torch.from_numpy(expected).bfloat16().float())


def test_large_models_are_written_in_shards(gguf_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "SHARD_BYTES", 40_000)
    folder = resolve_model(str(gguf_path))
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert torch.equal(logits(load(folder)), logits(tiny_llama()))


def test_conversion_is_done_once_per_content(
    tmp_path: Path, gguf_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = resolve_model(str(gguf_path))
    assert "converting tiny model.gguf: 100%" in capsys.readouterr().err
    stamp = (folder / "ddtree.json").stat().st_mtime_ns
    assert resolve_model(str(gguf_path)) == folder
    assert (folder / "ddtree.json").stat().st_mtime_ns == stamp
    assert capsys.readouterr().err == ""
    manifest = json.loads((folder / "ddtree.json").read_text())
    assert manifest["name"] == folder.name == f"tiny-model-{manifest['sha256'][:12]}"

    write_gguf(gguf_path, tiny_llama(tie_word_embeddings=False))
    assert resolve_model(str(gguf_path)) != folder


def test_a_folder_with_one_gguf_file(gguf_path: Path) -> None:
    assert resolve_model(str(gguf_path.parent)) == resolve_model(str(gguf_path))


def test_a_damaged_conversion_is_made_again(gguf_path: Path) -> None:
    folder = resolve_model(str(gguf_path))
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    assert resolve_model(str(gguf_path)) == folder
    assert weights.read_bytes() == whole


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_damaged_tokenizer_is_made_again(gguf_path: Path, name: str) -> None:
    folder = resolve_model(str(gguf_path))
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(b"")
    assert resolve_model(str(gguf_path)) == folder
    assert (folder / name).read_bytes() == whole


@pytest.mark.parametrize("kept", [0, 3, 20, 100, 2000, -200_000, -10])
def test_a_file_that_is_cut_short(gguf_path: Path, empty_cache: Path, kept: int) -> None:
    gguf_path.write_bytes(gguf_path.read_bytes()[:kept])
    with pytest.raises(DamagedFile, match=r"tiny model\.gguf .* cut short or damaged; download or copy it again"):
        resolve_model(str(gguf_path))
    assert not empty_cache.exists()  # nothing is left behind, not even a lock


def test_a_file_of_junk(tmp_path: Path) -> None:
    path = tmp_path / "junk.gguf"
    path.write_bytes(b"GGUF\3\0\0\0" + b"\xff" * 4000)
    with pytest.raises(DamagedFile, match="impossible counts"):
        resolve_model(str(path))


def text(key: str) -> Change:
    return lambda writer: writer.add_string(key, "x")


UNSOUND: list[tuple[str, Change]] = [
    ("TypeError", lambda writer: writer.add_array("llama.attention.key_length", [16, 16])),
    ("TypeError", lambda writer: writer.add_array("llama.rope.freq_base", [1.0])),
    ("ValueError", text("llama.rope.scaling.factor")),
    ("ValueError", text("llama.rope.dimension_count")),
    ("ValueError", text("split.count")),
    ("TypeError", lambda writer: writer.add_array("split.count", [1])),
    ("TypeError", text("tokenizer.ggml.bos_token_id")),
    ("ValueError", text("tokenizer.ggml.eos_token_id")),
    ("ZeroDivisionError", lambda writer: writer.add_head_count(0)),
    ("lacks the tensors of its 4000000000 layers", lambda writer: writer.add_block_count(4_000_000_000)),
]


def replacing(change: Change) -> Change:
    """Let `change` give values to keys that have one already."""

    def changed(writer: gguf.GGUFWriter) -> None:
        fresh = gguf.GGUFWriter(None, "llama")
        fresh.kv_data[0].clear()
        change(fresh)
        writer.kv_data[0].update(fresh.kv_data[0])

    return changed


@pytest.mark.parametrize(("what", "change"), UNSOUND, ids=range(len(UNSOUND)))
def test_values_that_cannot_be(tmp_path: Path, empty_cache: Path, what: str, change: Change) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), change=replacing(change))
    with pytest.raises(DamagedFile, match=rf"tiny\.gguf .*{what}.* download or convert (it|the file) again"):
        resolve_model(str(path))
    assert not empty_cache.exists()


def test_weights_that_cannot_be_read(gguf_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf.quants, "dequantize", lambda data, kind: np.zeros(7))
    with pytest.raises(DamagedFile, match=r"tiny model\.gguf cannot be converted \(ValueError"):
        resolve_model(str(gguf_path))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ImportError, MemoryError])
def test_what_is_no_fault_of_the_file(
    gguf_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def broken(file: object) -> None:
        raise error

    monkeypatch.setattr(convert, "tokenizer_files", broken)
    with pytest.raises(error):
        resolve_model(str(gguf_path))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_a_full_disk_is_no_damaged_file(
    gguf_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(DDTreeError, match=r"could not be prepared .*No space left on device.* Free space") as caught:
        resolve_model(str(gguf_path))
    assert not isinstance(caught.value, DamagedFile)
    assert [path.suffix for path in (empty_cache / "models").iterdir()] == [".lock"]


def test_a_lacking_tensor(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), skip=("blk.1.ffn_up.weight",))
    with pytest.raises(DamagedFile, match=r"lacks the tensor blk\.1\.ffn_up\.weight"):
        resolve_model(str(path))


def test_a_tensor_of_another_shape(tmp_path: Path) -> None:
    model = tiny_llama()
    model.model.layers[0].mlp.up_proj.weight.data = torch.zeros(96, 32)
    with pytest.raises(DamagedFile, match=r"blk\.0\.ffn_up\.weight has shape \(96, 32\) where \(96, 64\)"):
        resolve_model(str(write_gguf(tmp_path / "tiny.gguf", model)))


REFUSED: list[tuple[str, Change]] = [
    ("mixture of experts", lambda writer: writer.add_expert_count(8)),
    ("rope scaling of type 'yarn'", lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)),
    ("not Llama 3's", lambda writer: writer.add_tensor("rope_freqs.weight", np.linspace(1, 9, 8, dtype=np.float32))),
    ("not Llama 3's", lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(3, dtype=np.float32))),
    ("tensor blk.0.attn_q.bias", lambda writer: writer.add_tensor("blk.0.attn_q.bias", np.ones(64, dtype=np.float32))),
    ("split over several", lambda writer: writer.add_uint16("split.count", 2)),
]


@pytest.mark.parametrize(("what", "change"), REFUSED)
def test_refused_by_name(tmp_path: Path, what: str, change: Change) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), change=change)
    with pytest.raises(UnsupportedModel, match=f"{what}.* is not supported"):
        resolve_model(str(path))


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), architecture="qwen3")
    with pytest.raises(UnsupportedModel, match="architecture 'qwen3'"):
        resolve_model(str(path))


def test_partial_rotary_embedding_is_refused(tmp_path: Path) -> None:
    model = tiny_llama(head_dim=32)
    model.config.head_dim = 16  # what the writer states as the rotary width
    path = write_gguf(tmp_path / "tiny.gguf", model, change=lambda writer: writer.add_key_length(32))
    with pytest.raises(UnsupportedModel, match="a part of the head"):
        resolve_model(str(path))


def test_unknown_quantisation_is_refused(gguf_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dequantize(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
        raise NotImplementedError  # what gguf raises for a quantisation it does not know

    monkeypatch.setattr(gguf.quants, "dequantize", dequantize)
    with pytest.raises(UnsupportedModel, match="the quantisation F32"):
        resolve_model(str(gguf_path))


def test_every_end_of_a_turn_counts(tmp_path: Path) -> None:
    def tokenizer(writer: gguf.GGUFWriter) -> None:
        byte_level_tokenizer(writer)
        writer.add_eos_token_id(0)

    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), tokenizer=tokenizer)
    folder = resolve_model(str(path))
    ids = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert [TOKENS[token] for token in ids] == [SPECIAL[0], SPECIAL[2]]
