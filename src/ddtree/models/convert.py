"""A GGUF file to a folder in Hugging Face format: bfloat16 safetensors, configuration, tokenizer."""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree.errors import DamagedFile, DDTreeError
from ddtree.models import store
from ddtree.models.folder import INDEX
from ddtree.models.gguf_file import GGUF, Place, check_tensors, end_tokens, layout, model_config, read_gguf
from ddtree.models.gguf_tokenizer import tokenizer_files
from ddtree.models.wording import brief

if TYPE_CHECKING:
    from torch import Tensor

SHARD_BYTES = 2_000_000_000  # of weights per safetensors file, which is what must fit in memory at once


@dataclass(frozen=True)
class Plan:
    """All of a sound GGUF file but its weights, in Hugging Face format."""

    file: GGUF
    places: dict[str, Place]  # by the tensor's name in the GGUF file
    texts: dict[str, str]  # name -> content of every file but the weights'
    licence: str  # that the file states


def cached(path: Path) -> Path:
    """The converted folder of a local .gguf file, made on first use and found again by the file's content.

    Reads the whole file for its sha256, on every call. Raises DamagedFile or UnsupportedModel.
    """
    path = path.absolute()
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read: {error}") from error
    name = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', path.stem).lstrip('.-')}-{digest[:12]}"

    if store.is_whole(store.models_dir() / name):
        return store.models_dir() / name
    plan = read_plan(path)  # before the cache is touched: a damaged file leaves nothing there, not even a lock

    def make(_: Path, out: Path) -> store.Manifest:
        write_model(plan, out, label=path.name)
        return manifest(name, f"converted from {path}", plan.licence, digest)

    return store.prepare(name, make)


def manifest(name: str, source: str, licence: str, sha256: str) -> store.Manifest:
    """A manifest signed with this version."""
    from ddtree import __version__

    return store.Manifest(name, source, licence, sha256, f"ddtree {__version__}")


def read_plan(path: Path) -> Plan:
    """Read and check one GGUF file; writes nothing. Raises DamagedFile or UnsupportedModel."""
    with _reading(path):
        file = read_gguf(path)
        config = model_config(file)
        places = layout(config)
        check_tensors(file, places)
        ends = end_tokens(file)
        generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": ends[0] if len(ends) == 1 else ends}
        texts = tokenizer_files(file)
        texts |= {"config.json": _json(config), "generation_config.json": _json(generation)}
        return Plan(file, places, texts, str(file.meta.get("general.license", "not stated")))


def write_model(plan: Plan, out: Path, *, label: str) -> None:
    """Write the model into the empty folder `out`, with a progress bar. Raises OSError where that cannot be done."""
    for name, text in plan.texts.items():
        (out / name).write_text(text, encoding="utf-8", newline="")
    _save_weights(plan.file, plan.places, out, label)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Around reading only, where any error comes of what the file holds: a value may be of every type and size.

    Broad because `tokenizers` raises bare Exceptions. What is no fault of the file goes through.
    """
    try:
        yield
    except (DDTreeError, ImportError, MemoryError):
        raise
    except Exception as error:
        reason = brief(" ".join(f"{type(error).__name__}: {error}".split()), 200)
        raise DamagedFile(
            f"{path} cannot be converted ({reason}): it is damaged or was written wrongly; download or convert it again"
        ) from error


def _save_weights(file: GGUF, places: dict[str, Place], out: Path, label: str) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from tqdm import tqdm

    shards = list(_shards(places))
    many = len(shards) > 1
    weight_map: dict[str, str] = {}
    with tqdm(total=len(places), unit=" tensors", desc=f"converting {label}", mininterval=store.bar_interval()) as bar:
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05}-of-{len(shards):05}.safetensors" if many else "model.safetensors"
            weights = {}
            for source in shard:
                weights[places[source].name] = _dequantise(file, source, places[source])
                bar.update()
            try:
                save_file(weights, out / name, metadata={"format": "pt"})
            except SafetensorError as error:  # which it makes of a full disk as well
                raise OSError(str(error)) from error
            weight_map |= dict.fromkeys(weights, name)
    if many:
        index = {"metadata": {"total_size": sum(map(_bytes, places.values()))}, "weight_map": weight_map}
        (out / INDEX).write_text(_json(index), encoding="utf-8")


def _shards(places: dict[str, Place]) -> Iterator[list[str]]:
    """The tensors' names in groups of at most SHARD_BYTES (or of one tensor)."""
    group: list[str] = []
    size = 0
    for name, place in places.items():
        if group and size + _bytes(place) > SHARD_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += _bytes(place)
    yield group


def _bytes(place: Place) -> int:
    return 2 * math.prod(place.shape)


def _dequantise(file: GGUF, name: str, place: Place) -> "Tensor":
    """One tensor as bfloat16 in the Hugging Face layout, `place.shape`."""
    import numpy as np
    import torch
    from gguf.quants import dequantize

    tensor = file.tensors[name]
    with _reading(file.path):
        try:
            values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32).reshape(place.shape)
        except NotImplementedError as error:  # how gguf says that it does not know a quantisation
            raise file.refuse(f"the quantisation {tensor.tensor_type.name} (of {name})") from error
    weight = torch.from_numpy(values)
    if place.heads:
        # GGUF pairs rotary dimension 2i with 2i+1, Hugging Face pairs i with i + half: put the halves back together
        half = place.shape[0] // place.heads // 2
        weight = weight.reshape(place.heads, half, 2, place.shape[1]).transpose(1, 2).reshape(place.shape)
    return weight.to(torch.bfloat16).contiguous()


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"
