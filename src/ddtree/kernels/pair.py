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
    """A pairwise head's tensors on the device: see ddtree.drafter.PairwiseHead.

    Factors that bfloat16 holds exactly, as those of a file that was written in it, are kept so: half of the memory, and
    the same scores, since they are multiplied and summed in float32. Others stay in float32.
    """

    before: Tensor  # [W + 1, r] bfloat16 or float32; the last row is 0
    behind: Tensor  # [W + 1, r], likewise
    rest: Tensor  # [r] float32
    gate: Tensor | None  # [r, H], in the dtype of the drafter's states
    places: Tensor  # [vocab] int32: the row of each token, W where it has none

    @classmethod
    def of(
        cls, before: Tensor, behind: Tensor, rest: Tensor, gate: Tensor | None, places: Tensor, states: torch.dtype
    ) -> "PairFactors":
        """From float32 factors, on one device; states: dtype of the hidden states that the gate will read."""
        exact = all(torch.equal(rows.bfloat16().float(), rows) for rows in (before, behind))
        dtype = torch.bfloat16 if exact else torch.float32
        return cls(
            before=before.to(dtype).contiguous(),
            behind=behind.to(dtype).contiguous(),
            rest=rest.float().contiguous(),
            gate=None if gate is None else gate.to(states).contiguous(),
            places=places.int().contiguous(),
        )


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
        log_q, tokens, plan.settings, factors.before, factors.behind, factors.rest, factors.places, parts,
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
