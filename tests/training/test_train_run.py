"""benchmarks/training/run.py from end to end at a toy size: data by two workers, two fits, evaluation, export."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tiny_run import run_file

RUN = Path(__file__).parents[2] / "benchmarks" / "training" / "run.py"


@pytest.mark.full
def test_everything_in_one_go(tmp_path: Path, tiny_target: Path) -> None:
    fit = {"steps": 3, "ema": 0.9}
    small = run_file(tmp_path / "small.toml", tiny_target, fit=fit, drafter={"layers": 1})
    broken = run_file(tmp_path / "broken.toml", tiny_target, fit=fit, drafter={"heads": 3, "kv_heads": 2})
    data = run_file(tmp_path / "data.toml", tiny_target, data={"chats": 32, "decoder": "plain"})
    sets = tmp_path / "sets"
    sets.mkdir()
    (sets / "mine.jsonl").write_text(json.dumps({"turns": ["Say one.", "And two?"], "category": "a"}))
    work = tmp_path / "work"
    arguments = ["--gpus", "cpu,cpu", "--minutes", "6", "--configs", f"{small},{broken}", "--data", str(data), "--work",
                 str(work), "--sets", str(sets), "--workers", "1", "--set", "eval.sequences=2",
                 "--set", "eval.max_length=200", "--reserve", "3"]  # fmt: skip
    done = subprocess.run([sys.executable, str(RUN), *arguments], capture_output=True, text=True, timeout=600)
    status = (work / "status.txt").read_text()
    assert done.returncode == 0, status
    found = json.loads((work / "summary.json").read_text())
    assert found["data-0"]["written"] == found["data-1"]["written"] == 2, status
    assert (found["data-check"]["shards"], found["data-check"]["left"]) == (4, 0)
    assert 1 <= found["fit-small"]["step"] <= 3  # its clock may end it on a busy machine
    assert "mine@0" in found["judge-small"]["sets"]
    assert found["judge-small"]["sets"]["mine@0"]["answers"] <= 2
    assert found["judge-small"]["short"]["sets together@0"]["tree@8"] >= 1
    assert load_file(work / "export" / "small" / "model.safetensors")
    assert "fit-broken: FAILED" in status
    assert "kv_heads" in status
    assert "over: exported" in status
