"""Scores of a depth's candidates behind each candidate of the depth before: they make marginals conditional."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pair:
    """One sequence's, each list with its best candidate first: [d][i] is of depth d + 1 behind candidate i of depth d.

    Depths count from 0. Source: the pair scores of a proposal, see Proposal.pair.
    """

    log_q: Sequence[Sequence[Sequence[float]]]  # [D - 1][K][K] at most 0; -inf marks a missing one
    ranks: Sequence[Sequence[Sequence[int]]]  # [D - 1][K][K]: which of their depth's candidates these are

    @classmethod
    def of(cls, scores: Tensor) -> "Pair":
        """scores: [D - 1, K, K] float32, [d, i, j]; equals stay in the order of j, and NaN counts as missing."""
        known = scores.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        log_q, ranks = known.sort(stable=True, dim=-1, descending=True)
        return cls(log_q.tolist(), ranks.tolist())

    def share(self, depth: int, before: int, rank: int) -> float:
        """The score of a candidate of `depth` (from 1, as depths count from 0) behind the candidate `before`."""
        return self.log_q[depth - 1][before][self.ranks[depth - 1][before].index(rank)]
