"""The loss of drafted blocks, with the logits of few rows in memory at once."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ddtree.training.model import DraftModel


def depth_weights(depths: int, gamma: float) -> Tensor:
    """exp(-(k - 1) / gamma) for k = 1 .. depths, float32. Source: DFlash (arXiv 2602.06036)."""
    return torch.exp(-torch.arange(depths, dtype=torch.float32) / gamma)


def weighted_loss(
    model: DraftModel,
    hidden: Tensor,
    labels: Tensor,
    weights: Tensor,
    head: Tensor,
    teacher: Tensor | None = None,
    rows: int = 4096,
) -> Tensor:
    """The sum of weights * loss over rows. Rows of weight 0 cost nothing but their hidden state.

    Args:
        hidden: [M, H]; labels: [M] int64; weights: [M] float32; head: [V, H].
        teacher: [M, H], the target's own normed hidden states where it predicts the labels: then the loss is the
            forward KL to its distribution, else cross-entropy to the labels.
        rows: whose logits exist at once; backward computes them again.
    """
    kept = weights.nonzero().squeeze(1)
    total = hidden.new_zeros((), dtype=torch.float32)
    for part in kept.split(rows):
        own = None if teacher is None else teacher[part]
        args: tuple[Any, ...] = (model, hidden[part], labels[part], weights[part], head, own)
        total = total + checkpoint(_part, *args, use_reentrant=False)
    return total


def _part(
    model: DraftModel, hidden: Tensor, labels: Tensor, weights: Tensor, head: Tensor, teacher: Tensor | None
) -> Tensor:
    logits = model.logits(hidden, head)
    if teacher is None:
        losses = F.cross_entropy(logits, labels, reduction="none")
    else:
        with torch.no_grad():
            log_p = F.linear(teacher.to(head.dtype), head).float().log_softmax(-1)
        losses = (log_p.exp() * (log_p - logits.log_softmax(-1))).sum(-1)
    return (losses * weights).sum()
