"""Timers of gpu.py: CUDA events where there is a card, the clock elsewhere; variants in alternating blocks."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

Block = Callable[[], float]  # one block of a variant: milliseconds (or another figure) of it


def synchronize(device: torch.device) -> None:
    """Wait for everything that runs on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_ms(step: Callable[[], Any], turns: int, device: torch.device) -> float:
    """Median milliseconds of `turns` steps: between CUDA events on the stream, by the clock without a card."""
    if device.type != "cuda":
        return statistics.median(wall_ms(step, 1, device) for _ in range(turns))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(turns + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize(device)
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(events))


def wall_ms(step: Callable[[], Any], turns: int, device: torch.device) -> float:
    """Mean milliseconds of `turns` steps by the clock, until the device has done them all."""
    synchronize(device)
    started = time.perf_counter()
    for _ in range(turns):
        step()
    synchronize(device)
    return 1000 * (time.perf_counter() - started) / turns


def alternate_blocks(variants: Mapping[str, Block], blocks: int) -> dict[str, list[float]]:
    """The figure of every block. Variants take turns, each block from another one on; a first block, which compiles
    and captures, is not counted."""
    names, found = list(variants), {name: list[float]() for name in variants}
    for name in names:
        variants[name]()
    for turn in range(blocks):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(variants[name]())
    return found


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and range."""
    return {
        "median": round(statistics.median(values), 4),
        "quartiles": [round(value, 4) for value in quartiles(values)],
        "range": [round(min(values), 4), round(max(values), 4)],
    }


def summary(found: Mapping[str, Sequence[float]], unit: str, base: str = "ar") -> dict[str, dict[str, Any]]:
    """Per variant the spread of its blocks, and of their ratios to the base's block of the same turn."""
    return {
        name: {unit: spread(values), f"over_{base}": spread([v / b for v, b in zip(values, found[base], strict=True)])}
        for name, values in found.items()
    }


def copy_gb_s(device: torch.device) -> float:
    """Bytes read plus written a second by a large copy, in GB/s."""
    size = 2**30 if device.type == "cuda" else 2**26
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    return 2 * size / step_ms(lambda: target.copy_(source), 10, device) / 1e6
