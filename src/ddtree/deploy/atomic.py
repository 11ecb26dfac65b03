"""Files that are whole or not there, and readable by whom they concern."""

import os
from pathlib import Path


def write(path: Path, text: str, mode: int) -> None:
    """Puts a text in place in one step, with these rights from its first moment on; nothing of a failed one stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(handle, "w", encoding="utf-8", newline="") as file:
            os.fchmod(file.fileno(), mode)  # whatever the umask says
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def link(path: Path, target: str) -> None:
    """Makes `path` a symbolic link to `target` in one step, whatever it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(path)
