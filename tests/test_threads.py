"""The wait policy is set once, early, and never over the user's own."""

import os
import subprocess
import sys
import threading

import pytest

from ddtree.threads import SPINS, in_passing_thread, share_cores


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


def test_work_in_a_passing_thread_gives_what_it_gives_and_raises_what_it_raises() -> None:
    assert in_passing_thread(lambda: threading.current_thread().name) == "ddtree-load"
    assert all(thread.name != "ddtree-load" for thread in threading.enumerate())
    with pytest.raises(ZeroDivisionError):
        in_passing_thread(lambda: 1 / 0)


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="only Linux lists a process's threads")
def test_the_openmp_threads_of_a_passing_thread_end_with_it() -> None:
    """Else their number would make libgomp put every waiting thread to sleep."""
    code = """if True:
        import os, time, torch
        from ddtree.threads import in_passing_thread
        torch.set_num_threads(4)
        here = lambda: len(os.listdir("/proc/self/task"))
        work = lambda: (torch.ones(512, 512) @ torch.ones(512, 512), here())[1]
        before = here()
        assert in_passing_thread(work) == before + 4  # itself and three more
        deadline = time.monotonic() + 20
        while here() != before and time.monotonic() < deadline:  # they end after it, in their own time
            time.sleep(0.01)
        assert here() == before
    """
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
