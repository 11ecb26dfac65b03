"""`ddtree doctor`: exit codes, what is refused, recordings, and this very machine."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Command

from ddtree.doctor.children import Outcome
from ddtree.doctor.facts import Asked, Checkpoint, Port
from ddtree.doctor.probe import probe
from ddtree.doctor.record import read, write
from machines import cpu, gpu, sglang, with_card


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the probe was asked; the machine is a healthy one without GPUs."""
    seen: list[Any] = []
    monkeypatch.setattr("ddtree.doctor.probe.probe", lambda *args: seen.append(args) or replace(cpu(), asked=args[0]))
    return seen


def test_defaults_are_those_of_serve(ddtree: Command, asked: list[Any]) -> None:
    ran = ddtree("doctor")
    assert (ran.code, ran.err) == (0, "")
    assert asked == [(Asked("embedded", "smollm2-135m", "auto", 30000), ["libgomp.so.1"])]
    assert ran.out.startswith("fine: ")
    assert "\x1b" not in ran.out


def test_everything_is_passed_on(ddtree: Command, asked: list[Any]) -> None:
    args = [
        "--engine",
        "sglang",
        "--model",
        "m",
        "--drafter",
        "none",
        "--mode",
        "ar",
        "--port",
        "1",
        "--attention-backend",
        "a",
        "--grammar-backend",
        "g",
    ]
    ran = ddtree("doctor", *args)
    assert asked[0][0] == Asked("sglang", "m", "none", 1, "a", "g", "ar")
    assert ran.code == 1, "SGLang is not installed on that machine"


def test_sizes_are_counted_as_serve_would(ddtree: Command, asked: list[Any]) -> None:
    sizes = ["--max-running-requests", "1024", "--max-model-len", "8000", "--max-tree-budget", "7"]
    ran = ddtree("doctor", *sizes)
    assert asked[0][0] == Asked(max_model_len=8000, max_running_requests=1024, max_tree_budget=7)
    assert ran.code == 1
    assert "FAIL  weights and contexts do not fit the memory\n      seen  at least 182." in ran.out
    assert "target context: 1025 slots of 8023 positions" in ran.out
    assert "      mend  lower --max-running-requests to " in ran.out
    assert ddtree("doctor", "--max-running-requests", "600").code == 0


@pytest.mark.parametrize(
    ("facts", "code", "verdict"),
    [
        (cpu(), 0, "fine"),
        (with_card(gpu(count=2), 1, mig=True), 0, "fine"),
        (replace(cpu(), port=Port(80, False, "taken")), 1, "would fail"),
        (replace(cpu(), drafter=Checkpoint("org/drafter", "to fetch")), 2, "could not tell"),
    ],
)
def test_the_exit_code_is_the_verdict(ddtree: Command, tmp_path: Path, facts: Any, code: int, verdict: str) -> None:
    write(facts, tmp_path / "machine.json")
    ran = ddtree("doctor", "--replay", str(tmp_path / "machine.json"))
    assert ran.code == code
    assert ran.out.startswith(f"{verdict}: ")
    as_json = ddtree("doctor", "--replay", str(tmp_path / "machine.json"), "--json")
    assert as_json.code == code
    value = json.loads(as_json.out)
    assert (value["verdict"], value["exit_code"]) == (verdict, code)
    assert as_json.out.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--engine", "vllm"], "--engine 'vllm' is unknown: choose one of embedded, sglang"),
        (["--mode", "fast"], "--mode 'fast' is unknown: choose one of ar, linear, shadow-linear, tree"),
        (["--port", "65536"], "--port must be from 0 to 65535"),
        (["--port", "-1"], "--port must be from 0 to 65535"),
        (["--attention-backend", "triton"], "--attention-backend is SGLang's"),
        (["--grammar-backend", "none"], "--grammar-backend is SGLang's"),
        (["--max-running-requests", "0"], "--max-running-requests must be from 1 to 1024, not 0"),
        (["--max-model-len", "1"], "--max-model-len must be at least 2, not 1"),
        (["--max-tree-budget", "1025"], "--max-tree-budget must be from 1 to 1024, not 1025"),
        (["--engine", "sglang", "--max-model-len", "9"], "--max-model-len is the embedded engine's: leave it out"),
        (["--replay", "x.json", "--max-model-len", "9"], "--max-model-len cannot go with --replay"),
        (["--rules", "not-there.toml"], "--rules 'not-there.toml' cannot be read"),
        (["--replay", "not-there.json"], "--replay 'not-there.json' cannot be read"),
        (["--replay", "x.json", "--model", "m"], "--model cannot go with --replay"),
        (["--replay", "x.json", "--mode", "ar"], "--mode cannot go with --replay"),
        (["--replay", "x.json", "--grammar-backend", "none"], "--grammar-backend cannot go with --replay"),
        (["--replay", "x.json", "--record", "y.json"], "--record cannot go with --replay"),
        (["--record", "/not/there/x.json"], "--record '/not/there/x.json' was not written"),
    ],
)
def test_what_is_refused_ends_with_2(ddtree: Command, asked: list[Any], args: list[str], words: str) -> None:
    ran = ddtree("doctor", *args)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: {words}"), ran.err


def test_a_recording_of_this_call_judges_alike(ddtree: Command, asked: list[Any], tmp_path: Path) -> None:
    path = str(tmp_path / "machine.json")
    first = ddtree("doctor", "--port", "40000", "--record", path)
    assert read(Path(path)).asked.port == 40000
    assert ddtree("doctor", "--replay", path).out == first.out


def test_rules_of_ones_own_can_forbid(ddtree: Command, tmp_path: Path) -> None:
    write(sglang(), tmp_path / "machine.json")
    (tmp_path / "own.toml").write_text(
        '[[rule]]\nid = "own"\nlevel = "fail"\nwhen = [["packages.sglang", "version", "<0.5.22"]]\n'
        'what = "we run 0.5.22"\nseen = "{packages.sglang}"\nmend = "pip install sglang==0.5.22"\n'
    )
    args = ["doctor", "--replay", str(tmp_path / "machine.json"), "--rules", str(tmp_path / "own.toml")]
    ran = ddtree(*args)
    assert ran.code == 1
    assert "FAIL  we run 0.5.22\n      seen  0.5.17\n      mend  pip install" in ran.out


def test_plain_decoding_needs_no_drafter(ddtree: Command, asked: list[Any]) -> None:
    ran = ddtree("doctor", "--drafter", "none")
    assert ran.code == 1
    assert "seen  mode tree needs a drafter: load one with --drafter, or use mode ar\n" in ran.out
    assert ddtree("doctor", "--drafter", "none", "--mode", "ar").code == 0


@pytest.mark.parametrize(("mode", "drafter"), [("tree", "auto"), ("ar", "none")])
def test_plain_decoding_looks_for_no_drafter(mode: str, drafter: str) -> None:
    """`ddtree serve --model FOLDER --mode ar` loads none, whether one is known for the model or not."""
    work: list[Any] = []

    def run(arguments: Any, seconds: float) -> Outcome:
        work.append(arguments)
        return Outcome(None, "", None, False, 0)

    probe(Asked(mode=mode), [], run)
    assert ["models", "smollm2-135m", drafter, "embedded"] in work


@pytest.mark.full
@pytest.mark.usefixtures("embedded_model")
def test_this_machine_is_fine() -> None:
    """No false alarm where the tests run: whatever is here, the embedded engine runs here."""
    command = [sys.executable, "-m", "ddtree", "doctor", "--port", "0", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    value = json.loads(ran.stdout)
    assert [finding for finding in value["findings"] if finding["level"] != "warn"] == []
    assert (ran.returncode, value["verdict"], ran.stderr) == (0, "fine", "")
    facts = value["facts"]
    assert {entry["module"]: entry["ok"] for entry in facts["imports"]} == {"torch": True, "ddtree.engine": True}
    assert facts["model"]["state"] == "here"
    assert facts["drafter"]["misfit"] is None
    if not facts["gpus"]:
        assert value["not_looked_at"][0]["what"] == "GPUs"
