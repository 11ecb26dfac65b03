"""Hub ids: what is asked for, and what is said when it cannot be had. No test reaches a hub."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from ddtree.errors import DDTreeError, DownloadFailed, ModelNotFound, UnsupportedModel
from ddtree.models import hub, resolve_drafter, resolve_model

pytestmark = pytest.mark.usefixtures("empty_cache")


def snapshot(monkeypatch: pytest.MonkeyPatch, answer: Path | Exception) -> list[Any]:
    """Let the hub answer with a folder or an error; the list gets what it was asked."""
    asked: list[Any] = []

    def fake(repo_id: str, **options: Any) -> str:
        asked.append((repo_id, options))
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return asked


def bare(kind: type[Exception]) -> Exception:
    """An error of the hub without the HTTP answer that it usually carries."""
    return kind.__new__(kind)


def test_a_snapshot(hf_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = snapshot(monkeypatch, hf_folder)
    assert resolve_model("org/model-1.5") == hf_folder
    assert resolve_drafter("org/drafter", "org/model-1.5") == hf_folder
    assert [repo for repo, _ in asked] == ["org/model-1.5", "org/drafter"]
    assert {"*.safetensors", "pairwise.st"} <= set(asked[0][1]["allow_patterns"])
    assert not any("bin" in pattern or "gguf" in pattern for pattern in asked[0][1]["allow_patterns"])


def test_a_folder_of_that_name_comes_first(hf_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = snapshot(monkeypatch, ValueError("not to be asked"))
    monkeypatch.chdir(hf_folder.parent.parent)
    assert resolve_model(f"{hf_folder.parent.name}/hf") == Path(hf_folder.parent.name, "hf")
    assert asked == []


def test_a_snapshot_without_safetensors(hf_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (hf_folder / "model.safetensors").rename(hf_folder / "pytorch_model.bin")
    snapshot(monkeypatch, hf_folder)
    with pytest.raises(UnsupportedModel, match="pickled"):
        resolve_model("org/model")


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (bare(errors.GatedRepoError), ModelNotFound, "is gated: ask for access .* HF_TOKEN"),
        (bare(errors.RepositoryNotFoundError), ModelNotFound, "no model called org/model: .* HF_TOKEN"),
        (bare(errors.RevisionNotFoundError), ModelNotFound, "no model called org/model"),
        (errors.HFValidationError("bad"), ModelNotFound, "no model called org/model"),
        (errors.LocalEntryNotFoundError("x"), DownloadFailed, "the hub could not be reached.*HF_HUB_OFFLINE"),
        (errors.OfflineModeIsEnabled("x"), DownloadFailed, "the hub could not be reached"),
        (OSError("disk full\nmore"), DownloadFailed, r"could not be downloaded \(disk full\). Run the command again"),
        (RuntimeError(), DownloadFailed, r"\(RuntimeError\)"),
    ],
)
def test_errors(monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[DDTreeError], said: str) -> None:
    snapshot(monkeypatch, error)
    with pytest.raises(kind, match=said) as caught:
        resolve_model("org/model")
    assert type(caught.value) is kind
    assert caught.value.param == "model"


def test_the_option_at_fault_is_named() -> None:
    assert hub.explain(errors.LocalEntryNotFoundError("x"), "org/d", "drafter").param == "drafter"


def test_the_real_library_offline(tmp_path: Path) -> None:
    script = "from ddtree.models import resolve_model; resolve_model('org/not-there')"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ddtree.errors.DownloadFailed: the hub repository org/not-there is not in the local cache")
