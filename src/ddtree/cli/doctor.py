"""`ddtree doctor`: what to look at, and how it is shown. Exit codes: 0 fine, 1 would fail, 2 could not tell."""

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree.cli import options as opt
from ddtree.config import MODES, EngineConfig
from ddtree.errors import DDTreeError, InvalidOption

if TYPE_CHECKING:
    from ddtree.doctor import Asked, Facts, Tables

CANNOT_TELL = 2
LOAD = ("max_model_len", "max_running_requests", "max_tree_budget")
COLOURS = {"fine": "green", "fail": "red", "unknown": "yellow", "warn": "yellow"}
ENGINE = "What is to start: embedded (ddtree serve) or sglang."
MODE = f"How it is to decode, as for ddtree serve: {', '.join(MODES)}. Default: tree."
PORT = "The port to listen on; 0: a free one. Default: 30000."
ATTENTION = "The attention backend that SGLang is to get; default: its own choice."
GRAMMAR = "The grammar backend that SGLang is to get; default: its own choice."
AS_SERVE = "As for ddtree serve: contexts are counted with it."
RUNNING = f"{AS_SERVE} Default: {opt.ENGINE.max_running_requests}."
RULES = "A TOML file with rules and tables that go over those that ship."
RECORD = "Write what was seen to this file, so that it can be judged elsewhere."
REPLAY = "Judge a file that --record wrote, not this machine."


def doctor(
    engine: Annotated[str | None, typer.Option("--engine", help=f"{ENGINE} Default: embedded.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help=f"As for ddtree serve. Default: {opt.ENGINE.model}.")
    ] = None,
    drafter: Annotated[str | None, typer.Option("--drafter", help="As for ddtree serve. Default: auto.")] = None,
    mode: Annotated[str | None, typer.Option("--mode", help=MODE)] = None,
    port: Annotated[int | None, typer.Option("--port", help=PORT)] = None,
    attention_backend: Annotated[str | None, typer.Option("--attention-backend", help=ATTENTION)] = None,
    grammar_backend: Annotated[str | None, typer.Option("--grammar-backend", help=GRAMMAR)] = None,
    max_model_len: Annotated[int | None, typer.Option("--max-model-len", help=AS_SERVE)] = None,
    max_running_requests: Annotated[int | None, typer.Option("--max-running-requests", help=RUNNING)] = None,
    max_tree_budget: Annotated[int | None, typer.Option("--max-tree-budget", help=AS_SERVE)] = None,
    rules: Annotated[Path | None, typer.Option("--rules", help=RULES)] = None,
    record: Annotated[Path | None, typer.Option("--record", help=RECORD)] = None,
    replay: Annotated[Path | None, typer.Option("--replay", help=REPLAY)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with all that was seen.")] = False,
) -> None:
    """Look for what would keep an engine from starting here. Downloads, converts and starts nothing.

    Exit code 0: fine; 1: it would fail; 2: it could not be told, or an option is wrong.
    """
    from ddtree.doctor import judge, load, text
    from ddtree.doctor import record as records

    given = {
        "engine": engine, "model": model, "drafter": drafter, "mode": mode, "port": port,
        "attention_backend": attention_backend, "grammar_backend": grammar_backend,
        "max_model_len": max_model_len, "max_running_requests": max_running_requests,
        "max_tree_budget": max_tree_budget,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    try:
        tables = load(rules)
        if replay is None:
            facts = _look(_asked(given), tables)
        else:
            _refuse_beside_replay([*given, *(["record"] if record else [])])
            facts = records.read(replay)
        if record is not None:
            records.write(facts, record)
        diagnosis = judge(facts, tables)
    except DDTreeError as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(CANNOT_TELL) from error
    if as_json:
        typer.echo(json.dumps(text.as_json(facts, diagnosis)))
    else:
        terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if terminal else 0
        coloured = terminal and "NO_COLOR" not in os.environ
        typer.echo(text.as_text(facts, diagnosis, in_colour if coloured else plain, width))
    raise typer.Exit(diagnosis.exit_code)


def _asked(given: Mapping[str, object]) -> "Asked":
    """What is asked for, checked. Raises InvalidOption."""
    from ddtree.doctor import ENGINES, Asked

    asked = Asked(**given)  # type: ignore[arg-type]  # each is of its option's type
    if asked.engine not in ENGINES:
        raise InvalidOption(f"--engine {asked.engine!r} is unknown: choose one of {', '.join(ENGINES)}", param="engine")
    if asked.mode not in MODES:
        raise InvalidOption(f"--mode {asked.mode!r} is unknown: choose one of {', '.join(MODES)}", param="mode")
    if not 0 <= asked.port <= 65535:
        raise InvalidOption(f"--port must be from 0 to 65535, not {asked.port}", param="port")
    for name in ("attention_backend", "grammar_backend"):
        if asked.engine == "embedded" and getattr(asked, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise InvalidOption(f"{option} is SGLang's: leave it out, or add --engine sglang", param=name)
    _check_load(asked, given)
    return asked


def _check_load(asked: "Asked", given: Mapping[str, object]) -> None:
    """Raises InvalidOption for a size that serve refuses, and for those of an engine that plans by itself."""
    sizes = {name: getattr(asked, name) for name in LOAD if name in given}
    if asked.engine == "sglang" and sizes:
        option = f"--{next(iter(sizes)).replace('_', '-')}"
        raise InvalidOption(f"{option} is the embedded engine's: leave it out, SGLang plans its memory by itself")
    try:
        EngineConfig(**sizes)
    except InvalidOption as error:
        words = str(error).replace(str(error.param), f"--{str(error.param).replace('_', '-')}", 1)
        raise InvalidOption(words, param=error.param) from error


def _refuse_beside_replay(names: list[str]) -> None:
    if names:
        option = f"--{names[0].replace('_', '-')}"
        raise InvalidOption(f"{option} cannot go with --replay, which holds what was asked and seen: leave it out")


def _look(asked: "Asked", tables: "Tables") -> "Facts":
    from ddtree.doctor.probe import probe

    if sys.stderr.isatty():
        typer.echo("looking at this machine; imports are tried one by one, which takes up to a minute ...", err=True)
    return probe(asked, tables.sonames(asked.engine))


def plain(text: str, level: str) -> str:
    return text


def in_colour(text: str, level: str) -> str:
    return typer.style(text, fg=COLOURS[level], bold=True)
