"""What the names given as --model and --drafter stand for, and what is said about those that stand for nothing."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_gguf import tiny_llama, write_gguf

from ddtree import models
from ddtree.errors import DamagedFile, DDTreeError, ModelNotFound, UnsupportedModel
from ddtree.models import ModelEntry, list_models, resolve_drafter, resolve_model

pytestmark = pytest.mark.usefixtures("empty_cache")


def test_public_names() -> None:
    names = ["ModelEntry", "cache_dir", "drop_unfinished", "list_models", "resolve_drafter", "resolve_model"]
    assert sorted(models.__all__) == names


def test_a_folder_is_itself(hf_folder: Path) -> None:
    assert resolve_model(str(hf_folder)) == hf_folder


def test_a_folder_in_shards(hf_folder: Path) -> None:
    shutil.rmtree(hf_folder)
    tiny_llama().save_pretrained(hf_folder, max_shard_size="50KB")
    (hf_folder / "tokenizer.json").write_text("{}")
    assert len(list(hf_folder.glob("*.safetensors"))) > 1
    assert resolve_model(str(hf_folder)) == hf_folder

    gone = sorted(hf_folder.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(DamagedFile, match=f"{gone.name} is missing"):
        resolve_model(str(hf_folder))


def test_home_is_understood(hf_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(hf_folder.parent))
    assert resolve_model("~/hf") == hf_folder


UNKNOWN = [
    "nonsense",
    "",
    ".hidden",
    "a/b/c",
    "./gone",
    "/no/such/folder",
    "gone.gguf",
    "org/na me",
    "~nobody/x",
    "a\0b",
    "x" * 5000,
]


@pytest.mark.parametrize("name", UNKNOWN, ids=range(len(UNKNOWN)))
def test_unknown_names_are_told_what_there_is(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"smollm2-135m .* local folder .* \.gguf file.* hub id"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["x" * 5000, "org/" + "x" * 5000, "/" + "x" * 5000])
def test_long_names_are_shortened(name: str) -> None:
    for resolve in (resolve_model, lambda name: resolve_drafter("auto", name), lambda name: resolve_drafter(name, "m")):
        with pytest.raises(ModelNotFound, match="xxx…") as error:
            resolve(name)
        assert len(str(error.value)) < 400
        assert "x" * 81 not in str(error.value)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=r"not a \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"))


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_pickled_weights_are_refused(hf_folder: Path) -> None:
    (hf_folder / "model.safetensors").rename(hf_folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="pickled"):
        resolve_model(str(hf_folder))


def test_no_weights(hf_folder: Path) -> None:
    (hf_folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="no weights"):
        resolve_model(str(hf_folder))


def test_no_tokenizer(hf_folder: Path) -> None:
    (hf_folder / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFound, match="no tokenizer"):
        resolve_model(str(hf_folder))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def _list_header(path: Path) -> None:
    path.write_bytes((2).to_bytes(8, "little") + b"[]")


@pytest.mark.parametrize("damage", [_cut, _grow, _pointer, _list_header, lambda path: path.write_bytes(b"")])
def test_damaged_weights(hf_folder: Path, damage) -> None:
    damage(hf_folder / "model.safetensors")
    with pytest.raises(DamagedFile, match=r"model\.safetensors is damaged .* again"):
        resolve_model(str(hf_folder))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000], ids=range(4))
def test_damaged_config(hf_folder: Path, text: str) -> None:
    (hf_folder / "config.json").write_text(text)
    with pytest.raises(DamagedFile, match=r"config\.json"):
        resolve_model(str(hf_folder))


def test_a_weights_header_of_many_brackets(hf_folder: Path) -> None:
    (hf_folder / "model.safetensors").write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000)
    with pytest.raises(DamagedFile, match=r"model\.safetensors is damaged"):
        resolve_model(str(hf_folder))


def test_a_converted_model_that_is_damaged(gguf_path: Path) -> None:
    folder = resolve_model(str(gguf_path))
    (folder / "tokenizer.json").write_text("")
    with pytest.raises(DamagedFile, match=r"is damaged, or .* pass the \.gguf file"):
        resolve_model(folder.name)
    assert resolve_model(str(gguf_path)) == folder == resolve_model(folder.name)


def test_damaged_index(hf_folder: Path) -> None:
    (hf_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": 3}))
    with pytest.raises(DamagedFile, match="weight_map"):
        resolve_model(str(hf_folder))


def test_a_folder_with_two_gguf_files(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match=r"a\.gguf, b\.gguf"):
        resolve_model(str(tmp_path))


def test_drafters(hf_folder: Path) -> None:
    bundled = resolve_drafter("auto", "smollm2-135m")
    assert bundled is not None
    assert json.loads((bundled / "config.json").read_text())["architectures"] == ["DFlashDraftModel"]
    assert resolve_drafter("smollm2-135m-dflash", "whatever") == bundled
    embedded = models.cache_dir() / "models" / "smollm2-135m"
    embedded.mkdir(parents=True)
    assert resolve_drafter("auto", str(embedded)) == bundled
    assert resolve_drafter("none", "smollm2-135m") is None
    (hf_folder / "tokenizer.json").unlink()
    assert resolve_drafter(str(hf_folder), "whatever") == hf_folder


@pytest.mark.parametrize("model", ["org/name", "/some/folder"])
def test_no_drafter_is_known(model: str) -> None:
    with pytest.raises(
        ModelNotFound, match=f"no drafter is known for {model}: pass --drafter .* --drafter none"
    ) as error:
        resolve_drafter("auto", model)
    assert error.value.param == "drafter"


def test_bad_drafters(hf_folder: Path) -> None:
    with pytest.raises(ModelNotFound, match="no drafter called 'nonsense'") as error:
        resolve_drafter("nonsense", "smollm2-135m")
    assert error.value.param == "drafter"
    with pytest.raises(UnsupportedModel, match="is a file"):
        resolve_drafter(str(hf_folder / "model.safetensors"), "smollm2-135m")


def test_listing(tmp_path: Path) -> None:
    embedded, drafter = list_models()
    assert (embedded.name, embedded.kind, embedded.size, embedded.cached) == ("smollm2-135m", "target", 0, False)
    assert embedded.licence == drafter.licence == "Apache-2.0"
    assert (drafter.name, drafter.kind, drafter.cached) == ("smollm2-135m-dflash", "drafter", True)
    assert 10_000_000 < drafter.size < 40_000_000

    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    folder = resolve_model(str(path))
    (folder.parent / "stray").mkdir()
    entry = list_models()[2]
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert entry == ModelEntry(folder.name, "target", size, "apache-2.0", f"converted from {path}", folder, True)
    assert len(list_models()) == 3
    path.unlink()
    assert resolve_model(entry.name) == folder


def test_a_cache_that_cannot_be_written(tmp_path: Path, gguf_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path / "file"))
    with pytest.raises(DDTreeError, match="set DDTREE_CACHE to another folder"):
        resolve_model(str(gguf_path))
