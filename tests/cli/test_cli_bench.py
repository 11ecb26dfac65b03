"""`ddtree bench` on the scripted engine: its document, its exit codes, its refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_engine import ANSWER, Command, FakeEngine, Ran

from ddtree.config import MODES, Speculation

TOP_KEYS = {
    "modes", "model", "drafter", "device", "dtype", "threads", "versions", "cpu", "date", "max_tokens", "temperature",
    "seed", "tree_budget", "tree_top_k", "tree_spine", "tree_context", "prompts", "repeat", "parity",
}  # fmt: skip
MODE_KEYS = {
    "tok_s", "acceptance_length", "ms_per_round", "prefill_ms", "tokens", "rounds", "prompts", "tok_s_by_category",
    "speedup", "speedup_median", "matches_ar", "mismatches", "stages_ms",
}  # fmt: skip
SHADOW_KEYS = {"linear_acceptance_length", "tree_acceptance_length", "agree", "overhead"}


def last_line(ran: Ran) -> Any:
    return json.loads(ran.out.splitlines()[-1])


def test_document_contract(ddtree: Command, engines: list[FakeEngine]) -> None:
    ran = ddtree("bench", "--limit", "7", "--max-tokens", "20")
    assert ran.code == 0
    report = last_line(ran)
    assert set(report) >= TOP_KEYS
    assert list(report["modes"]) == list(MODES)
    for name, figures in report["modes"].items():
        assert set(figures) == (MODE_KEYS | {"shadow"} if name == "shadow-linear" else MODE_KEYS)
        assert figures["prompts"] == figures["matches_ar"] == 7
        assert figures["tokens"] == 7 * 20
        assert set(figures["tok_s_by_category"]) == {
            "code", "json", "maths", "chat", "summary", "rewriting", "extraction",
        }  # fmt: skip
        assert list(figures["stages_ms"]) == ["verify"]
    assert set(report["modes"]["shadow-linear"]["shadow"]) == SHADOW_KEYS
    assert report["modes"]["ar"]["speedup"] == 1.0
    assert report["modes"]["tree"]["acceptance_length"] == 3.0
    assert report["modes"]["linear"]["tok_s"] == pytest.approx(19 / (10 * 0.012), abs=0.01)
    assert report["modes"]["linear"]["ms_per_round"] == pytest.approx(12)
    assert report["modes"]["shadow-linear"]["shadow"]["overhead"] == pytest.approx(15 / 12, abs=1e-3)
    assert report["parity"] == "equal"
    assert (report["max_tokens"], report["temperature"], report["seed"], report["prompts"]) == (20, 0.0, 0, 7)


def test_table_comes_before_the_document(ddtree: Command, engines: list[FakeEngine]) -> None:
    ran = ddtree("bench", "--limit", "1", "--max-tokens", "8")
    for word in (*MODES, "tok/s", "speed-up", "ms/round", "verify", "a tree from the same roots", "parity: every mode"):
        assert word in ran.out
    assert "bench: 100%" in ran.err, "progress is shown on standard error"


def test_budgets_are_modes_of_their_own(ddtree: Command, engines: list[FakeEngine]) -> None:
    report = last_line(ddtree("bench", "--limit", "1", "--modes", "ar", "--budgets", "7, 31", "--tree-top-k", "4"))
    assert list(report["modes"]) == ["ar", "tree@7", "tree@31"]
    used = {
        (speculation.mode, speculation.tree_budget, speculation.tree_top_k) for _, _, speculation, _ in engines[0].calls
    }
    assert used == {("ar", Speculation().tree_budget, 4), ("tree", 7, 4), ("tree", 31, 4)}
    assert engines[0].config.speculation.tree_budget == 7, "loaded for a mode that drafts"
    assert engines[0].config.largest_budget == 64
    assert ddtree("bench", "--limit", "1", "--modes", "ar", "--budgets", "7,200").code == 0
    assert engines[1].config.largest_budget == 200, "room for every budget that is measured"
    assert engines[1].config.max_running_requests == 1, "answers come one after another"


@pytest.mark.parametrize(("device", "settled"), [("cpu", (5, 8)), ("cuda", (15, 16))])
def test_the_report_names_the_numbers_that_the_device_was_given(
    ddtree: Command, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, device: str, settled: tuple[int, int]
) -> None:
    monkeypatch.setattr(FakeEngine, "device", device)
    report = last_line(ddtree("bench", "--limit", "1", "--modes", "ar,tree"))
    assert (report["tree_budget"], report["tree_top_k"], report["tree_spine"]) == (*settled, 0)
    assert "speculation" not in report, "the engine's own mode is not the report's"
    report = last_line(ddtree("bench", "--limit", "1", "--modes", "ar", "--tree-budget", "5"))
    assert (report["tree_budget"], report["tree_top_k"]) == (5, settled[1]), "a number that was given stays"


def test_ar_alone_needs_no_drafter(ddtree: Command, engines: list[FakeEngine]) -> None:
    assert ddtree("bench", "--limit", "1", "--modes", "ar", "--drafter", "none").code == 0
    assert engines[0].config.speculation.mode == "ar"


def test_red_parity_hides_speed_ups_and_fails(
    ddtree: Command, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "answers", {"tree": ANSWER.replace("says", "sayz")})
    ran = ddtree("bench", "--limit", "2")
    assert ran.code == 1
    report = last_line(ran)
    assert report["parity"] == "red"
    assert report["modes"]["tree"]["matches_ar"] == 0
    assert report["modes"]["tree"]["mismatches"] == ["code-1", "json-1"]
    assert report["modes"]["linear"]["matches_ar"] == 2
    assert all(figures["speedup"] is None and figures["speedup_median"] is None for figures in report["modes"].values())
    assert "RED" in ran.out
    assert "Traceback" not in ran.err


def test_a_tree_that_disagrees_in_shadow_is_red_too(
    ddtree: Command, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "agree", False)
    ran = ddtree("bench", "--limit", "1", "--modes", "linear,shadow-linear")
    assert (ran.code, last_line(ran)["parity"]) == (1, "red")


def test_in_16_bits_near_ties_are_counted_only(
    ddtree: Command, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "answers", {"tree": ANSWER.replace("says", "sayz")})
    ran = ddtree("bench", "--limit", "2", "--dtype", "bfloat16")
    assert (ran.code, last_line(ran)["parity"]) == (0, "differs")
    assert last_line(ran)["modes"]["tree"]["speedup"] > 1
    assert "0/2" in ran.out


def test_without_ar_there_is_no_speed_up(ddtree: Command, engines: list[FakeEngine]) -> None:
    report = last_line(ddtree("bench", "--limit", "1", "--modes", "shadow-linear"))
    figures = report["modes"]["shadow-linear"]
    assert [figures[key] for key in ("speedup", "speedup_median", "matches_ar", "mismatches")] == [None] * 4
    assert figures["shadow"]["overhead"] is None, "linear did not run"
    assert report["parity"] is None


def test_output_file_holds_the_same_document(ddtree: Command, engines: list[FakeEngine], tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    ran = ddtree("bench", "--limit", "1", "--modes", "ar", "--output", str(target))
    assert json.loads(target.read_text(encoding="utf-8")) == last_line(ran)
    assert target.read_text(encoding="utf-8").count("\n") > 10


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--modes", "ar,magic"], ["--modes", "'magic'", "shadow-linear"]),
        (["--modes", ""], ["--modes", "''"]),
        (["--modes", "ar,"], ["--modes", "''"]),
        (["--budgets", "7,x"], ["--budgets", "'x'", "7,15,31"]),
        (["--budgets", ""], ["--budgets", "''"]),
        (["--budgets", "7,10000"], ["--tree-budget", "10000"]),
        (["--tree-budget", "0"], ["--tree-budget", "not 0"]),
        (["--limit", "0"], ["--limit", "not 0"]),
        (["--limit", "1000"], ["--limit", "not 1000"]),
        (["--repeat", "0"], ["--repeat", "not 0"]),
        (["--max-tokens", "0"], ["--max-tokens", "not 0"]),
        (["--output", "/no/such/folder/report.json"], ["--output", "/no/such/folder/report.json"]),
    ],
)
def test_bad_values(ddtree: Command, engines: list[FakeEngine], args: list[str], words: list[str]) -> None:
    ran = ddtree("bench", *args)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    assert all(word in ran.err for word in words), ran.err
    assert not engines


def test_an_engine_error_in_the_run(ddtree: Command, engines: list[FakeEngine]) -> None:
    ran = ddtree("bench", "--limit", "1", "--max-model-len", "8")
    assert ran.code == 1
    assert "error: the prompt has" in ran.err
    assert "Traceback" not in ran.err
