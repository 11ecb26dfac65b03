"""Deployments to test with."""

from pathlib import Path
from typing import Any

from ddtree.deploy.spec import Deployment, load

PYTHON = "/opt/ddtree/bin/python"


def made(**changes: Any) -> Deployment:
    """Two replicas on a CPU, in the user's own systemd, everything named that a machine would decide."""
    values: dict[str, Any] = {
        "name": "chat",
        "cpu_replicas": 2,
        "python": PYTHON,
        "systemd": 252,
        "source": "chat.toml",
    }
    if changes.get("gpus"):
        del values["cpu_replicas"]
    return Deployment(**values | changes)


def written(folder: Path, text: str, *sets: str) -> Deployment:
    """What a file of this text gives."""
    path = folder / "chat.toml"
    path.write_text(text, encoding="utf-8")
    return load(path, sets)
