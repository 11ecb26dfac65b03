"""Child processes: every way to end is an answer; and what the probe makes of them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from ddtree.doctor import children, judge, load, packages, probe, smi, system
from ddtree.doctor.children import Outcome
from ddtree.doctor.facts import Asked, Driver

MODULES = {
    "good": "print('chatter on standard output')",
    "noisy": "import os\nos.write(1, b'{}')\nprint('x' * 100_000)",
    "bad": "raise ValueError('no good')",
    "gone": "import not_there",
    "crash": "import ctypes\nctypes.string_at(0)",
    "killed": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "leaves": "import sys\nsys.exit(3)",
    "ends": "import os\nos._exit(7)",
    "aborts": "import os\nos.abort()",
    "hangs": "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])",
    "wide": "raise ValueError('\\u00e4' * 100_000)",
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in MODULES.items():
        (tmp_path / f"child_{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "ok", "error", "signal"),
    [
        ("good", True, None, None),
        ("noisy", True, None, None),
        ("bad", False, "ValueError: no good", None),
        ("gone", False, "No module named 'not_there'", None),
        ("crash", False, "Segmentation fault", "SIGSEGV"),
        ("killed", False, None, "SIGKILL"),
        ("leaves", False, "SystemExit: 3", None),
        ("ends", False, "code 7", None),
        ("aborts", False, "Aborted", "SIGABRT"),
        ("wide", False, "ValueError: \u00e4", None),
    ],
)
def test_every_end_is_an_answer(modules: Path, name: str, ok: bool, error: str | None, signal: str | None) -> None:
    outcome = children.run(["import", f"child_{name}"], 60)
    assert (outcome.value is not None, outcome.signal, outcome.timed_out) == (ok, signal, False)
    assert error is None if ok else (error or "") in (outcome.error or "")
    assert len(outcome.error or "") <= 4100


def test_a_child_that_hangs_is_ended_with_all_that_it_started(modules: Path) -> None:
    began = time.monotonic()
    outcome = children.run(["import", "child_hangs"], 2)
    assert time.monotonic() - began < 30
    assert outcome.timed_out
    assert "2 s" in (outcome.error or "")


def test_a_file_in_the_current_folder_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    (tmp_path / "child_local.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert children.run(["import", "json"], 60).value is True
    assert children.run(["import", "child_local"], 60).value is None


def test_a_child_runs_the_ddtree_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ddtree").mkdir()
    (tmp_path / "ddtree/__init__.py").write_text("raise SystemExit('another ddtree')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert children.run(["import", "ddtree.doctor.facts"], 60).value is True


def test_libraries_are_tried_by_name() -> None:
    assert children.run(["libraries", "libc.so.6", "libnotthere.so.9"], 60).value == {
        "libc.so.6": True, "libnotthere.so.9": False
    }  # fmt: skip


def test_the_room_itself_imports_nothing_heavy() -> None:
    code = (
        "import sys\nimport ddtree.doctor, ddtree.doctor.probe, ddtree.doctor.text\n"
        "heavy = {'torch', 'numpy', 'transformers', 'triton', 'sglang', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def answers(arguments: Sequence[str], seconds: float) -> Outcome:
    """A machine where everything is answered, and xgrammar crashes."""
    if arguments[0] == "import" and arguments[1] == "xgrammar":
        return Outcome(None, "Fatal Python error", "SIGSEGV", False, 1.25)
    value = {
        "torch": {"version": "2.11.0+cu130", "cuda": "13.0", "hip": None, "archs": ["sm_90"], "available": True,
                  "devices": [{"name": "H200", "capability": "9.0", "memory_mib": 1}], "said": None},
        "models": {"model": {"name": "m", "state": "here"}, "drafter": None},
        "libraries": {"liba.so": True},
        "import": True,
    }[arguments[0]]  # fmt: skip
    return Outcome(value, None, None, False, 1.0)


def test_the_probe_tries_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"sglang": "0.5.17", "sgl-kernel": "0.4.5+cu129", "xgrammar": "0.2.1", "torch": "2.11.0"}
    monkeypatch.setattr(packages, "version", installed.get)
    monkeypatch.setattr(smi, "look", lambda: (Driver("missing"), ()))
    facts = probe.probe(Asked("sglang", port=0), ["liba.so"], answers)
    assert [entry.module for entry in facts.imports] == [
        "torch", "sgl_kernel", "xgrammar", "sglang.srt.entrypoints.http_server"
    ]  # fmt: skip
    assert [entry.signal for entry in facts.imports] == [None, None, "SIGSEGV", None]
    assert facts.torch is not None
    assert facts.torch.devices[0].capability == "9.0"
    assert facts.packages == installed
    assert facts.kernel is not None
    assert (facts.kernel.cuda, facts.libraries) == ("12", {"liba.so": True})
    assert facts.model is not None
    assert (facts.model.name, facts.drafter, facts.port.free) == ("m", None, True)


def test_the_probe_survives_children_that_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smi, "look", lambda: (Driver("missing"), ()))
    facts = probe.probe(
        Asked(port=0), ["liba.so"], lambda arguments, seconds: Outcome(None, "late", None, True, seconds)
    )
    assert (facts.torch, facts.model, facts.libraries) == (None, None, {})
    assert {entry.module for entry in facts.imports if entry.timed_out} == {"torch", "ddtree.engine", "ddtree.models"}
    diagnosis = judge(facts, load())
    assert {finding.id for finding in diagnosis.findings} == {"import-slow"}
    assert diagnosis.exit_code == 2
    assert "the model" in [what for what, _ in diagnosis.unseen]


def test_requirements_are_those_of_this_machine() -> None:
    found = {entry.package: entry for entry in packages.requirements("ddtree")}
    assert "torch" in found
    assert found["torch"].installed
    assert "schemathesis" not in found  # of an extra
    assert list(packages.requirements("no-such-distribution")) == []


def test_a_port_that_is_taken() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        port = system.look_at_port(number)
        assert (port.free, port.number) == (False, number)
        assert port.error
    assert system.look_at_port(number).free


def test_the_host_is_seen_whole() -> None:
    host = system.look()
    assert host.python == ".".join(map(str, sys.version_info[:3]))
    assert host.cores >= 1
    assert {space.purpose for space in host.spaces} >= {"models of ddtree", "temporary files"}
    json.dumps(host.environment)


def test_why_the_cache_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(cache: Path) -> str | None:
        monkeypatch.setenv("DDTREE_CACHE", str(cache))
        return next(space.problem for space in system.look().spaces if space.purpose == "models of ddtree")

    (tmp_path / "file").write_text("")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/models").write_text("")
    assert problem(tmp_path / "not/yet") is None
    assert problem(tmp_path / "file") == f"{tmp_path / 'file'} is not a folder"
    assert problem(tmp_path / "cache") == f"{tmp_path / 'cache/models'} is not a folder"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert problem(tmp_path / "not/yet") == f"{tmp_path} may not be written to"
