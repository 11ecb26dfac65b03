"""What is deployed on this machine already: the units of systemd that `ddtree deploy` made."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddtree.deploy.render import MADE
from ddtree.deploy.units import SECTION


@dataclass(frozen=True)
class Applied:
    """One installed unit."""

    name: str  # without ".service"
    path: Path
    deployment: str  # "" where another program made it
    source: str
    port: int | None
    gpus: tuple[str, ...]


def unit_folder(scope: str) -> Path:
    """Where units of that scope are installed."""
    if scope == "system":
        return Path("/etc/systemd/system")
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd/user"


def applied() -> list[Applied]:
    """The units of both scopes that ddtree deploy made; other users' own are not seen."""
    folders = {unit_folder(scope) for scope in ("system", "user")}
    return [one for folder in sorted(folders) for one in _of(folder) if one.deployment]


def read(path: Path) -> Applied | None:
    """One unit; None where it is not there or may not be read."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    _, _, section = text.partition(f"[{SECTION}]\n")
    told = dict(line.partition("=")[::2] for line in section.splitlines() if text.startswith(MADE))
    port = told.get("Port", "")
    return Applied(
        path.stem, path, told.get("Deployment", ""), told.get("Source", ""), int(port) if port.isdigit() else None,
        tuple(told.get("Gpus", "").split()),
    )  # fmt: skip


def _of(folder: Path) -> Iterator[Applied]:
    try:
        paths = sorted(folder.glob("*.service"))
    except OSError:
        return
    yield from (one for one in map(read, paths) if one is not None)
