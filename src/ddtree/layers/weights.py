"""Weights of a Hugging Face folder, read tensor by tensor."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ddtree.errors import DamagedFile, ModelNotFound
from ddtree.layers.fields import read_config


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
        if not tensor.is_floating_point():
            raise DamagedFile(
                f"weight {name!r} in {self._folder} is {tensor.dtype}: quantised folders are not supported, name the"
                " model in bfloat16, float16 or float32"
            )
        return tensor.to(self._device, self._dtype)


@contextmanager
def open_weights(folder: Path, dtype: torch.dtype, device: torch.device) -> Iterator[Weights]:
    """Open the safetensors files of a folder: those of its index, else all. Raises ModelNotFound or DamagedFile."""
    files = _files(folder)
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


def _files(folder: Path) -> list[Path]:
    index = "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file() or not (folder / index).is_file():
        return sorted(folder.glob("*.safetensors"))
    shards = read_config(folder, index).get("weight_map")
    if not isinstance(shards, dict):
        raise DamagedFile(f"{folder / index} has no weight_map: fetch it again")
    files = sorted({folder / str(name) for name in shards.values()})
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise DamagedFile(f"{folder} is incomplete: its index names {missing[0]}, which is not there; fetch it again")
    return files
