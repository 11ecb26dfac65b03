"""Checkpoints of a fit, each moved to its place when it is whole, and its log."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from ddtree.errors import DamagedFile, InvalidOption, ModelNotFound

WHICH = ("last", "best")


class Run:
    """The files of one fit: last.pt, best.pt and log.jsonl."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log_path = folder, folder / "log.jsonl"

    def save(self, which: str, state: dict[str, Any]) -> None:
        """state: tensors and plain values."""
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / f"{which}.part"
        torch.save(state, part)
        os.replace(part, self.folder / f"{which}.pt")

    def load(self, which: str) -> dict[str, Any] | None:
        """None where there is none yet. Raises DamagedFile."""
        path = self.folder / f"{which}.pt"
        if not path.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise DamagedFile(f"{path} is no whole checkpoint ({error}): delete it") from error
        return state

    def need(self, which: str) -> dict[str, Any]:
        """Raises InvalidOption for an unknown name, ModelNotFound where there is no such checkpoint."""
        if which not in WHICH:
            raise InvalidOption(f"checkpoint {which!r} is unknown: choose one of {', '.join(WHICH)}")
        state = self.load(which)
        if state is None:
            raise ModelNotFound(f"{self.folder / which}.pt does not exist: run `ddtree train fit` first")
        return state

    def log(self, line: dict[str, Any]) -> None:
        """Append one line of JSON."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def cut_log(self, step: int) -> None:
        """Drop what a killed run wrote behind its last checkpoint; it will be written again."""
        if not self.log_path.exists():
            return
        lines = self.log_path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if _step(line) is not None and _step(line) <= step]  # type: ignore[operator]
        self.log_path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def weights_of(state: dict[str, Any]) -> dict[str, Any]:
    """The weights of a checkpoint's drafter: their average, where the fit keeps one."""
    found: dict[str, Any] = state.get("average") or state["model"]
    return found


def _step(line: str) -> int | None:
    try:
        step: int = json.loads(line)["step"]
    except (ValueError, KeyError):  # a line cut by the kill
        return None
    return step
