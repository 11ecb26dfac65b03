"""What a request gives back: chunks on the way, a generation at its end."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddtree.engine.logprobs import TokenLogprob


@dataclass(frozen=True)
class Shadow:
    """What shadow-linear saw of the tree, from the roots that linear visited (a real tree run visits others)."""

    linear_acceptance_length: float | None
    tree_acceptance_length: float | None
    agree: bool | None  # the tree's tokens are those committed later; None without a round
    overhead: float | None = None  # round time over linear's: `ddtree bench` measures it, a single run cannot


@dataclass(frozen=True)
class SpeculativeStats:
    """What a request's rounds added up to, before cuts at its end."""

    rounds: int = 0
    drafted: int = 0  # nodes that could be accepted: for shadow-linear the chain's
    accepted: int = 0
    histogram: tuple[int, ...] = ()  # rounds by how many nodes were accepted, from 0
    width: int = 0  # the most nodes that a round may verify


@dataclass(frozen=True)
class Generation:
    """One finished request."""

    text: str
    token_ids: list[int]  # the end-of-sequence token included, where one ended it
    finish_reason: str  # "stop": end token or stop string; "length": max_tokens or the context
    mode: str  # the mode that ran: "ar" where not one round had a proposal
    rounds: int  # verify forwards, prefill excluded
    acceptance_length: float | None  # (accepted + 1) / rounds, before cuts; None without a round
    prompt_tokens: int
    seconds: float  # the whole request, waiting included
    prefill_seconds: float
    decode_seconds: float
    queue_seconds: float = 0.0
    stop_reason: str | int | None = None  # the stop string, or the id of `stop_token_ids`, that ended it
    cached_tokens: int = 0  # of the prompt, reused from earlier requests
    logprobs: list["TokenLogprob"] = field(default_factory=list)  # one per token id, where asked for
    speculative: SpeculativeStats = field(default_factory=SpeculativeStats)
    stages: dict[str, float] = field(default_factory=dict)  # seconds by stage, where a StageTimer looked on
    shadow: Shadow | None = None

    @property
    def tok_s(self) -> float:
        """Generated tokens per second of the whole request."""
        return len(self.token_ids) / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Chunk:
    """What one round adds to a stream. The last one has finish_reason and generation, or an error."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    generation: Generation | None = None
    logprobs: list["TokenLogprob"] = field(default_factory=list)
    error: Exception | None = None

    @property
    def last(self) -> bool:
        """Whether nothing comes after it."""
        return self.generation is not None or self.error is not None


@dataclass
class Counts:
    """What one sequence's rounds added up to so far. Acceptance counts before cuts, prefill excluded."""

    rounds: int = 0
    speculated: int = 0  # rounds that had a proposal
    drafted: int = 0
    accepted: int = 0
    histogram: Counter[int] = field(default_factory=Counter)
    tree_accepted: int = 0  # shadow-linear: what the tree would have accepted from the same roots
    predictions: dict[int, set[int]] = field(default_factory=dict)  # shadow-linear: position -> the tree's tokens
    agree: bool = True  # every prediction so far was committed later

    def add(self, drafted: int, accepted: int) -> None:
        """Count one round."""
        self.rounds += 1
        self.speculated += drafted > 0
        self.drafted += drafted
        self.accepted += accepted
        self.histogram[accepted] += 1

    def shadow(self, position: int, tree_tokens: list[int], committed: list[int]) -> None:
        """Note what the tree would have committed behind `position`, and check earlier notes against `committed`."""
        self.tree_accepted += len(tree_tokens) - 1
        for offset, token in enumerate(tree_tokens, start=1):
            self.predictions.setdefault(position + offset, set()).add(token)
        for offset, token in enumerate(committed, start=1):
            self.agree &= self.predictions.pop(position + offset, {token}) == {token}

    @property
    def acceptance_length(self) -> float | None:
        """(accepted + 1) per round; None without a round."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else None

    def shadow_result(self) -> Shadow:
        """The counterfactual."""
        tree = (self.tree_accepted + self.rounds) / self.rounds if self.rounds else None
        return Shadow(self.acceptance_length, tree, self.agree if self.rounds else None)

    def stats(self, width: int) -> SpeculativeStats:
        """The sums, as a result has them."""
        most = max(self.histogram, default=-1)
        histogram = tuple(self.histogram[n] for n in range(most + 1))
        return SpeculativeStats(self.rounds, self.drafted, self.accepted, histogram, width)
