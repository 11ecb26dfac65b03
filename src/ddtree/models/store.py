"""The cache folder: what is made there is made whole or not at all, by one process at a time."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ddtree.errors import DDTreeError
from ddtree.models.folder import check_folder
from ddtree.models.wording import brief

CACHE_VARIABLE = "DDTREE_CACHE"
MANIFEST = "ddtree.json"
FORMAT = 2  # of a converted folder; raise it when the conversion or the manifest changes: old folders are made anew


@dataclass(frozen=True)
class Manifest:
    """Where a folder of the cache comes from. Its file is written last: its presence says that the folder is whole."""

    name: str  # the folder's name in the cache, and what --model takes
    source: str  # in words, for people
    licence: str
    sha256: str  # of the GGUF file that was converted
    created_by: str  # "ddtree VERSION"
    format: int = FORMAT
    files: dict[str, int] = field(default_factory=dict)  # name -> bytes of every other file; `prepare` fills it in


def cache_dir() -> Path:
    """The folder that everything of ddtree's own is kept in: $DDTREE_CACHE, else the user's cache folder.

    Raises DDTreeError when the variable names the home folder of nobody.
    """
    import platformdirs

    chosen = os.environ.get(CACHE_VARIABLE)
    if not chosen:
        return Path(platformdirs.user_cache_dir("ddtree", appauthor=False))
    try:
        return Path(chosen).expanduser().absolute()
    except RuntimeError as error:
        raise DDTreeError(
            f"{CACHE_VARIABLE} is {brief(repr(chosen))}, whose home folder is not known: set it to another folder"
        ) from error


def models_dir() -> Path:
    """The part of the cache that holds one folder per converted model."""
    return cache_dir() / "models"


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder of the cache; None when there is none, or when another format wrote it."""
    try:
        manifest = Manifest(**json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return manifest if manifest.format == FORMAT and isinstance(manifest.files, dict) else None


def is_whole(folder: Path) -> bool:
    """Whether a folder of the cache was finished and its files still have the length they should have."""
    manifest = read_manifest(folder)
    if manifest is None:
        return False
    try:
        check_folder(folder, tokenizer=True)
        return all((folder / name).stat().st_size == size for name, size in manifest.files.items())
    except (DDTreeError, OSError):
        return False


def prepare(name: str, make: Callable[[Path, Path], Manifest]) -> Path:
    """Return the cache's folder `name`, making it first when it is not there whole.

    `make(work, out)` may use the folder `work` as it likes and fills the folder `out`. Both lie beside the final
    place and are gone when `make` fails or is interrupted; a killed process leaves at most a hidden `work` folder,
    which the next one removes. Raises what `make` raises, and DDTreeError when the cache cannot be written.
    """
    final = models_dir() / name
    if is_whole(final):
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _lock(final):
            return final if is_whole(final) else _make(final, make)
    except OSError as error:
        raise DDTreeError(
            f"the model {name} could not be prepared in {final.parent}: {error}. "
            f"Free space or give rights there, or set {CACHE_VARIABLE} to another folder"
        ) from error


_unfinished: set[Path] = set()  # work folders of this process


def drop_unfinished() -> None:
    """Remove what this process was preparing, in whatever thread; for a process that ends at once."""
    for work in tuple(_unfinished):
        shutil.rmtree(work, ignore_errors=True)


def _make(final: Path, make: Callable[[Path, Path], Manifest]) -> Path:
    prefix = f".{final.name}.work-"
    for leftover in final.parent.glob(f"{prefix}*"):  # the lock is held: nobody is at work there any more
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=final.parent))
    _unfinished.add(work)
    try:
        out = work / "model"
        out.mkdir()
        manifest = replace(make(work, out), files={file.name: file.stat().st_size for file in out.iterdir()})
        (out / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1) + "\n", encoding="utf-8")
        if final.exists():
            shutil.rmtree(final)
        out.rename(final)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        _unfinished.discard(work)
    return final


@contextmanager
def _lock(final: Path) -> Iterator[None]:
    """Hold the lock file beside `final`; the system frees it when the process ends, however it ends."""
    from filelock import FileLock, Timeout

    lock = FileLock(final.parent / f".{final.name}.lock")
    try:
        lock.acquire(timeout=0.2)
    except Timeout:
        print(f"ddtree: waiting for another process that is preparing {final.name}", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def bar_interval() -> float:
    """Seconds between two states of a progress bar: rare where a file collects them all."""
    return 0.5 if sys.stderr.isatty() else 10.0
