"""Which manager a machine's services get."""

import sys
from pathlib import Path

from ddtree.deploy.failures import DeployFailed
from ddtree.deploy.managers import MANAGERS, Manager
from ddtree.deploy.processes import Processes
from ddtree.deploy.systemd import Systemd, problem


def choose(wanted: str, scope: str, folder: Path) -> tuple[Manager, str]:
    """The manager, and why it is this one. Raises DeployFailed where what is wanted cannot be."""
    if wanted not in MANAGERS:
        raise DeployFailed(f"--manager {wanted!r} is unknown: choose one of {', '.join(MANAGERS)}", param="manager")
    trouble = problem(scope) if wanted != "processes" else None
    if wanted == "systemd" and trouble:
        raise DeployFailed(f"--manager systemd cannot be used: {trouble}; choose --manager processes")
    if wanted == "processes" or trouble:
        why = "as asked for" if wanted == "processes" else trouble
        if sys.platform != "linux":
            raise DeployFailed("--manager processes needs Linux: it tells processes by /proc")
        return Processes(folder), f"processes: {why}"
    return Systemd(scope), f"systemd ({scope}): " + ("as asked for" if wanted == "systemd" else "it answers here")
