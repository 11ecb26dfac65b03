"""Everything heavy is imported in processes of their own, with a time limit: a crash there is a finding, not ours."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ddtree

LONGEST = 4000  # characters of an error that are kept
# The child runs this very ddtree, wherever it was found: by the current folder alone, or beside an installed one.
START = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
folder = sys.argv.pop(1)
spec = spec_from_file_location("ddtree", folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules["ddtree"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["ddtree"])
from ddtree.doctor.child import main
main(sys.argv[1:])
"""


_running: "set[subprocess.Popen[bytes]]" = set()


@dataclass(frozen=True)
class Outcome:
    """How a child ended."""

    value: Any  # what it answered; None when it did not get that far
    error: str | None
    signal: str | None
    timed_out: bool
    seconds: float


def run(arguments: Sequence[str], seconds: float, command: Sequence[str] | None = None) -> Outcome:
    """Run `ddtree.doctor.child` with these arguments; it is killed, with all it started, after so many seconds.

    `command` is for tests: another program that speaks the same way.
    """
    # -P: a file called torch.py in the current folder is not what the engine would import either
    program = list(command or (sys.executable, "-P", "-c", START, str(Path(ddtree.__file__).parent)))
    began = time.monotonic()
    process = subprocess.Popen(
        [*program, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    _running.add(process)
    try:
        out, err = process.communicate(timeout=seconds)
        late = False
    except subprocess.TimeoutExpired:
        late = True
        end(process)
        out, err = process.communicate()
    except BaseException:
        end(process)
        raise
    finally:
        _running.discard(process)
    took = time.monotonic() - began
    said = err.decode(errors="replace").strip()
    if late:
        return Outcome(None, f"it did not end within {seconds:.0f} s", None, True, took)
    if process.returncode < 0:
        return Outcome(None, said[-LONGEST:] or None, _name(-process.returncode), False, took)
    try:
        answer = json.loads(out)
    except ValueError:
        answer = {"error": said[-LONGEST:] or f"it ended with code {process.returncode} and said nothing"}
    return Outcome(answer.get("value"), answer.get("error"), None, False, took)


def end_all() -> None:
    """End every child that still runs, for a caller that is interrupted."""
    for process in list(_running):
        end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    """Kill the child's own process group, and nothing else."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
