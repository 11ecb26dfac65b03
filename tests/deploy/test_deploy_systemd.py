"""The rendered units under a systemd that runs, in user mode: the real one, or one of the test's own (as root)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CANNOT = 77


@pytest.mark.full
def test_services_of_a_user_s_systemd() -> None:
    command = [sys.executable, str(HERE / "systemd_scene.py")]
    answers = ["systemctl", "--user", "show", "--property", "Version", "--value"]
    try:
        here = subprocess.run(answers, capture_output=True, text=True).stdout.strip()
    except OSError:
        pytest.skip("there is no systemctl")
    if not here:
        command.insert(0, str(HERE / "with_user_systemd.sh"))
    environment = os.environ | {"PYTHONPATH": f"{HERE.parent.parent / 'src'}:{HERE}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    if done.returncode == CANNOT:
        pytest.skip(f"systemd cannot run here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["manager"] == "systemd"
    assert found["again"] is False
    assert found["modes"] == found["kept"] == ["tree", "tree"]
    assert "died before it was healthy (ended with 1)" in found["dies"]
    assert "answer 1 differs" in found["wrong"]
    assert found["status"]["well"] is True
    assert [row["manager"] for row in found["status"]["replicas"]] == ["running", "running"]
    assert found["back"] == ["linear", "linear"]
    assert found["left"] == []
