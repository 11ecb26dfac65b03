"""Gains of one way over another on the same prompts, with intervals, for the benchmarks of contexts."""

from collections.abc import Sequence

import numpy as np

Share = tuple[float, float]  # what one prompt made, such as tokens, and what that cost, such as rounds or seconds
DRAWS = 4000


def rate(shares: Sequence[Share]) -> float:
    """Everything that was made over everything that it cost; nan for nothing."""
    cost = sum(share[1] for share in shares)
    return sum(share[0] for share in shares) / cost if cost else float("nan")


def gain(shares: Sequence[Share], base: Sequence[Share], draws: int = DRAWS) -> list[float]:
    """How far the pooled rate of `shares` is above that of `base`, and the interval that holds it in 95 of 100 cases.

    Both are of the same prompts in the same order, and are drawn together (paired bootstrap over prompts, percentiles).
    One prompt has no interval: its own gain stands at all three places. Returns: gain, low, high; 0.1 is 10%.
    """
    assert len(shares) == len(base), "a pair for every prompt"
    if not shares:
        return []
    table = np.array([[*one, *other] for one, other in zip(shares, base, strict=True)], dtype=np.float64)
    drawn = np.random.default_rng(0).integers(len(table), size=(draws, len(table)))
    made, cost, base_made, base_cost = table[drawn].sum(1).T
    low, high = np.percentile(made / cost * base_cost / base_made - 1, [2.5, 97.5])
    return [round(float(value), 3) for value in (rate(shares) / rate(base) - 1, low, high)]
