"""Scores of candidates behind candidates, on the device: equals ddtree.drafter.PairwiseHead.pair and tree.Pair.of."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree.kernels.backend import jit, overlap, power_of_two
from ddtree.kernels.build import Lines, Plan
from ddtree.kernels.matmul import product_parts, suits
from ddtree.tree import Proposal


@dataclass(frozen=True)
class PairFactors:
    """A pairwise head's tensors as the kernel reads them: see ddtree.drafter.PairwiseHead.factors.

    In float32, as the head has them: a round reads the rows of a few tokens, so fewer bytes would save no time.
    """

    before: Tensor  # [W + 1, r] float32; the last row is 0
    behind: Tensor  # [W + 1, r], likewise
    rest: Tensor  # [r] float32
    gate: Tensor | None  # [r, H], in the dtype of the drafter's states
    rows: Tensor  # [vocab] int64: the row of each token, W where it has none


@dataclass(frozen=True, kw_only=True)
class PairedProposal(Proposal):
    """A proposal with its pair scores, and these in order, as `build` reads them."""

    lines: Lines


def pair(factors: PairFactors, hidden: Tensor, proposal: Proposal, plan: Plan) -> PairedProposal:
    """The proposal with pair scores: one launch, and where there is a gate one product before it.

    Args:
        hidden: [B, D, H], the drafter's last hidden states, in the dtype that the factors were made for.
        proposal: tokens and log_q [B, D, K], K up to 32.
        plan: of B sequences; candidates beyond a sequence's `ranks` count as missing, so that its scores do not depend
            on what others ask for.
    """
    batch, drafted, ranks = proposal.log_q.shape
    log_q, tokens, device = proposal.log_q.contiguous(), proposal.tokens.contiguous(), proposal.log_q.device
    parts = factors.rest  # not read
    if factors.gate is not None:
        states = hidden.reshape(batch * drafted, -1)
        if suits(factors.gate):
            parts = product_parts(states, factors.gate)  # [S, B * D, r]
        else:
            parts = F.linear(states, factors.gate).unsqueeze(0)
    scores = torch.empty(batch, drafted - 1, ranks, ranks, device=device)
    shape = (batch, drafted, ranks, ranks)
    lines = Lines(torch.empty(shape, device=device), torch.empty(shape, dtype=torch.uint8, device=device))
    rank = factors.before.shape[1]
    jit("pair").pair[(drafted * ranks, batch)](
        log_q, tokens, plan.settings, factors.before, factors.behind, factors.rest, factors.rows, parts,
        scores, lines.edges, lines.places, drafted, ranks, rank, len(parts),
        rank_block=power_of_two(ranks), factor_block=power_of_two(rank), gated=factors.gate is not None,
        num_warps=warps_of(ranks, rank), **overlap(device),
    )  # fmt: skip
    return PairedProposal(tokens=proposal.tokens, log_q=proposal.log_q, pair=scores, lines=lines)


def warps_of(ranks: int, rank: int) -> int:
    """Of a program: each thread has at most 32 of the numbers that are multiplied, up to 8 warps."""
    return max(1, min(8, power_of_two(ranks) * power_of_two(rank) // 1024))


def lines_of(log_q: Tensor, scores: Tensor) -> Lines:
    """By torch, of pair scores [B, D - 1, K, K] that are there already; log_q: [B, D, K]."""
    edges, ranks = _known(scores).sort(stable=True, dim=-1, descending=True)
    count = log_q.shape[-1]
    first = _known(log_q[:, :1]).unsqueeze(2).expand(-1, -1, count, -1)
    own = torch.arange(count, device=log_q.device).expand(first.shape)
    return Lines(torch.cat([first, edges], 1), torch.cat([own, ranks], 1).to(torch.uint8))


def _known(scores: Tensor) -> Tensor:
    return scores.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
