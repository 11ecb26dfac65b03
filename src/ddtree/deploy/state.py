"""A deployment's folder: generations of rendered files, which of them runs where, and one command at a time.

FOLDER/generations/N/   files/ (as rendered), given.toml and sets.json (the specification as given), generation.json
FOLDER/current, previous   links to generations, moved in one step when a command has come to its end
FOLDER/state.json       what each service runs now, which replicas the router leaves out, and a command under way
FOLDER/lock             held by the command at work; the kernel lets go of it when that ends, however it ends
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddtree.deploy.atomic import link, write
from ddtree.deploy.failures import DeployFailed, Locked
from ddtree.deploy.generation import Generation

KEPT = 8  # generations that stay on disk beside those in use
SECRET, PLAIN = 0o600, 0o644


@dataclass
class Operation:
    """A command under way: kept on disk, so that the next one knows what was begun."""

    kind: str
    source: int | None
    target: int
    began: str
    touched: dict[str, int | None] = field(default_factory=dict)  # service -> what it ran before; None: nothing


@dataclass(frozen=True)
class Beside:
    """A second service that stands in for the only replica while that is replaced."""

    service: str
    address: str
    stands_for: str  # service
    home: str  # that one's own address


@dataclass
class State:
    """What runs now."""

    manager: str | None = None
    services: dict[str, int] = field(default_factory=dict)  # service -> generation whose unit is installed
    drained: list[str] = field(default_factory=list)  # replicas that the router sends nothing to
    operation: Operation | None = None
    beside: Beside | None = None
    starts_s: dict[str, float] = field(default_factory=dict)  # how long a service's last start took


class Folder:
    """The folder. Reading needs no lock; whatever changes it must be done under `held`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def held(self, command: str) -> Iterator["Folder"]:
        """The lock, for one command. Raises Locked where another one holds it."""
        try:
            self.path.mkdir(mode=0o755, parents=True, exist_ok=True)
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise DeployFailed(
                f"{self.path} cannot be written ({error.strerror}): run this as who may, or set folder"
            ) from error
        with open(lock, "r+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise Locked(f"{self.path} is in use by {_holder(file.read())}: wait for it, or end it") from error
            file.seek(0)
            file.truncate()
            json.dump({"pid": os.getpid(), "command": command, "since": _now()}, file)
            file.flush()
            try:
                yield self
            finally:
                file.seek(0)
                file.truncate()  # an empty file says that the last command ended in good order

    def interrupted(self) -> Operation | None:
        """The operation that a killed command left, if any. Under the lock: its owner is gone then."""
        return self.state().operation

    def state(self) -> State:
        """What runs now; empty for a new folder. Raises DeployFailed for a damaged file."""
        path = self.path / "state.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            operation, stands = found.pop("operation"), found.pop("beside")
            return State(
                operation=Operation(**operation) if operation else None,
                beside=Beside(**stands) if stands else None,
                **found,
            )
        except FileNotFoundError:
            return State()
        except OSError as error:
            raise DeployFailed(f"{path} cannot be read ({error.strerror}): run this as who may") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DeployFailed(
                f"{path} is damaged ({error}): remove it after stopping the services, then apply"
            ) from error

    def save(self, state: State) -> None:
        """Writes the state in one step."""
        write(self.path / "state.json", json.dumps(asdict(state), indent=1) + "\n", PLAIN)

    def numbers(self) -> list[int]:
        """The whole generations on disk, oldest first."""
        found = (self.path / "generations").glob("*/generation.json")
        return sorted(int(path.parent.name) for path in found if path.parent.name.isdigit())

    def generation(self, number: int) -> Generation:
        """One of them."""
        folder = self.path / "generations" / str(number)
        try:
            facts = json.loads((folder / "generation.json").read_text(encoding="utf-8"))
            paths = (*facts["units"].values(), *facts["places"])
            texts = {path: (folder / "files" / path).read_text(encoding="utf-8") for path in paths}
            return Generation.of(number, texts, facts)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise DeployFailed(
                f"generation {number} cannot be read ({error}): run this as who may; where it is damaged, stop the "
                f"services, remove {self.path}, and apply"
            ) from error

    def pointed(self, name: str) -> Generation | None:
        """The generation that `current` or `previous` names."""
        try:
            number = int(Path(os.readlink(self.path / name)).name)
        except (FileNotFoundError, ValueError):
            return None
        return self.generation(number)

    def add(self, files: Mapping[str, str], facts: Mapping[str, Any], given: str, sets: list[str]) -> Generation:
        """Writes the next generation: not there at all until it is whole."""
        root = self.path / "generations"
        root.mkdir(parents=True, exist_ok=True)
        number = max([int(path.name) for path in root.iterdir() if path.name.isdigit()], default=0) + 1
        unfinished = root / f".{number}.tmp"
        shutil.rmtree(unfinished, ignore_errors=True)
        for path, text in files.items():
            write(unfinished / "files" / path, text, SECRET)
        write(unfinished / "given.toml", given, SECRET)
        write(unfinished / "sets.json", json.dumps(sets), SECRET)
        write(unfinished / "generation.json", json.dumps({**facts, "made": _now()}, indent=1) + "\n", PLAIN)
        unfinished.chmod(0o700)
        unfinished.rename(root / str(number))
        return self.generation(number)

    def point(self, current: int, previous: int | None) -> None:
        """Moves the links: `previous` first, so that there is always a way back."""
        if previous is not None:
            link(self.path / "previous", f"generations/{previous}")
        link(self.path / "current", f"generations/{current}")

    def prune(self) -> None:
        """Removes old generations that nothing names."""
        named = {generation.number for name in ("current", "previous") if (generation := self.pointed(name))}
        named |= set(self.state().services.values())
        for number in self.numbers()[:-KEPT]:
            if number not in named:
                shutil.rmtree(self.path / "generations" / str(number), ignore_errors=True)


def _holder(text: str) -> str:
    try:
        told = json.loads(text)
        return f"`{told['command']}` (process {told['pid']}, since {told['since']})"
    except (ValueError, KeyError, TypeError):
        return "another command"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def begin(folder: Folder, state: State, kind: str, source: int | None, target: int) -> None:
    """Writes down what is begun. What an interrupted command had touched stays known: a way back leads behind it."""
    touched = state.operation.touched if state.operation is not None else {}
    state.operation = Operation(kind, source, target, _now(), touched)
    folder.save(state)
