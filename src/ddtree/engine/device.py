"""Which device and which dtype a run gets."""

import re
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ddtree.errors import InvalidOption


def choose_device(name: str) -> torch.device:
    """auto: the first GPU that torch can use, else the CPU. Raises InvalidOption for what is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d{1,4})?", name):
        raise InvalidOption(f"device {name!r} is not supported: choose auto, cpu, cuda or cuda:N", param="device")
    if name == "cpu":
        return torch.device(name)
    index, found = int(name.partition(":")[2] or 0), torch.cuda.device_count()
    if index >= found:
        raise InvalidOption(f"device {name!r} is not there: torch sees {found} GPUs; choose cpu", param="device")
    return torch.device("cuda", index)


def standing_on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the thread's current one: kernels are launched there, wherever their tensors lie."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def deliver(there: Tensor, values: Tensor) -> None:
    """Copy values of the host into a tensor, which may be on a GPU, without waiting for what that still has to do.

    Memory that is not pinned would be copied behind everything launched, while the host waits. torch gives pinned
    memory to somebody else only when the copy out of it is done.
    """
    there.copy_(values.pin_memory() if there.device.type == "cuda" else values, non_blocking=True)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto: bfloat16 where the processor computes in it, else float32."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    native = torch.cuda.is_bf16_supported() if device.type == "cuda" else _cpu_has_bf16()
    return torch.bfloat16 if native else torch.float32


def _cpu_has_bf16() -> bool:
    """Whether products of bfloat16 are an instruction here; emulated, they are slower than float32."""
    probe = getattr(torch.cpu, "get_capabilities", None)
    if probe is not None:
        found = probe()
        return bool(found.get("avx512_bf16") or found.get("amx_bf16"))
    return bool(torch.cpu._is_avx512_bf16_supported())
