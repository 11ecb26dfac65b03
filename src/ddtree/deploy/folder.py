"""Rendered files on disk: what would change, and writing it; a file that was not rendered is never touched."""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path

from ddtree.deploy import atomic
from ddtree.deploy.render import MADE
from ddtree.errors import DDTreeError, InvalidOption

SECRET_MODE, PLAIN_MODE = 0o600, 0o644
LAYOUT = ("*/systemd/*.service", "*/env/*.env", "*/nginx/*.conf")  # of what is rendered, under the folder
# A variable of an environment file, as it is rendered: its value may go over several lines.
VALUE = re.compile(r'^([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"$', re.MULTILINE | re.DOTALL)
SENSITIVE = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|PRIVATE", re.IGNORECASE)
SIGNED_IN = re.compile(r"://[^/\s@]+@")  # an address that holds a user's name, as a proxy's may


def older(folder: Path, files: Mapping[str, str] | None = None) -> dict[str, str]:
    """What earlier renders left there: text by path relative to `folder`. Other files are not among it.

    files: what is rendered now; then only what is in the place of these, or was rendered from the same specification.
    """
    found, heads = {}, {_head(text) for text in (files or {}).values()}
    for path in sorted(path for pattern in LAYOUT for path in folder.glob(pattern)):
        if path.is_file():
            try:
                text = path.read_text(encoding="utf-8", errors="replace")
            except OSError as error:
                raise DDTreeError(f"{path} cannot be read ({error.strerror}): run this as who may") from error
            name = path.relative_to(folder).as_posix()
            if text.startswith(MADE) and (files is None or name in files or _head(text) in heads):
                found[name] = text
    return found


def difference(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """A unified diff, "" where nothing differs. Values whose names say key, token or the like are not shown."""
    parts: list[str] = []
    for path in sorted({*before, *after}):
        old, new = before.get(path, ""), after.get(path, "")
        if old != new:
            was, will = (path if path in side else "/dev/null" for side in (before, after))
            if path.endswith(".env"):
                values = dict(VALUE.findall(old))
                old, new = _without_secrets(old, values), _without_secrets(new, values)
            parts += difflib.unified_diff(_lines(old), _lines(new), was, will, lineterm="")
    return "\n".join(parts)


def _without_secrets(text: str, former: Mapping[str, str]) -> str:
    """An environment file in which sensitive values are only said to be there, or to be another than before."""

    def hidden(found: re.Match[str]) -> str:
        name, value = found.groups()
        if not (SENSITIVE.search(name) or SIGNED_IN.search(value)):
            return found[0]
        another = "" if former.get(name, value) == value else ", another one"
        return f"{name}=... (not shown{another})"

    return VALUE.sub(hidden, text)


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
    """Make `folder` hold these files, each whole or not at all, and drop what an older render of the same specification
    left beside them.

    Environment files can be read by their owner alone. Raises as `refuse_foreign` does, before anything is written,
    and DDTreeError where the disk refuses.
    """
    refuse_foreign(folder, files)
    stale = set(older(folder, files)) - set(files)
    try:
        for path, text in files.items():
            atomic.write(folder / path, text, SECRET_MODE if path.endswith(".env") else PLAIN_MODE)
        for path in stale:
            (folder / path).unlink()
    except OSError as error:
        raise DDTreeError(f"{error.filename or folder} was not written: {error.strerror}") from error


def _head(text: str) -> str:
    """The first line, which names the specification."""
    return text.partition("\n")[0]


def _lines(text: str) -> list[str]:
    return text.split("\n")[:-1] if text.endswith("\n") else text.split("\n") if text else []
