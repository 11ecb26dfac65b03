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
    kept: Tensor | None = None,
) -> Tensor:
    """The sum of weights * loss over rows. Rows of weight 0 cost nothing but their hidden state.

    Args:
        hidden: [M, H]; labels: [M] int64; weights: [M] float32; head: [V, H].
        teacher: [M, H], the target's own normed hidden states where it predicts the labels: then the loss is the
            forward KL to its distribution, else cross-entropy to the labels.
        rows: whose logits exist at once.
        kept: [n] int64, the rows whose weight is not 0, where they are known (to look for them, the host would wait).
    """
    kept = weights.nonzero().squeeze(1) if kept is None else kept
    hidden, labels, weights = hidden[kept], labels[kept], weights[kept]
    own = None if teacher is None else teacher[kept]
    if model.config.final_logit_softcapping is None:
        run: Any = _HeadLoss.apply
        total: Tensor = run(hidden, labels, weights, head, own, model.config.output_multiplier, rows)
        return total
    total = hidden.new_zeros((), dtype=torch.float32)
    for part in torch.arange(len(kept), device=hidden.device).split(rows):
        args: tuple[Any, ...] = (model, hidden[part], labels[part], weights[part], head)
        total = total + checkpoint(_part, *args, None if own is None else own[part], use_reentrant=False)
    return total


class _HeadLoss(torch.autograd.Function):
    """Loss and gradient at once: logits are computed once and never kept, since the head is frozen."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, labels: Tensor, weights: Tensor, head: Tensor, teacher: Tensor | None,
        multiplier: float, rows: int,
    ) -> Tensor:  # fmt: skip
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        gradient = torch.empty_like(hidden)
        for first in range(0, len(hidden), rows):
            at = slice(first, first + rows)
            logits = F.linear(hidden[at].to(head.dtype), head)
            scaled = logits if multiplier == 1 else logits.float() * multiplier
            log_q = F.log_softmax(scaled, -1, dtype=torch.float32)
            del logits, scaled
            weight = weights[at].unsqueeze(1)
            if teacher is None:
                chosen = labels[at].unsqueeze(1)
                total -= (log_q.gather(1, chosen) * weight).sum()
                error = log_q.exp_().scatter_add_(1, chosen, torch.full_like(weight, -1.0))
            else:
                log_p = F.log_softmax(F.linear(teacher[at].to(head.dtype), head), -1, dtype=torch.float32)
                p = log_p.exp()
                total += ((log_p - log_q).mul_(p) * weight).sum()
                error = log_q.exp_().sub_(p)
            part = torch.empty(error.shape, dtype=head.dtype, device=error.device)
            torch.mul(error, weight * multiplier, out=part)
            gradient[at] = part @ head
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0], None, None, None, None, None, None


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
