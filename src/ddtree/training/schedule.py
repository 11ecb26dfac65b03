"""What a fit goes by: its optimiser, the rate of each step, the precision of products, who makes the next batch."""

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from ddtree.training.config import FitPart
from ddtree.training.model import DraftModel


class AtOnce:
    """An executor that does what it is given when it is given it."""

    def __enter__(self) -> "AtOnce":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, call: Callable[..., Any], *args: Any) -> "Future[Any]":
        """See ThreadPoolExecutor.submit."""
        done: Future[Any] = Future()
        done.set_result(call(*args))
        return done


def ahead(device: torch.device) -> ThreadPoolExecutor | AtOnce:
    """Who makes the next batch: on a GPU a thread, while the device computes.

    On a CPU its OpenMP threads would be in the way of the main one's.
    """
    return ThreadPoolExecutor(1) if device.type == "cuda" else AtOnce()


def learning_rate(part: FitPart, step: int, seconds: float = 0.0) -> float:
    """Of step `step` (from 0): linear warm-up, then a cosine from lr to lr * final_lr, by steps or by the clock."""
    if step < part.warmup:
        return part.lr * (step + 1) / part.warmup
    done = min(1.0, (step - part.warmup) / max(1, part.steps - part.warmup))
    if part.minutes:
        done = min(1.0, max(done, seconds / (part.minutes * 60)))
    return part.lr * (part.final_lr + (1 - part.final_lr) * 0.5 * (1 + math.cos(math.pi * done)))


def optimizer(model: DraftModel, part: FitPart, device: torch.device) -> torch.optim.AdamW:
    """Matrices decay, norms and biases do not."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": part.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=part.lr, betas=(0.9, part.beta2), fused=device.type == "cuda")


def go_on(optimizer: torch.optim.AdamW, state: dict[str, Any]) -> None:
    """With the moments of a checkpoint; decay and betas stay those that the optimiser was made with."""
    chosen = [{name: group[name] for name in ("betas", "weight_decay")} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, chosen, strict=True):
        group.update(own)


def precision(name: str, device: torch.device) -> torch.dtype:
    """Of products: auto is bfloat16 on a GPU, else float32."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype
