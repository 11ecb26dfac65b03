"""Finds the Triton side of an operator at its first call, so that a machine without triton can import the room."""

import os
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from ddtree.errors import InvalidOption

KINDS = {"cuda"}  # of devices that the kernels run on; the tests add "cpu", for Triton's interpreter


def usable(device: torch.device) -> bool:
    """Whether operators on this device go through the kernels. On a GPU without triton they go through torch."""
    return device.type in KINDS and _has_triton()


@lru_cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@lru_cache
def jit(name: str) -> ModuleType:
    """The module of kernels `ddtree.kernels.<name>_jit`. Raises InvalidOption where triton is missing."""
    try:
        return import_module(f"ddtree.kernels.{name}_jit")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "triton":
            raise
        raise InvalidOption(
            "the GPU kernels need triton, which is not installed: install it (pip install triton), or use --device cpu",
            param="device",
        ) from error


def overlap(device: torch.device, wanted: bool = True) -> dict[str, Any]:
    """Options of a launch whose kernel begins with `follow`: whether it may be launched before its forerunner is done.

    From compute capability 9.0 on (programmatic dependent launch). The environment's DDTREE_OVERLAP chooses how: 1 or
    2, see `follow`; 0: not at all.
    """
    return _launch_options(device, os.environ.get("DDTREE_OVERLAP") if wanted else "0")


@lru_cache
def _launch_options(device: torch.device, chosen: str | None) -> dict[str, Any]:
    how = int(chosen or 2)
    if device.type != "cuda" or how == 0 or not _overlaps(device):
        return {"overlap": 0}
    return {"overlap": how, "launch_pdl": True}


@lru_cache
def _overlaps(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()
