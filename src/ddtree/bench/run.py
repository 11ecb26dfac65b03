"""Runs a plan: the variants take turns on every prompt, in one process; stage times come from a pass of their own."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ddtree.bench.suite import Plan, Prompt
from ddtree.engine import Engine, Generation, StageTimer

WARM_UP_TOKENS = 16
STAGE_TOKENS = 32
STAGE_PROMPTS = 3


@dataclass(frozen=True)
class Sample:
    """One answer: which prompt, by which variant, and what the engine tells of it."""

    prompt: Prompt
    variant: str
    generation: Generation


def run(engine: Engine, plan: Plan, on_step: Callable[[], None] = lambda: None) -> list[Sample]:
    """Answer every prompt by every variant, after a warm-up of each; `on_step` is called after each of `steps(plan)`.

    The order of the variants turns by one place from prompt to prompt, so that none always runs on a cooler or a
    busier machine. Nothing is timed inside the rounds here. Raises `DDTreeError` as the engine does.
    """
    ids = _encode(engine, plan)
    engines = _engines(engine, plan)
    short = replace(plan.sampling, max_tokens=_at_most(plan, WARM_UP_TOKENS))
    for name, speculation in plan.variants.items():
        engines[name].generate([ids[0]], [short], speculation)
        on_step()
    names = list(plan.variants)
    samples = []
    for turn in range(plan.repeat):
        for index, prompt in enumerate(plan.prompts):
            first = (index + turn) % len(names)
            for name in names[first:] + names[:first]:
                [generation] = engines[name].generate([ids[index]], [plan.sampling], plan.variants[name])
                samples.append(Sample(prompt, name, generation))
                on_step()
    return samples


def measure_stages(
    engine: Engine, plan: Plan, on_step: Callable[[], None] = lambda: None
) -> dict[str, dict[str, float]]:
    """Milliseconds a round by stage for each variant, from a short pass of its own: timing a stage slows it.

    The prefill is no part of a round and is left out.
    """
    ids = _encode(engine, plan)[:STAGE_PROMPTS]
    short = replace(plan.sampling, max_tokens=_at_most(plan, STAGE_TOKENS))
    stages: dict[str, dict[str, float]] = {}
    engines = _engines(engine, plan)
    for name, speculation in plan.variants.items():
        timer = StageTimer()
        rounds = 0
        for prompt in ids:
            [generation] = engines[name].generate([prompt], [short], speculation, observer=timer)
            rounds += generation.rounds
        spent = {stage: seconds for stage, seconds in timer.seconds.items() if stage != "prefill"}
        stages[name] = {stage: round(1000 * seconds / rounds, 3) for stage, seconds in spent.items()} if rounds else {}
        on_step()
    return stages


def steps(plan: Plan) -> int:
    """How often `run` and then `measure_stages` call `on_step`, for a progress bar."""
    return len(plan.variants) * (plan.repeat * len(plan.prompts) + 2)


def _engines(engine: Engine, plan: Plan) -> dict[str, Engine]:
    """Plain decoding runs without the drafter, whose context would otherwise be kept up to date at its cost."""
    plain = engine.without_drafter()
    return {name: plain if speculation.mode == "ar" else engine for name, speculation in plan.variants.items()}


def _encode(engine: Engine, plan: Plan) -> list[list[int]]:
    return [engine.text.chat([{"role": "user", "content": prompt.prompt}]) for prompt in plan.prompts]


def _at_most(plan: Plan, tokens: int) -> int:
    return tokens if plan.sampling.max_tokens is None else min(tokens, plan.sampling.max_tokens)
