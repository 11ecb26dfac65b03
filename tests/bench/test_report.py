"""The figures, worked out by hand from a few samples."""

from typing import Any

import pytest

from ddtree.bench.report import cpu_name, make_report
from ddtree.bench.run import Sample
from ddtree.bench.suite import Plan, Prompt
from ddtree.bench.tables import format_report, format_table
from ddtree.config import SamplingParams, Speculation
from ddtree.engine import Generation, Shadow

CODE, CHAT = Prompt("code-1", "code", "write"), Prompt("chat-1", "chat", "talk")
INFO = {"model": "m", "drafter": None, "device": "cpu", "dtype": "float32", "threads": 2, "versions": {}}
BASE = Speculation()


def sample(
    prompt: Prompt,
    variant: str,
    ids: list[int],
    rounds: int,
    seconds: float,
    accepted: float | None,
    shadow: Shadow | None = None,
) -> Sample:
    generation = Generation(
        text="", token_ids=ids, finish_reason="length", mode=variant, rounds=rounds, acceptance_length=accepted,
        prompt_tokens=3, seconds=seconds + 0.5, prefill_seconds=0.5, decode_seconds=seconds, stages={},
        shadow=shadow,
    )  # fmt: skip
    return Sample(prompt, variant, generation)


def report_of(samples: list[Sample], **info: Any) -> dict[str, Any]:
    names = list(dict.fromkeys(one.variant for one in samples))
    prompts = tuple(dict.fromkeys(one.prompt for one in samples))
    plan = Plan(prompts, {name: Speculation(name) for name in names}, SamplingParams(max_tokens=8, seed=0))
    return make_report(samples, {}, plan, BASE, INFO | info)


AR = [sample(CODE, "ar", [1, 2, 3, 4, 5], 4, 4.0, 1.0), sample(CHAT, "ar", [1, 2, 3], 2, 1.0, 1.0)]
TREE = [sample(CODE, "tree", [1, 2, 3, 4, 5], 1, 1.0, 4.0), sample(CHAT, "tree", [1, 2, 3], 2, 2.0, 1.0)]


def test_pooled_and_median_figures() -> None:
    tree = report_of(AR + TREE)["modes"]["tree"]
    assert tree["tok_s"] == 2.0, "4 + 2 tokens after prefill in 3 seconds"
    assert tree["acceptance_length"] == 2.0, "(4 * 1 + 1 * 2) / 3 rounds, not the mean of 4 and 1"
    assert tree["ms_per_round"] == 1000.0
    assert (tree["tokens"], tree["rounds"], tree["prompts"], tree["prefill_ms"]) == (8, 3, 2, 500.0)
    assert tree["tok_s_by_category"] == {"code": 4.0, "chat": 1.0}
    assert tree["speedup"] == pytest.approx(2.0 / 1.2, abs=1e-4)
    assert tree["speedup_median"] == pytest.approx((4.0 + 0.5) / 2)


def test_repeats_are_pooled_by_prompt() -> None:
    again = [sample(CODE, "tree", [1, 2, 3, 4, 5], 1, 3.0, 4.0)]
    twice = report_of([AR[0], AR[0], TREE[0], *again])["modes"]["tree"]
    assert (twice["prompts"], twice["ms_per_round"], twice["matches_ar"]) == (1, 2000.0, 1)
    other = [sample(CODE, "tree", [9, 2, 3, 4, 5], 1, 3.0, 4.0)]
    assert report_of([AR[0], AR[0], TREE[0], *other])["modes"]["tree"]["matches_ar"] == 0, "every repeat must match"


@pytest.mark.parametrize("dtype", ["float32", "torch.float32"])
def test_one_other_token_is_red_in_float32(dtype: str) -> None:
    report = report_of([*AR, TREE[0], sample(CHAT, "tree", [1, 2, 9], 2, 2.0, 1.0)], dtype=dtype)
    assert report["parity"] == "red"
    assert report["modes"]["tree"]["matches_ar"] == 1
    assert report["modes"]["tree"]["mismatches"] == ["chat-1"]
    assert {figures["speedup"] for figures in report["modes"].values()} == {None}
    text = format_report(report)
    assert "RED. In float32 answers of tree differ from ar's" in text
    assert "1/2" in text


def test_a_length_that_differs_is_a_difference() -> None:
    report = report_of([AR[0], sample(CODE, "tree", [1, 2, 3, 4], 1, 1.0, 4.0)], dtype="bfloat16")
    assert (report["parity"], report["modes"]["tree"]["matches_ar"]) == ("differs", 0)
    assert report["modes"]["tree"]["speedup"] is not None
    assert "near-ties may flip" in format_report(report)


def test_shadow_is_pooled_and_set_against_linear() -> None:
    linear = [sample(CODE, "linear", [1, 2, 3, 4, 5], 2, 2.0, 2.0), sample(CHAT, "linear", [1, 2, 3], 1, 1.0, 2.0)]
    shadow = [
        sample(CODE, "shadow-linear", [1, 2, 3, 4, 5], 2, 2.2, 2.0, Shadow(2.0, 3.0, True, None)),
        sample(CHAT, "shadow-linear", [1, 2, 3], 1, 1.4, 2.0, Shadow(2.0, None, None, None)),
    ]
    found = report_of(linear + shadow)["modes"]["shadow-linear"]["shadow"]
    assert found == {
        "linear_acceptance_length": 2.0, "tree_acceptance_length": 3.0, "agree": True, "overhead": pytest.approx(1.25),
    }  # fmt: skip
    assert report_of(shadow)["modes"]["shadow-linear"]["shadow"]["overhead"] is None
    assert "shadow" not in report_of(linear + shadow)["modes"]["linear"]


def test_answers_of_one_token_have_no_speed() -> None:
    report = report_of([sample(CODE, "ar", [1], 0, 0.0, None), sample(CODE, "tree", [1], 0, 0.0, None)])
    for figures in report["modes"].values():
        assert [figures[key] for key in ("tok_s", "acceptance_length", "ms_per_round", "speedup")] == [None] * 4
        assert figures["matches_ar"] == 1
    assert "-" in format_report(report)


def test_settings_are_kept_beside_the_figures() -> None:
    report = report_of(AR)
    assert report["cpu"] == cpu_name() != ""
    assert (report["tree_budget"], report["tree_top_k"], report["tree_spine"]) == (Speculation().tree_budget, 8, 0)
    assert report["model"] == "m"
    assert report["date"].endswith("+00:00")


def test_table_columns_line_up() -> None:
    assert format_table(["name", "x"], [["a", "1.0"], ["long name", "10.0"]]).splitlines() == [
        "name          x",
        "a           1.0",
        "long name  10.0",
    ]
