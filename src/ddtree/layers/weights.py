"""Weights of a Hugging Face folder, read tensor by tensor."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ddtree.errors import DamagedFile, ModelNotFound


class Weights:
    """Named tensors of one model folder, cast to one dtype and device as they are asked for."""

    def __init__(self, tensors: dict[str, Any], folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._files = tensors  # name -> open safetensors file
        self._folder, self._dtype, self._device = folder, dtype, device

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __call__(self, name: str, *shape: int) -> Tensor:
        """The tensor `name`, which must have `shape`. Raises DamagedFile otherwise."""
        if name not in self._files:
            raise DamagedFile(f"{self._folder} holds no weight {name!r}: the folder is incomplete or of another kind")
        try:
            tensor: Tensor = self._files[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise DamagedFile(f"weight {name!r} in {self._folder} cannot be read ({error}): fetch it again") from error
        if tuple(tensor.shape) != shape:
            raise DamagedFile(
                f"weight {name!r} in {self._folder} has shape {tuple(tensor.shape)}, config.json asks for {shape}"
            )
        return tensor.to(self._device, self._dtype)

    def optional(self, name: str, *shape: int) -> Tensor | None:
        """The tensor, or None where the model has none (biases)."""
        return self(name, *shape) if name in self else None


@contextmanager
def open_weights(folder: Path, dtype: torch.dtype, device: torch.device) -> Iterator[Weights]:
    """Open every *.safetensors file of a folder. Raises ModelNotFound or DamagedFile, naming the file."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelNotFound(f"{folder} holds no .safetensors file: name a folder in Hugging Face format")
    with ExitStack() as stack:
        tensors: dict[str, Any] = {}
        for file in files:
            try:
                handle = stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise DamagedFile(f"{file} is not a whole safetensors file ({error}): fetch it again") from error
            tensors.update(dict.fromkeys(handle.keys(), handle))
        yield Weights(tensors, folder, dtype, device)


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """A JSON object of a model folder. Raises ModelNotFound or DamagedFile, naming the file."""
    path = folder / name
    if not path.is_file():
        raise ModelNotFound(f"{path} does not exist: name a folder in Hugging Face format")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedFile(f"{path} is not valid JSON ({error}): fetch it again") from error
    if not isinstance(raw, dict):
        raise DamagedFile(f"{path} must hold a JSON object: fetch it again")
    return raw
