"""What in a deployment's folder is this program's: other programs' folders are refused, and their files left alone."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ddtree.deploy.failures import DeployFailed
from ddtree.deploy.render import MADE

# In the order in which they are removed: what a kill in between leaves is nothing that a command would go by.
OURS = ("current", "previous", "state.json", "run", "env", "nginx", "logs", "generations", "lock")
SHARED = ("env", "nginx")  # folders of such names are made elsewhere too: only rendered files are removed there
MARKS = ("state.json", "generations")  # a folder of ours has one of them; else it may hold nothing called as below
TELLING = ("current", "previous", "run", "env", "nginx")


def refuse_others(folder: Path) -> None:
    """Raises DeployFailed for a folder that something else keeps its files in, as /etc or /var."""
    if any((folder / name).exists() for name in MARKS):
        return
    foreign = [name for name in TELLING if os.path.lexists(folder / name)]
    if foreign:
        raise DeployFailed(
            f"{folder} holds {', '.join(foreign)}, which ddtree deploy did not make: give the deployment a folder of "
            "its own",
            param="folder",
        )


def clean(folder: Path, keep: Sequence[str]) -> None:
    """Removes what this program made there, and nothing else."""
    for name in OURS:
        path = folder / name
        if name in keep:
            continue
        if name in SHARED and path.is_dir():
            _clean_rendered(path)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _clean_rendered(folder: Path) -> None:
    for path in folder.iterdir():
        half = path.name.startswith(".") and path.suffix == ".tmp"  # of a command that was killed: see `atomic`
        if path.is_file() and (half or path.read_text(encoding="utf-8", errors="replace").startswith(MADE)):
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
