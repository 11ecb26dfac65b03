"""The order of a run, its warm-up, and the stage pass, on an engine that only counts."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ddtree.bench.run import measure_stages, run, steps
from ddtree.bench.suite import Plan, Prompt
from ddtree.config import SamplingParams, Speculation
from ddtree.engine import Generation

PROMPTS = tuple(Prompt(f"code-{n}", "code", f"prompt {n}") for n in range(1, 5))
VARIANTS = {"ar": Speculation("ar"), "linear": Speculation("linear"), "tree": Speculation("tree")}
PLAN = Plan(PROMPTS, VARIANTS, SamplingParams(max_tokens=64, seed=1), repeat=2)


class CountingEngine:
    """Answers at once; every call is kept as (first prompt token, mode, max_tokens, timed)."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str, int | None, bool]] = []
        self.text = self
        self.plain = 0  # how often a plain engine was asked for

    def without_drafter(self) -> "CountingEngine":
        self.plain += 1
        return self

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [int(messages[0]["content"].split()[-1])]

    def generate(
        self, prompts: list[list[int]], params: list[SamplingParams], speculation: Speculation, observer: Any = None
    ) -> list[Generation]:
        self.calls.append((prompts[0][0], speculation.mode, params[0].max_tokens, observer is not None))
        stage: AbstractContextManager[Any] = observer.stage("verify") if observer else nullcontext()
        with stage, observer.stage("prefill") if observer else nullcontext():
            pass
        return [
            Generation(
                text="", token_ids=[1, 2, 3], finish_reason="length", mode=speculation.mode, rounds=2,
                acceptance_length=1.0, prompt_tokens=1, seconds=1.0, prefill_seconds=0.5, decode_seconds=0.5,
            )
        ]  # fmt: skip


def test_warm_up_then_modes_take_turns() -> None:
    engine = CountingEngine()
    samples = run(engine, PLAN)  # type: ignore[arg-type]  # a stand-in for the engine
    warm_up, measured = engine.calls[:3], engine.calls[3:]
    assert [(mode, tokens) for _, mode, tokens, _ in warm_up] == [("ar", 16), ("linear", 16), ("tree", 16)]
    assert len(measured) == len(samples) == 2 * 4 * 3
    assert {tokens for _, _, tokens, _ in measured} == {64}
    assert not any(timed for _, _, _, timed in measured), "stages are not timed in the main run"
    first_modes = [measured[start][1] for start in range(0, len(measured), 3)]
    assert first_modes == ["ar", "linear", "tree", "ar", "linear", "tree", "ar", "linear"]
    for start in range(0, len(measured), 3):
        group = measured[start : start + 3]
        assert len({prompt for prompt, *_ in group}) == 1, "one prompt after another"
        assert {mode for _, mode, _, _ in group} == set(VARIANTS)
    assert [(sample.variant, sample.prompt.id) for sample in samples] == [
        (mode, f"code-{prompt}") for prompt, mode, _, _ in measured
    ]


def test_stage_pass_is_short_and_timed_and_leaves_prefill_out() -> None:
    engine = CountingEngine()
    stages = measure_stages(engine, PLAN)  # type: ignore[arg-type]  # a stand-in for the engine
    assert {name: list(found) for name, found in stages.items()} == {name: ["verify"] for name in VARIANTS}
    assert all(timed and tokens == 32 for _, _, tokens, timed in engine.calls)
    assert len(engine.calls) == 3 * 3


def test_short_answers_stay_short() -> None:
    engine = CountingEngine()
    plan = Plan(PROMPTS, VARIANTS, SamplingParams(max_tokens=4))
    run(engine, plan)  # type: ignore[arg-type]  # a stand-in for the engine
    measure_stages(engine, plan)  # type: ignore[arg-type]  # a stand-in for the engine
    assert {tokens for _, _, tokens, _ in engine.calls} == {4}


def test_steps_counts_what_is_reported() -> None:
    counted: list[int] = []
    run(CountingEngine(), PLAN, lambda: counted.append(1))  # type: ignore[arg-type]  # a stand-in for the engine
    measure_stages(CountingEngine(), PLAN, lambda: counted.append(1))  # type: ignore[arg-type]  # a stand-in for the engine
    assert len(counted) == steps(PLAN)
