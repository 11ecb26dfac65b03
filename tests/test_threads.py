"""The wait policy is set once, early, and never over the user's own."""

import subprocess
import sys

import pytest

from ddtree.threads import SPINS, share_cores


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": SPINS}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ],
)
def test_the_users_choice_stands(given: dict[str, str], expected: dict[str, str]) -> None:
    share_cores(given)
    assert given == expected


def test_the_command_line_sets_it_before_torch_is_there() -> None:
    """libgomp reads it when torch loads it."""
    code = "import sys, ddtree.cli; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
