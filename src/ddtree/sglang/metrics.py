"""Counters beside SGLang's own: what rounds committed, and what the tree would have, where only the chain counts."""

from functools import lru_cache
from typing import Any

from ddtree.sglang.options import Options

ROUNDS = "ddtree_rounds"
COMMITTED = "ddtree_committed_tokens"
WOULD_COMMIT = "ddtree_shadow_tree_tokens"


def count(rounds: int, committed: int, tree: int) -> None:
    """Add what a batch did.

    Args:
        rounds: sequences of the batch, each of which had one round.
        committed: their tokens, each round's bonus included: committed / rounds is the acceptance length.
        tree: tokens that the tree would have committed in rounds that shadowed it; else 0.
    """
    mode = Options.read().mode
    counters = _counters()
    counters[ROUNDS].labels(mode).inc(rounds)
    counters[COMMITTED].labels(mode).inc(committed)
    if tree:
        counters[WOULD_COMMIT].labels(mode).inc(tree)


@lru_cache(maxsize=1)
def _counters() -> dict[str, Any]:
    from prometheus_client import Counter  # after SGLang has named the folder that its processes share

    told = {
        ROUNDS: "Verify rounds of DDTREE, one for each sequence of a batch.",
        COMMITTED: "Tokens that DDTREE's rounds committed, the bonus included.",
        WOULD_COMMIT: "Tokens that the tree would have committed in rounds of shadow-linear.",
    }
    return {name: Counter(name, text, labelnames=("mode",)) for name, text in told.items()}
