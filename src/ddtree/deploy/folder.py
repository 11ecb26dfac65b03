"""Rendered files on disk: what would change, and writing it; a file that was not rendered is never touched."""

import difflib
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ddtree.deploy.render import MADE
from ddtree.errors import DDTreeError, InvalidOption

SECRET_MODE, PLAIN_MODE = 0o600, 0o644
VALUE = re.compile(r"^([+-]?[A-Za-z_]\w*)=.*$")
SENSITIVE = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)


def older(folder: Path) -> dict[str, str]:
    """What an earlier render left there: text by path relative to `folder`. Other files are not among it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in (".service", ".env", ".conf"):
            text = path.read_text(encoding="utf-8", errors="replace")
            if text.startswith(MADE):
                found[path.relative_to(folder).as_posix()] = text
    return found


def difference(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """A unified diff, "" where nothing differs. Values whose names say key, token or the like are not shown."""
    parts: list[str] = []
    for path in sorted({*before, *after}):
        old, new = before.get(path, ""), after.get(path, "")
        if old != new:
            was, will = (path if path in side else "/dev/null" for side in (before, after))
            parts += difflib.unified_diff(_lines(old), _lines(new), was, will, lineterm="")
    shown: list[str] = []
    hidden = False  # a hidden value may go over several lines
    for line in parts:
        found = VALUE.match(line)
        if found or line.startswith(("---", "+++", "@@")):
            hidden = bool(found and SENSITIVE.search(found[1]))
            shown.append(f"{found[1]}=... (not shown)" if found and hidden else line)
        elif not hidden:
            shown.append(line)
    return "\n".join(shown)


def refuse_foreign(folder: Path, files: Mapping[str, str]) -> None:
    """Raises InvalidOption where a file that was not rendered is in the place of one that would be."""
    if folder.exists() and not folder.is_dir():
        raise InvalidOption(f"{folder} is a file: name a folder", param="out")
    for path in files:
        there = folder / path
        if there.is_symlink() or (there.exists() and not there.is_file()):
            raise InvalidOption(f"{there} is no plain file: take it away, or name another folder", param="out")
        if there.is_file() and not there.read_text(encoding="utf-8", errors="replace").startswith(MADE):
            raise InvalidOption(
                f"{there} was not made by ddtree deploy: take it away, or name another folder", param="out"
            )


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Make `folder` hold these files, each whole or not at all, and drop what an older render left beside them.

    Environment files can be read by their owner alone. Raises as `refuse_foreign` does, before anything is written,
    and DDTreeError where the disk refuses.
    """
    refuse_foreign(folder, files)
    stale = set(older(folder)) - set(files)
    try:
        for path, text in files.items():
            _write(folder / path, text, SECRET_MODE if path.endswith(".env") else PLAIN_MODE)
        for path in stale:
            (folder / path).unlink()
    except OSError as error:
        raise DDTreeError(f"{error.filename or folder} was not written: {error.strerror}") from error


def _write(path: Path, text: str, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600 from its first byte on
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _lines(text: str) -> list[str]:
    return text.split("\n")[:-1] if text.endswith("\n") else text.split("\n") if text else []
