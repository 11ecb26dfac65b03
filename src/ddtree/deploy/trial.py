"""A new tree first in the shadow of the chain: one replica verifies both, commits the chain, and counts the tree."""

import time
from dataclasses import dataclass, replace
from typing import Any

from ddtree.bench.suite import load_prompts
from ddtree.deploy.compare import Checks
from ddtree.deploy.converge import Way, guarded, replace_one
from ddtree.deploy.failures import DeployFailed
from ddtree.deploy.generation import Generation
from ddtree.deploy.live import Answer, Endpoint
from ddtree.deploy.site import Site, endpoint
from ddtree.deploy.state import begin

LOOK_S = 0.5
ROUNDS, DISAGREED = "ddtree_shadow_rounds_total", "ddtree_shadow_disagreements_total"
CHAIN, TREE = "ddtree_shadow_chain_tokens_total", "ddtree_shadow_accepted_tokens_total"
MODE_ROUNDS, MODE_ACCEPTED = "ddtree_mode_rounds_total", "ddtree_mode_accepted_tokens_total"


@dataclass(frozen=True)
class Trial:
    """What the trees must gain in the shadow, and by which requests it is told."""

    min_gain: float = 1.0  # tokens a round of the tree over those of the chain
    seconds: float = 0.0  # of live traffic; 0: prompts of the suite instead
    prompts: int = 7  # one of each category of the suite

    def __post_init__(self) -> None:
        if not 0 < self.min_gain <= 100:
            raise DeployFailed(f"--min-gain must be above 0, at most 100, not {self.min_gain:g}")
        if not 0 <= self.seconds <= 86400:
            raise DeployFailed(f"--shadow-seconds must be from 0 to 86400, not {self.seconds:g}")


@dataclass(frozen=True)
class Seen:
    """What the shadow showed."""

    rounds: int
    chain: float | None  # tokens a round
    tree: float | None
    agree: bool | None  # None: the server does not tell

    @property
    def gain(self) -> float | None:
        """The tree's tokens a round over the chain's."""
        return self.tree / self.chain if self.tree is not None and self.chain else None

    def figures(self) -> dict[str, Any]:
        """As JSON has them."""
        return {
            "rounds": self.rounds, "chain": _rounded(self.chain), "tree": _rounded(self.tree),
            "gain": _rounded(self.gain), "agree": self.agree,
        }  # fmt: skip


def run(site: Site, shadow: Generation, way: Way, limits: Trial) -> dict[str, Any]:
    """Puts one replica into the shadow mode and lets it answer; its figures. Raises DeployFailed, all put back."""
    source = site.folder.pointed("current")
    begin(site.folder, site.state, "shadow rollout", source.number if source else None, shadow.number)
    member = shadow.members[0]
    figures: dict[str, Any] = {}

    def work() -> None:
        checks = way.checks or Checks()
        # It is slower by design, so speed is no limit here; its tokens are the chain's.
        slow = Checks(replace(checks.limits, min_speed=0.0, min_acceptance=0.0), checks.baselines, checks.verdicts)
        replace_one(site, shadow, member, Way(slow))
        at = endpoint(member, shadow.unit(member.service))
        seen = _watch(site, at, limits) if limits.seconds else _ask(at, limits, checks)
        figures.update(seen.figures())
        equal = checks.verdicts[-1]["same"] == checks.verdicts[-1]["prompts"] if checks.verdicts else None
        figures["same_tokens"] = equal
        _decide(seen, equal, limits)
        site.tell(
            f"{member.service} in the shadow: the tree gives {seen.tree or 0:.2f} tokens a round, the chain "
            f"{seen.chain or 0:.2f} ({seen.gain or 0:.2f} times, over {seen.rounds} rounds): promoted"
        )

    guarded(site, work)
    return figures


def _decide(seen: Seen, equal: bool | None, limits: Trial) -> None:
    parity = seen.agree if seen.agree is not None else equal
    if seen.gain is None:
        raise DeployFailed("the shadow saw no round that drafted: watch for longer (--shadow-seconds)")
    if not parity:
        how = "the tree's tokens were not those that came" if seen.agree is False else "parity was not shown"
        raise DeployFailed(f"not promoted: {how} (over {seen.rounds} rounds)")
    if seen.gain < limits.min_gain:
        raise DeployFailed(
            f"not promoted: the tree gives {seen.tree:.2f} tokens a round and the chain {seen.chain:.2f}, a gain of "
            f"{seen.gain:.3f}, and --min-gain is {limits.min_gain:g}"
        )


def _ask(at: Endpoint, limits: Trial, checks: Checks) -> Seen:
    """By the answers' own blocks."""
    asked = load_prompts(limits.prompts)
    answers = [at.ask(prompt.prompt, checks.limits.max_tokens, checks.limits.seconds) for prompt in asked]
    return of_answers(answers)


def of_answers(answers: list[Answer]) -> Seen:
    """Means over all rounds of the answers."""
    told = [(a.rounds, a.shadow) for a in answers if a.shadow is not None and a.rounds]
    rounds = sum(count for count, _ in told)
    if not rounds:
        return Seen(0, None, None, None)
    chain = sum(count * (shadow["linear_acceptance_length"] or 1.0) for count, shadow in told) / rounds
    tree = sum(count * (shadow["tree_acceptance_length"] or 1.0) for count, shadow in told) / rounds
    agreed = [shadow["agree"] for _, shadow in told]
    return Seen(rounds, chain, tree, None if None in agreed else all(agreed))


def _watch(site: Site, at: Endpoint, limits: Trial) -> Seen:
    """By the counters, while live traffic comes."""
    site.tell(f"{limits.seconds:g} s of live traffic in the shadow ...")
    before, until = at.counters(), time.monotonic() + limits.seconds
    while time.monotonic() < until:
        time.sleep(min(LOOK_S, limits.seconds))
    return of_counters(before, at.counters())


def of_counters(before: dict[str, float], after: dict[str, float]) -> Seen:
    """What was counted between two looks."""

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    own = ROUNDS in after  # ddtree's server; SGLang counts its rounds by mode alone
    rounds = grown(ROUNDS if own else MODE_ROUNDS)
    if rounds <= 0:
        return Seen(0, None, None, None)
    chain, tree = grown(CHAIN if own else MODE_ACCEPTED), grown(TREE)
    agree = grown(DISAGREED) == 0 if own else None
    return Seen(int(rounds), 1 + chain / rounds, 1 + tree / rounds, agree)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
