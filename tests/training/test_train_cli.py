"""`ddtree train`: every option of every command reaches its room, and errors are one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from ddtree.cli import app
from ddtree.cli.train import train
from tiny_run import run_file

OPTIONS: dict[str, dict[str, list[str]]] = {
    "data": {
        "overrides": ["--set", "data.chats=3"],
        "max_minutes": ["--max-minutes", "2"],
        "worker": ["--worker", "1/3"],
        "check": ["--check"],
    },
    "fit": {
        "overrides": ["--set", "fit.steps=3"],
        "init": ["--init", "/some/drafter"],
        "stop_at": ["--stop-at", "5"],
        "max_minutes": ["--max-minutes", "2"],
    },
    "pair": {
        "overrides": ["--set", "pairwise.rank=3"],
        "drafter": ["--drafter", "last"],
        "output": ["--output", "somewhere"],
        "max_minutes": ["--max-minutes", "2"],
    },
    "eval": {
        "overrides": ["--set", "eval.top_k=3"],
        "drafter": ["--drafter", "last"],
        "prompts": ["--prompts", "suite"],
        "pairwise": ["--pairwise", "off"],
        "output": ["--output", "found.json"],
    },
    "export": {
        "overrides": ["--set", "folder=other"],
        "checkpoint": ["--checkpoint", "last"],
        "dtype": ["--dtype", "float32"],
    },
}
ARGUMENTS = {"config", "output"}
ROOMS = {
    "data": "ddtree.training.data.generate_data",
    "fit": "ddtree.training.fit.fit",
    "pair": "ddtree.training.pairwise.fit_pairwise",
    "eval": "ddtree.training.evaluate.evaluate",
    "export": "ddtree.training.export.export",
}


def call(*args: str) -> Result:
    return CliRunner().invoke(app, ["train", *args])


@pytest.fixture
def observe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    seen: list[Any] = []
    monkeypatch.chdir(tmp_path)
    for room in (*ROOMS.values(), "ddtree.training.data.check_data"):
        monkeypatch.setattr(room, lambda *args, **kwargs: seen.append((args, kwargs)) or {"done": 1})
    run_file(tmp_path / "run.toml", tmp_path)

    def run(command: str, *options: str) -> Any:
        seen.clear()
        ran = call(command, "run.toml", *(["out"] if command == "export" else []), *options)
        assert ran.exit_code == 0, ran.output
        assert json.loads(ran.stdout) == {"done": 1}
        return list(seen), sorted(path.name for path in tmp_path.iterdir())

    return run


@pytest.mark.parametrize(("command", "name"), [(c, n) for c in OPTIONS for n in OPTIONS[c]])
def test_no_option_is_accepted_and_ignored(observe: Any, command: str, name: str) -> None:
    assert observe(command) != observe(command, *OPTIONS[command][name])


def test_the_list_above_is_complete() -> None:
    commands = typer.main.get_command(train).commands  # type: ignore[attr-defined]  # a group has commands
    for command, found in commands.items():
        names = {p.name for p in found.params if p.name != "help" and p.param_type_name == "option"}
        assert names == set(OPTIONS[command]), command


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["data", "none.toml"], "error: none.toml does not exist"),
        (["fit", "run.toml", "--set", "fit.steps=0"], "error: fit.steps is 0: it must be at least 1"),
        (["fit", "run.toml", "--stop-at", "0"], "error: --stop-at must be at least 1"),
        (["data", "run.toml", "--max-minutes", "0"], "error: --max-minutes must be above 0"),
        (["data", "run.toml", "--worker", "3/3"], "error: --worker '3/3' is no part of a whole"),
        (["data", "run.toml", "--worker", "one"], "error: --worker 'one' is no part of a whole"),
        (["data", "run.toml", "--check", "--worker", "1/3"], "error: --check makes nothing"),
        (["fit", "run.toml"], "error: "),
        (["pair", "run.toml"], "error: "),
        (["pair", "run.toml", "--max-minutes", "0"], "error: --max-minutes must be above 0"),
        (["pair", "run.toml", "--set", "pairwise.gate=all"], "error: pairwise.gate 'all' is unknown"),
        (["eval", "run.toml"], "error: "),
        (["export", "run.toml", "out"], "error: "),
        (["export", "run.toml", "out", "--dtype", "int8"], "error: --dtype 'int8' is unknown"),
        (["export", "run.toml", "out", "--checkpoint", "first"], "error: checkpoint 'first' is unknown"),
    ],
    ids=" ".join,
)
def test_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_target: Path, args: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run_file(tmp_path / "run.toml", tiny_target)
    ran = call(*args)
    assert ran.exit_code == 1, ran.output
    assert ran.stderr.startswith(words), ran.stderr
    assert ran.stderr.count("\n") == 1


def test_all_five_in_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_target: Path) -> None:
    monkeypatch.chdir(tmp_path)
    run_file(tmp_path / "run.toml", tiny_target, fit={"steps": 2, "eval_every": 2})
    small = ["--set", "pairwise.steps=2", "--set", "pairwise.batch=2", "--set", "pairwise.anchors=4"]
    for args in (
        ["data", "run.toml"],
        ["fit", "run.toml", "--stop-at", "1"],
        ["fit", "run.toml"],
        ["pair", "run.toml", *small],
        ["eval", "run.toml", "--output", "found.json"],
        ["export", "run.toml", "drafter"],
    ):
        ran = call(*args)
        assert ran.exit_code == 0, ran.output
    found = json.loads((tmp_path / "found.json").read_text())["acceptance_length"]
    assert min(found["chain"], found["chain+pairwise"]) >= 1
    names = ["config.json", "model.safetensors", "pairwise.st"]
    assert sorted(path.name for path in (tmp_path / "drafter").iterdir()) == names
