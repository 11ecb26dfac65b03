"""Where a GPU's memory runs short: what was only kept for later goes first, and a round goes without its graph."""

import torch

from ddtree.engine.memory import device_memory
from ddtree.plan import MemoryPlan

_PASSING = ("attention", "logits", "states", "prefill")  # parts of a plan that are free between rounds


def starved(error: BaseException | None) -> bool:
    """Whether memory ran out: a capture that is cut short by that fails with an error of its own, behind it.

    What CUDA itself allocates (a graph's nodes, a kernel's code) is told by words alone, torch's and Triton's.
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def short(device: torch.device, plan: MemoryPlan | None) -> bool:
    """Whether less is free on a GPU than the plan has for what comes and goes with rounds and prompts.

    What torch holds and nobody uses counts as free, though some of it may be for graphs alone.
    """
    if plan is None or device.type != "cuda":
        return False
    memory = device_memory(device)
    return memory is not None and memory.free < sum(part.size for part in plan.parts if part.name in _PASSING)
