"""benchmarks/context.py and context_intervals.py: turns, limits, gains, over an engine that answers by a table."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddtree.config import SamplingParams, Speculation
from ddtree.engine import Generation

ROUNDS = {"off": 8, "branch": 4, "mix": 2}


class Table:
    """An engine whose rounds follow from the context: 8 decoded tokens of a second each round."""

    def __init__(self, fails_after: int = 10**9) -> None:
        self.text, self.asked, self._fails_after = SimpleNamespace(chat=lambda messages: [1]), [], fails_after

    def generate(self, ids: Any, params: list[SamplingParams], way: Speculation) -> list[Generation]:
        if len(self.asked) >= self._fails_after:
            raise RuntimeError("the card is gone")
        self.asked.append((way, params[0]))
        rounds = ROUNDS["off" if way.mode == "ar" else way.tree_context]
        return [
            Generation(
                text="", token_ids=[3] * 9, finish_reason="length", mode=way.mode, rounds=rounds,
                acceptance_length=8 / rounds, prompt_tokens=1, seconds=9.0, prefill_seconds=0.0,
                decode_seconds=float(rounds),
            )
        ]  # fmt: skip


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import context
    import context_intervals

    return SimpleNamespace(context=context, intervals=context_intervals)


def run(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, path: Path, engine: Table, *more: str
) -> dict[str, Any]:
    monkeypatch.setattr(scripts.context.Engine, "load", lambda config: engine)
    output = path / "out.json"
    monkeypatch.setattr(sys, "argv", ["context.py", "--budgets", "5", "--output", str(output), *more])
    scripts.context.main()
    return json.loads(output.read_text(encoding="utf-8"))


def test_a_report(scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = Table()
    report = run(scripts, monkeypatch, tmp_path, engine, "--per-category", "1", "--turns", "2", "--chain", "--ar")
    assert report["answers_of_each"] == 14
    assert report["failed"] is None
    assert len(engine.asked) == 14 * 2 * 7
    assert len({params.seed for _, params in engine.asked}) == 14
    assert [way.tree_context for way, _ in engine.asked[14:17]] == ["branch", "mix", "off"]  # they move on by one
    for found in report["temperatures"].values():
        assert set(found) == {f"{c}@{m}" for c in ROUNDS for m in ("5", "linear")} | {"ar"}
        assert found["mix@5"]["tok_s"] == 4.0
        assert found["mix@5"]["tok_s_gain"] == [3.0, 3.0, 3.0]
        assert found["branch@linear"]["acceptance_gain"] == [1.0, 1.0, 1.0]
        assert found["branch@linear"]["by_category"]["chat"]["tok_s_gain"] == [1.0, 1.0, 1.0]
        assert found["mix@5"]["over_ar"] == 4.0
        assert found["mix@5"]["answers_as_off"] == [14, 14]
        assert "tok_s_gain" not in found["off@5"]


def test_no_time(scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = run(scripts, monkeypatch, tmp_path, Table(), "--limit-s", "0")
    assert report["answers_of_each"] == 0
    assert report["temperatures"] == {"0": {}, "0.7": {}}


def test_what_was_done_before_a_failure_is_reported(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="1"):
        run(scripts, monkeypatch, tmp_path, Table(fails_after=6 * 3 + 4))
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert report["failed"] == "RuntimeError: the card is gone"
    assert report["answers_of_each"] == 3
    assert report["temperatures"]["0"]["mix@5"]["tok_s"] == 4.0


def test_gains_are_paired(scripts: SimpleNamespace) -> None:
    """Prompts differ much more than the ways do: what is drawn is the pair."""
    base = [(100.0, cost) for cost in (10.0, 100.0, 1000.0, 40.0)]
    value, low, high = scripts.intervals.gain([(made, cost / 1.25) for made, cost in base], base)
    assert (value, low, high) == (0.25, 0.25, 0.25)
    value, low, high = scripts.intervals.gain([(100.0, 8.0), (100.0, 100.0), (100.0, 900.0), (100.0, 60.0)], base)
    assert low < 0 < value < high
    assert scripts.intervals.gain([], []) == []
    assert scripts.intervals.rate([]) != scripts.intervals.rate([])  # nan
