"""The files of benchmarks/training: their TOML files are read, drafters are averaged."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ddtree.training.config import read

FOLDER = Path(__file__).parents[2] / "benchmarks" / "training"
sys.path.append(str(FOLDER))

import average  # noqa: E402 (scripts are no package)


def drafter(folder: Path, value: float, config: str = "{}") -> Path:
    folder.mkdir()
    save_file({"fc.weight": torch.full((2, 3), value, dtype=torch.bfloat16)}, folder / "model.safetensors")
    (folder / "config.json").write_text(config)
    return folder


@pytest.mark.parametrize("name", [path.name for path in sorted(FOLDER.glob("*.toml"))])
def test_every_file_is_read(name: str) -> None:
    assert read(FOLDER / name).folder


def test_a_kl_fit_says_so() -> None:
    assert read(FOLDER / "small-kl.toml").fit.objective == "kl"
    assert read(FOLDER / "small-again.toml").fit.objective == "cross_entropy"
    assert read(FOLDER / "data-again.toml").data.seed != read(FOLDER / "data.toml").data.seed


def test_the_mean_of_two(tmp_path: Path) -> None:
    one, other = drafter(tmp_path / "one", 2.0), drafter(tmp_path / "other", 6.0)
    average.main([str(tmp_path / "mean"), f"{one}=0.75", f"{other}=0.25"])
    found = load_file(tmp_path / "mean" / "model.safetensors")
    assert found["fc.weight"].dtype == torch.bfloat16
    assert found["fc.weight"].tolist() == [[3.0] * 3] * 2
    assert (tmp_path / "mean" / "config.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("weights", "config", "says"),
    [((0.5, 0.6), "{}", "add up to 1, not 1.1"), ((0.5, 0.5), '{"a": 1}', "different config.json")],
)
def test_what_does_not_belong_together_is_refused(
    weights: tuple[float, float], config: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = drafter(tmp_path / "one", 2.0), drafter(tmp_path / "other", 6.0, config)
    with pytest.raises(SystemExit):
        average.main([str(tmp_path / "mean"), f"{one}={weights[0]}", f"{other}={weights[1]}"])
    assert says in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "mean").exists()


@pytest.mark.parametrize("part", ["nowhere=1", "one", "one=much"])
def test_bad_parts_are_named(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter(tmp_path / "one", 1.0)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        average.main(["mean", part])
    assert not (tmp_path / "mean").exists()
