"""The commands on live services pass on what they are given: no option is accepted and ignored."""

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ddtree.cli.app import app
from ddtree.deploy import commands
from fakes import make

RUN = CliRunner()
COMMON = {
    "sets": ["--set", "mode=tree"],
    "host": ["--host", "gpu-1"],
    "manager": ["--manager", "processes"],
    "as_json": ["--json"],
}
WAITS = {"yes": ["--yes"], "start_seconds": ["--start-seconds", "7"], "drain_seconds": ["--drain-seconds", "7"]}
OPTIONS: dict[str, dict[str, list[str]]] = {
    "apply": COMMON | WAITS | {"dry_run": ["--dry-run"]},
    "rollout": COMMON | WAITS | {
        "dry_run": ["--dry-run"],
        "min_speed": ["--min-speed", "0.5"],
        "min_acceptance": ["--min-acceptance", "0.5"],
        "prompts": ["--prompts", "3"],
        "max_tokens": ["--max-tokens", "3"],
        "beside_port": ["--beside-port", "3"],
        "shadow_first": ["--shadow-first"],
        "min_gain": ["--shadow-first", "--min-gain", "2"],
        "shadow_seconds": ["--shadow-first", "--shadow-seconds", "2"],
    },
    "rollback": COMMON | WAITS,
    "remove": COMMON | {"yes": ["--yes"], "keep": ["--keep", "logs"]},
}  # fmt: skip


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs a command and returns what the room got of it, its answer to a question, and the output."""
    path = str(make(tmp_path).path)

    def run(command: str, *words: str) -> Any:
        got: list[Any] = []

        def take(asked: commands.Asked, *args: Any) -> commands.Outcome:
            try:
                agreed: Any = asked.agree("this?")
            except Exception as error:  # there is no terminal
                agreed = type(error).__name__
            got.append((asked.path, asked.sets, asked.host, asked.manager, asked.start_s, asked.drain_s, agreed, args))
            return commands.Outcome(True, 1)

        monkeypatch.setattr(commands, command, take)
        done = RUN.invoke(app, ["deploy", command, path, *words])
        assert done.exit_code == 0, done.output
        return got, done.stdout

    return run


@pytest.mark.parametrize(("command", "name"), [(command, name) for command in OPTIONS for name in OPTIONS[command]])
def test_no_option_is_accepted_and_ignored(seen: Any, command: str, name: str) -> None:
    words = OPTIONS[command][name]
    base = ["--shadow-first"] if "--shadow-first" in words and name != "shadow_first" else []
    assert seen(command, *base) != seen(command, *words)


def test_the_list_above_is_complete() -> None:
    group = typer.main.get_command(app).commands["deploy"].commands  # type: ignore[attr-defined]
    for command, options in OPTIONS.items():
        assert {param.name for param in group[command].params if param.name != "help"} == {*options, "file"}
    assert set(group) == {*OPTIONS, "render", "check", "status"}
