"""What an answer says of itself beside its text: token counts, and how it was decoded."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtree.engine import Chunk, Generation


class Tally:
    """Token counts of one request, all its choices together. A prompt counts once, however many answers it gets.

    `firsts` are the choices that stand for their prompt: the first one of each.
    """

    def __init__(self, prompt_tokens: int, choices: int, firsts: Sequence[int]) -> None:
        self._prompt_tokens = prompt_tokens
        self._firsts = frozenset(firsts)
        self._completion = [0] * choices
        self._reasoning = [0] * choices
        self._cached = 0

    def add(self, index: int, chunk: "Chunk") -> None:
        """Counts a chunk; the last one of a choice brings what it reused."""
        self._completion[index] += len(chunk.token_ids)
        if chunk.generation is not None and index in self._firsts:
            self._cached += chunk.generation.cached_tokens

    def thought(self, index: int, tokens: int) -> None:
        """Sets how many of a choice's tokens were reasoning."""
        self._reasoning[index] = min(tokens, self._completion[index])

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`. An end-of-text token counts; what followed it inside its round does not."""
        completion = sum(self._completion)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached},
            "completion_tokens_details": {"reasoning_tokens": sum(self._reasoning)},
        }


def speculation(generation: "Generation") -> dict[str, Any]:
    """The `ddtree` block: the mode that really ran, and what its rounds accepted."""
    shadow = generation.shadow
    block = {
        "mode": generation.mode,
        "acceptance_length": _rounded(generation.acceptance_length, 4),
        "rounds": generation.rounds,
        "tok_s": _rounded(generation.tok_s, 2),
        "shadow": None if shadow is None else _finite(dataclasses.asdict(shadow)),
    }
    return _finite(block)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def metrics(generations: "Sequence[Generation]") -> dict[str, Any]:
    """The root's `metrics`, in vLLM's shape (its docs: Per-Request Acceptance Metrics). Choices are counted together.

    `acceptance_histogram[j]` is the number of rounds that accepted j drafted tokens. Without a round that drafted
    anything (mode ar, or an answer of one token) there is nothing to say: null.
    """
    every = [generation.speculative for generation in generations]
    rounds, drafted = sum(one.rounds for one in every), sum(one.drafted for one in every)
    if not rounds or not drafted:
        return {"speculative_decoding": None}
    accepted = sum(one.accepted for one in every)
    histogram = [0] * max(len(one.histogram) for one in every)
    for one in every:
        for count, seen in enumerate(one.histogram):
            histogram[count] += seen
    block = {
        "mean_acceptance_length": 1 + accepted / rounds,
        "draft_acceptance_rate": accepted / drafted,
        "acceptance_histogram": histogram,
        "num_spec_steps": rounds,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": max(one.width for one in every),
    }
    return {"speculative_decoding": block}


def _finite(block: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity, and a clock too coarse for a tiny answer gives one: null instead."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in block.items()
    }
