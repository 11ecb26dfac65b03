"""The plug-in's kernels compile for each card, within its shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}  # bytes of one block
SCRIPT = Path(__file__).with_name("compiled_rows.py")


@pytest.mark.parametrize("capability", [90, *(pytest.param(sm, marks=pytest.mark.full) for sm in (80, 100, 120))])
def test_cards(capability: int) -> None:
    """In a process of its own: this one may be the interpreter's."""
    result = subprocess.run(
        [sys.executable, str(SCRIPT), str(capability)],
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"TRITON_INTERPRET": "0"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(result.stdout.splitlines()[-1])
    assert len(report) == 11
    assert all(shared <= SHARED[capability] for shared in report.values()), report
