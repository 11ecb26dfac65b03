"""top_k, top_p and min_p: which tokens may be drawn at all.

All three keep the best tokens in the order (logit, then lowest id), so together they keep the shortest of their three
prefixes. The few best are found first, and only a row for which they do not suffice is looked at as a whole.

Probabilities are whole numbers: exp of a logit's distance to the best, in units of 2^-46 or so. Their sums are exact in
any order, so the same row is cut at the same token whatever rows are beside it, and whichever way it was looked at.
"""

from dataclasses import dataclass
from math import inf, log

import torch
from torch import Tensor

from ddtree.kernels.choose import OFF
from ddtree.tree import largest

POOL = 64  # tokens looked at first; they hold nearly all of what a language model mostly gives
_BLOCK = 4  # rows whose probabilities are summed at once: what the caches of a CPU core hold
_STEPS_A_NAT, _STEPS = 16, 1024  # beyond 1024 steps, 64 nats, a probability is 0 in our units


@dataclass(frozen=True)
class Candidates:
    """Tokens that may be drawn, and some that may not."""

    values: Tensor  # [n, P] float32, their logits
    ids: Tensor  # [n, P] int64
    keep: Tensor  # [n, P] bool: may be drawn


@dataclass(frozen=True)
class Filters:
    """The filters of one request; each may be off."""

    temperature: float  # above 0
    top_k: int  # exactly so many; 0: off
    top_p: float  # the fewest tokens that reach this probability, of what top_k and min_p keep; 1: off
    min_p: float  # at least this part of the best token's probability; 0: off

    def active(self, vocab: int) -> bool:
        """Whether any filter may drop a token."""
        return 0 < self.top_k < vocab or self.top_p < 1 or self.min_p > 0

    def numbers(self, vocab: int) -> tuple[int, float, float] | None:
        """top_k, top_p and the distance to the best that min_p allows, as kernels.Kept has them; None: all off."""
        if not self.active(vocab):
            return None
        drop = self.temperature * log(self.min_p) if self.min_p > 0 else -inf
        return self.top_k if 0 < self.top_k < vocab else OFF, self.top_p, drop

    def narrow(self, scores: Tensor) -> tuple[Candidates, Tensor]:
        """Look at the few best tokens of each row.

        Args:
            scores: [n, V] float32, processed logits before temperature.
        Returns: the candidates, and [n] bool, rows for which they are not all: ask `wide` for those.
        A row whose best is NaN or infinite keeps that one alone.
        """
        vocab = scores.shape[-1]
        limited = 0 < self.top_k < vocab
        values, ids = largest(scores, self.top_k if limited else min(POOL, vocab))
        first = values[:, :1]
        keep = self._above(values, first)
        finite = first.isfinite().squeeze(-1)
        if limited or values.shape[-1] == vocab:
            lacking = torch.zeros_like(finite)
            total = self._mass(values, first, vocab).masked_fill(~keep, 0).sum(-1)
        else:
            lacking = finite & keep[:, -1]  # where min_p cuts within the few best, nothing else is left to know
            total = self._totals(scores, values, first, keep, lacking)
        if self.top_p < 1:
            within, reached = self._within(values, first, keep, total, vocab)
            keep, lacking = keep & within, lacking & ~reached
        head = torch.zeros_like(keep)
        head[:, 0] = True
        return Candidates(values, ids, torch.where(finite.unsqueeze(-1), keep, head)), lacking

    def wide(self, row: Tensor) -> Candidates:
        """The same of one row [1, V], exactly, from all its tokens. top_k is off, and the best logit is finite."""
        first = row.amax(-1, keepdim=True)
        keep = self._above(row, first) if self.min_p > 0 or self.top_p == 1 else None
        if self.top_p < 1:
            mass = self._mass(row, first, row.shape[-1])
            mass = mass if keep is None else mass.masked_fill_(~keep, 0)
            nucleus = self._nucleus(row[0], first[0], mass[0]).unsqueeze(0)
            keep = nucleus if keep is None else keep & nucleus
        assert keep is not None
        ids = keep.nonzero()[:, 1].unsqueeze(0)
        return Candidates(row.gather(1, ids), ids, torch.ones_like(ids, dtype=torch.bool))

    def _nucleus(self, row: Tensor, first: Tensor, mass: Tensor) -> Tensor:
        """What top_p keeps of a whole row. row, mass: [V]; first: [1]. Returns: [V] bool.

        Tokens are laid into steps by their distance to the best. Only those of the step in which the sum is reached
        need sorting, where a sort of the vocabulary would take longer than everything else here.
        """
        # Steps may be rough, as long as a lower logit has no lower step; the limits keep 0 * inf away.
        scale = min(max(_STEPS_A_NAT / self.temperature, 1e-30), 1e30)
        step = (first - row).mul_(scale).clamp_(max=_STEPS - 1).long()
        sums = mass.new_zeros(_STEPS).scatter_add_(0, step, mass)
        up_to = sums.cumsum(0)
        limit = up_to[-1].double() * self.top_p
        edge = (up_to.double() < limit).sum()  # the first step that reaches it
        ids = (step == edge).nonzero().squeeze(-1)
        ids = ids[row[ids].sort(descending=True, stable=True).indices]
        before = (up_to - sums)[edge] + mass[ids].cumsum(0) - mass[ids]
        within = step < edge
        within[ids] = before.double() < limit
        return within

    def _above(self, values: Tensor, first: Tensor) -> Tensor:
        """What min_p keeps. values: [n, M]; first: [n, 1], the best of each row."""
        if self.min_p <= 0:
            return values > -torch.inf
        return (values >= (first.double() + self.temperature * log(self.min_p)).float()) & (values > -torch.inf)

    def _mass(self, values: Tensor, first: Tensor, vocab: int) -> Tensor:
        """Probabilities up to a factor, as whole numbers of which `vocab` add up without overflow. Returns: int64."""
        unit = 2.0 ** (62 - vocab.bit_length())
        return (values.double() - first).div_(self.temperature).exp_().mul_(unit).long()

    def _totals(self, scores: Tensor, values: Tensor, first: Tensor, keep: Tensor, lacking: Tensor) -> Tensor:
        """[n] int64, the mass of all that min_p keeps; summed over the vocabulary only where that is more."""
        vocab = scores.shape[-1]
        total = self._mass(values, first, vocab).masked_fill(~keep, 0).sum(-1)
        if self.top_p < 1 and bool(lacking.any()):
            rows = lacking.nonzero().squeeze(-1)
            for some in rows.split(_BLOCK):
                best = first[some]
                mass = self._mass(scores[some], best, vocab)
                if self.min_p > 0:
                    mass.masked_fill_(~self._above(scores[some], best), 0)
                total[some] = mass.sum(-1)
        return total

    def _within(self, values: Tensor, first: Tensor, keep: Tensor, total: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
        """What top_p keeps of values [n, M], best first, and [n] bool: they reach it. total: [n] int64."""
        mass = self._mass(values, first, vocab).masked_fill(~keep, 0)
        up_to = mass.cumsum(-1)
        limit = total.double().unsqueeze(-1) * self.top_p
        return keep & ((up_to - mass).double() < limit), up_to[:, -1].double() >= limit.squeeze(-1)
