"""Counters beside SGLang's own: what rounds committed, and what the tree would have, where only the chain counts."""

from functools import lru_cache
from typing import Any

from ddtree.sglang.options import Options

# Names and meanings as `ddtree serve` has them; the third has no twin there.
ROUNDS = "ddtree_mode_rounds"
ACCEPTED = "ddtree_mode_accepted_tokens"
WOULD_ACCEPT = "ddtree_shadow_accepted_tokens"
SECONDS = "ddtree_stage_seconds"


def count(rounds: int, accepted: int, kept_by_tree: int) -> None:
    """Add what a batch did.

    Args:
        rounds: sequences of the batch, each of which had one round.
        accepted: nodes that they committed, the bonus not counted.
        kept_by_tree: tokens, the bonus included, that the tree would have committed where it was shadowed; else 0.
    """
    mode = Options.read().mode
    counters = _counters()
    counters[ROUNDS].labels(mode).inc(rounds)
    counters[ACCEPTED].labels(mode).inc(accepted)
    if kept_by_tree:
        counters[WOULD_ACCEPT].labels(mode).inc(kept_by_tree - rounds)


def count_stage(stage: str, seconds: float) -> None:
    """Add the time of one stage of one batch's round."""
    _counters()[SECONDS].labels(stage).inc(seconds)


@lru_cache(maxsize=1)
def _counters() -> dict[str, Any]:
    from prometheus_client import Counter  # after SGLang has named the folder that its processes share

    told = {
        ROUNDS: "Rounds of one sequence, by the server's mode.",
        ACCEPTED: "Nodes accepted, by the server's mode; over the rounds: acceptance.",
        WOULD_ACCEPT: "Nodes that the tree would have accepted in rounds that committed the chain beside it.",
    }
    counters: dict[str, Any] = {name: Counter(name, text, labelnames=("mode",)) for name, text in told.items()}
    counters[SECONDS] = Counter(
        SECONDS, "Time in each stage of DDTREE's rounds; on a GPU, of its work there.", ("stage",)
    )
    return counters
