"""Log-probabilities as an answer reports them: the model's own."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.tree import largest


@dataclass(frozen=True)
class TokenLogprob:
    """One token of an answer. Natural logarithms, at most 0; -inf for a token the model rules out."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the k best (token id, log-probability) at its place, best first


def token_logprobs(logits: Tensor, chosen: Sequence[int], k: int) -> list[TokenLogprob]:
    """The log-probabilities of chosen tokens, and of the k best tokens at the same places.

    Args:
        logits: [m, V] of any float dtype, raw: before bias, masks, penalties and temperature, as vLLM reports them.
        chosen: m token ids.
        k: how many of the best to list, the lowest ids first among equals; all there are in a smaller vocabulary.
    Normalised in float64 and then rounded to float32, so that a row's figures do not depend on how many rows are asked.
    """
    if not chosen:
        return []
    first = logits.amax(-1, keepdim=True).double()  # [m, 1]
    norm = torch.stack([(row.double() - best).exp_().sum().log() for row, best in zip(logits, first, strict=True)])
    ids = torch.tensor(list(chosen), dtype=torch.int64, device=logits.device).unsqueeze(-1)
    if k:
        ids = torch.cat([ids, largest(logits, min(k, logits.shape[-1]))[1]], -1)  # [m, 1 + k]
    values = logits.gather(-1, ids).double() - first - norm.unsqueeze(-1)
    values = values.clamp_(max=0.0).float() + 0.0  # + 0.0: no -0.0
    return [
        TokenLogprob(tokens[0], logprobs[0], tuple(zip(tokens[1:], logprobs[1:], strict=True)))
        for tokens, logprobs in zip(ids.tolist(), values.tolist(), strict=True)
    ]
