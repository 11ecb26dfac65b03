"""A replica before and after: the same greedy prompts while it has no other requests, and what may differ."""

from dataclasses import dataclass, field
from typing import Any

from ddtree.bench.smoke import smoke
from ddtree.bench.suite import load_prompts
from ddtree.deploy.failures import DeployFailed
from ddtree.deploy.live import Answer, Endpoint, mode_of, same_tokens_promised

MOST_TOKENS = 1024  # of a compared answer: longer ones only take longer
PLAIN_MODES = ("ar",)  # they draft nothing, so their acceptance says nothing


@dataclass(frozen=True)
class Limits:
    """What a new replica must keep of the old one, and how it is asked."""

    min_speed: float = 0.8  # tokens per second, as a share of the old replica's
    min_acceptance: float = 0.8  # tokens a round, as a share of the old replica's, where both draft
    prompts: int = 4
    max_tokens: int = 48
    seconds: float = 300.0  # for one answer
    compare: bool = True  # False: the smoke test alone

    def __post_init__(self) -> None:
        for name in ("min_speed", "min_acceptance"):
            if not 0 <= getattr(self, name) <= 100:
                raise DeployFailed(f"--{name.replace('_', '-')} must be from 0 (no limit) to 100")
        most = len(load_prompts())
        if not 1 <= self.prompts <= most:
            raise DeployFailed(f"--prompts must be from 1 to {most}, those of the suite, not {self.prompts}")
        if not 1 <= self.max_tokens <= MOST_TOKENS:
            raise DeployFailed(f"--max-tokens must be from 1 to {MOST_TOKENS}, not {self.max_tokens}")


@dataclass(frozen=True)
class Measured:
    """What one replica answered."""

    info: dict[str, Any]
    answers: tuple[Answer, ...]

    @property
    def tok_s(self) -> float:
        """Tokens of all answers over their seconds."""
        seconds = sum(answer.seconds for answer in self.answers)
        return sum(answer.tokens for answer in self.answers) / seconds if seconds else 0.0

    @property
    def acceptance(self) -> float | None:
        """Tokens a round, over all rounds of all answers; None where none is told."""
        told = [a for a in self.answers if a.acceptance_length is not None and a.rounds]
        rounds = sum(answer.rounds for answer in told)
        return sum((a.acceptance_length or 0.0) * a.rounds for a in told) / rounds if rounds else None


@dataclass(frozen=True)
class Verdict:
    """The comparison: figures, and why it fails, if it does."""

    figures: dict[str, Any]
    failure: str | None = None

    def line(self) -> str:
        """For people."""
        f = self.figures
        lengths = f"{shown(f['acceptance_before'])} -> {shown(f['acceptance_after'])}"
        return (
            f"{f['mode_before']} -> {f['mode_after']}: {f['same']} of {f['prompts']} answers the same "
            f"({f['promise']}), {shown(f['tok_s_before'])} -> {shown(f['tok_s_after'])} tokens/s, "
            f"acceptance length {lengths}"
        )


@dataclass
class Checks:
    """The checks of one rollout, with each service's baseline."""

    limits: Limits = field(default_factory=Limits)
    baselines: dict[str, Measured] = field(default_factory=dict)
    verdicts: list[dict[str, Any]] = field(default_factory=list)

    def baseline(self, service: str, at: Endpoint) -> str | None:
        """Measures what runs now, once; a line where it cannot be measured."""
        if service in self.baselines or not self.limits.compare:
            return None
        try:
            self.baselines[service] = measure(at, self.limits)
        except DeployFailed as error:
            return f"{service} gives no answers to compare with ({error})"
        return None

    def probe(self, service: str, at: Endpoint) -> Measured | None:
        """Smoke test, then the prompts, if they are to be compared. Raises DeployFailed."""
        report = smoke(at.url, label=service, api_key=at.api_key, timeout_s=self.limits.seconds)
        if "error" in report:
            raise DeployFailed(f"{service} failed the smoke test: {report['error']}")
        return measure(at, self.limits) if self.limits.compare else None

    def decide(self, service: str, after: Measured | None) -> Verdict | None:
        """The comparison; None where there is nothing to compare with. Raises DeployFailed where it fails."""
        before = self.baselines.get(service) or next(iter(self.baselines.values()), None)
        if before is None or after is None:
            return None
        verdict = judge(before, after, self.limits)
        self.verdicts.append({"service": service, **verdict.figures, "failure": verdict.failure})
        if verdict.failure:
            raise DeployFailed(f"{service} does not keep what was there: {verdict.failure} ({verdict.line()})")
        return verdict


def measure(at: Endpoint, limits: Limits) -> Measured:
    """Asks the first prompts of the suite, one after another, with nothing of them cached. Raises DeployFailed."""
    info = at.info()
    at.forget()
    answers = tuple(at.ask(p.prompt, limits.max_tokens, limits.seconds) for p in load_prompts(limits.prompts))
    return Measured(info, answers)


def judge(before: Measured, after: Measured, limits: Limits) -> Verdict:
    """Tokens where the numerics promise them; speed and acceptance within the limits."""
    promised = same_tokens_promised(before.info, after.info)
    pairs = list(zip(before.answers, after.answers, strict=True))
    differing = [number for number, (old, new) in enumerate(pairs) if not same(old, new)]
    modes = mode_of(before.info), mode_of(after.info)
    lengths = before.acceptance, after.acceptance
    figures: dict[str, Any] = {
        "mode_before": modes[0], "mode_after": modes[1],
        "prompts": len(pairs), "same": len(pairs) - len(differing),
        "promise": "as promised by these numerics" if promised else "not promised by these numerics",
        "tok_s_before": round(before.tok_s, 2), "tok_s_after": round(after.tok_s, 2),
        "acceptance_before": _rounded(lengths[0]), "acceptance_after": _rounded(lengths[1]),
    }  # fmt: skip
    failure = None
    if promised and differing:
        failure = f"answer {differing[0] + 1} differs, which {after.info.get('dtype')} does not allow"
    elif after.tok_s < limits.min_speed * before.tok_s:
        failure = f"{after.tok_s:.1f} tokens/s are less than {limits.min_speed:g} of {before.tok_s:.1f} (--min-speed)"
    elif lengths[0] and modes[1] not in PLAIN_MODES and (lengths[1] or 1.0) < limits.min_acceptance * lengths[0]:
        failure = (
            f"acceptance length {lengths[1] or 1.0:.2f} is less than {limits.min_acceptance:g} of {lengths[0]:.2f} "
            "(--min-acceptance)"
        )
    return Verdict(figures, failure)


def same(one: Answer, other: Answer) -> bool:
    """Whether two answers have the same tokens; by their text where a server does not give tokens."""
    if one.token_ids is not None and other.token_ids is not None:
        return one.token_ids == other.token_ids
    return one.text == other.text


def shown(value: float | None) -> str:
    """A figure, or a dash."""
    return "-" if value is None else f"{value:.2f}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
