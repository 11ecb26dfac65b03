"""Closed and full streams, and Ctrl-C while packages load: a line or silence, never a traceback."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

CODE = "from ddtree.cli import main; main()"


def run(shell: str) -> subprocess.CompletedProcess[str]:
    """A shell line in which ddtree stands for the command."""
    command = f'{sys.executable} -c "{CODE}"'
    return subprocess.run(
        ["bash", "-c", shell.replace("ddtree", command, 1)], capture_output=True, text=True, timeout=60
    )


def test_a_closed_standard_input_is_told() -> None:
    result = run("ddtree generate - <&-")
    assert result.returncode == 1
    assert result.stderr == "error: PROMPT is -, but standard input is closed: give the text itself\n"


@pytest.mark.parametrize("closing", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_output_is_no_crash(closing: str) -> None:
    assert run(f"ddtree models {closing}").returncode == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")
def test_a_full_disk_is_told() -> None:
    result = run("ddtree models --json > /dev/full")
    assert result.returncode != 0
    assert "Traceback" not in result.stderr


def test_interrupts_while_packages_load_end_at_once() -> None:
    """Sent from inside the import, where a KeyboardInterrupt could be swallowed."""
    script = textwrap.dedent(
        f"""
        import os, signal
        from ddtree.cli.interrupts import interrupts_end_at_once
        with interrupts_end_at_once():
            try:
                os.kill(os.getpid(), {int(signal.SIGINT)})
                import time
                time.sleep(5)
            except KeyboardInterrupt:
                print("swallowed")
        """
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_an_interrupt_cleans_up_before_it_ends_the_process() -> None:
    script = textwrap.dedent(
        f"""
        import os, signal, time
        from ddtree.cli.interrupts import interrupts_end_at_once
        with interrupts_end_at_once(lambda: print("swept", flush=True)):
            os.kill(os.getpid(), {int(signal.SIGINT)})
            time.sleep(5)
        """
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (130, "swept\n", "")


def test_interrupts_are_as_before_afterwards() -> None:
    from ddtree.cli.interrupts import interrupts_end_at_once

    before = signal.getsignal(signal.SIGINT)
    with interrupts_end_at_once():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_a_key_that_cannot_travel_in_a_header_is_refused() -> None:
    result = run("ddtree smoke http://127.0.0.1:9 --api-key ü")
    assert result.returncode == 1
    assert "--api-key must be ASCII" in result.stderr
