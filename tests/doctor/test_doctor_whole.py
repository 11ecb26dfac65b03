"""From a machine made of files to findings: a fake nvidia-smi, fake packages, real child processes."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from test_doctor_smi import HEADER, ROW

pytestmark = pytest.mark.full

ABI = "/venv/sgl_kernel/sm90/common_ops.abi3.so: undefined symbol: _ZN3c1013MessageLoggerC1EPKciib"
PACKAGES = {  # distribution -> version, module, its source
    "sglang": ("0.5.17", "sglang/srt/entrypoints/http_server", "import sgl_kernel"),
    "sglang-kernel": ("0.4.5", "sgl_kernel", f"raise ImportError({ABI!r})"),
    "flashinfer-python": ("0.6.15.post1", "flashinfer", ""),
    "flashinfer-cubin": ("0.6.12", "flashinfer_cubin", ""),
    "xgrammar": ("0.2.1", "xgrammar", "import ctypes\nctypes.string_at(0)"),
    "apache-tvm-ffi": ("0.1.11", "tvm_ffi", "print('loading')"),
}
REQUIRES = ["torch==2.11.0", "xgrammar==0.2.1", "no-such-thing==1.0", 'other==2; sys_platform == "win32"']


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Where the packages and nvidia-smi above are found."""
    site, programs = tmp_path / "site", tmp_path / "bin"
    for name, (version, module, source) in PACKAGES.items():
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        asks = "".join(f"Requires-Dist: {text}\n" for text in (REQUIRES if name == "sglang" else []))
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{asks}")
        path = site / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    (site / "sgl_kernel").mkdir()
    programs.mkdir()
    rows = "\n".join(ROW.format(index=index, bus=f"{index + 1}0") for index in (0, 1))
    smi = programs / "nvidia-smi"
    smi.write_text(
        f"#!/bin/sh\ncase \"$1\" in\n--query-gpu=*) echo '{rows}'; echo 'Unable to determine the device handle for "
        f"GPU2: 0000:30:00.0: GPU is lost' >&2; exit 15;;\n--query-compute*) ;;\n*) echo '{HEADER}';;\nesac\n"
    )
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    paths = {"PYTHONPATH": str(site), "PATH": str(programs)}
    return {**os.environ, **{key: os.pathsep.join([new, os.environ.get(key, "")]) for key, new in paths.items()}}


def test_the_faults_of_a_whole_machine(environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ddtree", "doctor", "--engine", "sglang", "--port", "0"]
    record = tmp_path / "machine.json"
    ran = subprocess.run(
        [*command, "--json", "--record", str(record)], capture_output=True, text=True, timeout=300, env=environment
    )
    assert ran.stderr == ""
    value: dict[str, Any] = json.loads(ran.stdout)
    assert (ran.returncode, value["verdict"]) == (1, "would fail")
    found = {(finding["id"], finding["about"]) for finding in value["findings"]}
    assert {
        ("gpu-lost", "00000000:30:00.0"),
        ("kernel-abi", "sgl_kernel"),
        ("tvm-ffi", "xgrammar"),
        ("flashinfer-cubin", "flashinfer"),
        ("transformers-range", "transformers"),
        ("soundfile-missing", "soundfile"),
        ("requirement-of-sglang", "no-such-thing"),
    } <= found
    assert {"torch-without-cuda", "cuda-unavailable"} & {name for name, _ in found}, "torch here cannot use such cards"
    assert "other" not in {about for _, about in found}
    assert [card["index"] for card in value["cards"]] == [0, 1]
    again = subprocess.run(
        [sys.executable, "-m", "ddtree", "doctor", "--replay", str(record), "--json"], capture_output=True, text=True
    )
    assert again.stdout == ran.stdout


def test_an_interrupt_ends_the_children_too(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(300)")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen([sys.executable, "-m", "ddtree", "doctor"], env=environment, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while not (started := children_of(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert started
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, said) == (130, b"")
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]


def children_of(pid: int) -> list[int]:
    """The child processes that imports are tried in."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
            command = (status.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == pid and b"ddtree.doctor.child" in command:
            found.append(int(status.parent.name))
    return found
