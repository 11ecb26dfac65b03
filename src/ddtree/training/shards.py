"""Token ids on disk: shards of answered chats, each written whole or not at all."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ddtree.errors import DamagedFile, InvalidOption, ModelNotFound

MANIFEST = "data.json"


@dataclass(frozen=True)
class Chat:
    """One answered prompt."""

    ids: np.ndarray[Any, Any]  # int32: prompt, then answer
    prompt: int  # tokens of the prompt
    kind: str
    greedy: bool
    heldout: bool

    @property
    def answer(self) -> int:
        """Tokens of the answer."""
        return len(self.ids) - self.prompt


def write_shard(path: Path, sequences: Sequence[Chat], kinds: Sequence[str]) -> None:
    """One file, moved to its place when it is whole."""
    lengths = [len(s.ids) for s in sequences]
    ids = np.concatenate([s.ids for s in sequences]) if sequences else np.zeros(0, np.int32)
    half = bool((ids < 1 << 16).all())  # most vocabularies; half the bytes
    tensors: dict[str, np.ndarray[Any, Any]] = {
        "ids": ids.astype(np.uint16 if half else np.int32),
        "ends": np.cumsum(lengths, dtype=np.int64),
        "prompts": np.array([s.prompt for s in sequences], np.int32),
        "kinds": np.array([kinds.index(s.kind) for s in sequences], np.int32),
        "greedy": np.array([s.greedy for s in sequences], np.uint8),
        "heldout": np.array([s.heldout for s in sequences], np.uint8),
    }
    part = _part(path)
    save_file(tensors, part)
    os.replace(part, path)


def read_shard(path: Path, kinds: Sequence[str]) -> list[Chat]:
    """Raises DamagedFile."""
    try:
        t = load_file(path)
        ends, ids = t["ends"].tolist(), t["ids"].astype(np.int32)
        starts = [0, *ends[:-1]]
        rows = zip(starts, ends, t["prompts"], t["kinds"], t["greedy"], t["heldout"], strict=False)
        return [Chat(ids[a:b], int(p), kinds[k], bool(g), bool(h)) for a, b, p, k, g, h in rows]
    except (SafetensorError, OSError, KeyError, IndexError) as error:
        raise DamagedFile(f"{path} is no whole shard ({error}): delete it and run `ddtree train data` again") from error


def write_manifest(folder: Path, facts: dict[str, Any]) -> None:
    """Begin a folder, or check that it was begun with the same facts. Raises InvalidOption, naming what differs."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / MANIFEST
    if path.exists():
        before = read_manifest(folder)
        for name in facts:
            if before.get(name) != facts[name]:
                raise InvalidOption(
                    f"{folder} was made with another {name}: {before.get(name)!r}, not {facts[name]!r}; choose another"
                    " folder, or set it back"
                )
        return
    part = _part(path)
    part.write_text(json.dumps(facts, indent=1), encoding="utf-8")
    os.replace(part, path)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises ModelNotFound or DamagedFile."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ModelNotFound(f"{path} does not exist: run `ddtree train data` first")
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedFile(f"{path} is not valid JSON ({error})") from error
    return facts


def shard_path(folder: Path, number: int) -> Path:
    """Where a shard lies."""
    return folder / f"shard-{number:05d}.safetensors"


def _part(path: Path) -> Path:
    """What a file is called until it is whole; several processes may write into one folder."""
    return path.with_suffix(f".{os.getpid()}.part")


def shard_paths(folder: Path) -> list[Path]:
    """Those that are there, by number."""
    return sorted(folder.glob("shard-*.safetensors"))


def read_all(folder: Path) -> Iterator[Chat]:
    """Every sequence, in the shards' order."""
    kinds = read_manifest(folder)["kinds"]
    for path in shard_paths(folder):
        yield from read_shard(path, kinds)
