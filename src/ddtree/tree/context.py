"""What the text so far says of a round's tokens: scores beside the drafter's own, for the builders of `build`."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log
from typing import NamedTuple, Protocol

import numpy as np

from ddtree.tree.pair import Pair


class Match(NamedTuple):
    """What followed where the last tokens stood before."""

    token: int
    confidence: float  # how much it is believed; above 0 and below 1
    length: int  # tokens of the match


class Context(Protocol):
    """A match behind every path. It must not change while a tree is built."""

    def behind(self, path: tuple[int, ...]) -> Match | None:
        """What follows the root and the tokens of `path`, if anything. Asked for after what the path begins with."""


@dataclass(frozen=True)
class Branch:
    """One continuation of the text from the root on: a match behind each of its own beginnings, and nowhere else."""

    tokens: tuple[int, ...]
    confidences: tuple[float, ...]  # of each token where all before it are right; above 0 and below 1
    length: int = 1  # of the match at the root

    def behind(self, path: tuple[int, ...]) -> Match | None:
        """See Context."""
        depth = len(path)
        if depth >= len(self.tokens) or path != self.tokens[:depth]:
            return None
        return Match(self.tokens[depth], self.confidences[depth], self.length + depth)


class Guess(NamedTuple):
    """The scores behind one node: p(t) = (1 - c) q(t) + c [t is the guess]. Both are float32 and at most 0."""

    token: int
    rank: int  # of the token among its depth's candidates; their number where it is none of them
    hit: float  # log p of the token
    rest: float  # log (1 - c): what every other candidate's log q is moved by


@dataclass(frozen=True)
class Guesses:
    """A context mixed into one sequence's proposal."""

    context: Context
    tokens: Sequence[Sequence[int]]  # [D][K], best first
    log_q: Sequence[Sequence[float]]  # [D][K], at most 0; -inf and NaN mark a missing rank
    pair: Pair | None = None  # in the stead of log_q behind candidates: see best_first

    def behind(self, path: tuple[int, ...]) -> Guess | None:
        """The guess that follows the tokens of `path`; None where there is none, or no depth is left.

        Of a token that is no candidate the drafter's share is not known, and counts as 0.
        """
        found = self.context.behind(path) if len(path) < len(self.tokens) else None
        if found is None:
            return None
        token, c, _ = found
        row = self.tokens[len(path)]
        rank = row.index(token) if token in row else len(row)
        # Rounding must not lift a score above 0: a child would outscore its parent.
        hit = min(float(np.float32(log(c + (1 - c) * self.share(path, rank)))), 0.0)
        return Guess(token, rank, hit, float(np.float32(log(1 - c))))

    def share(self, path: tuple[int, ...], rank: int) -> float:
        """The drafter's probability of a candidate behind the tokens of `path`; 0 where it is missing, or none."""
        depth = len(path)
        if rank >= len(self.log_q[depth]):
            return 0.0
        log_q = self.log_q[depth][rank]
        if self.pair is not None and depth and path[-1] in self.tokens[depth - 1]:
            log_q = self.pair.share(depth, self.tokens[depth - 1].index(path[-1]), rank)
        return exp(log_q) if log_q > -inf else 0.0  # false for NaN
