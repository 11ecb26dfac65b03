"""`ddtree train`: the steps that make a drafter for a target of one's own."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ddtree.cli.interrupts import interrupts_end_at_once
from ddtree.errors import InvalidOption

train = typer.Typer(
    name="train",
    help="Make a DFlash drafter for a model: data, fit, pair, eval, export. docs/training.md shows the file.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Config = Annotated[Path, typer.Argument(help="The run's TOML file.", metavar="CONFIG")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="A value over the file's, as fit.steps=100; may be given several times."
    ),
]
MaxMinutes = Annotated[
    float | None, typer.Option("--max-minutes", help="End in good order after so many; the same command goes on.")
]

Drafter = Annotated[
    str, typer.Option("--drafter", help="best or last, the run's checkpoints; or a z-lab folder, a name, a hub id.")
]


@train.command()
def data(
    config: Config,
    overrides: Set = None,
    max_minutes: MaxMinutes = None,
    worker: Annotated[
        str,
        typer.Option("--worker", metavar="I/N", help="One of N that write into one folder at once, from 0/N to N-1/N."),
    ] = "0/1",
    check: Annotated[
        bool, typer.Option("--check", help="Make nothing: read every shard that is there, count.")
    ] = False,
) -> None:
    """Let the target answer prompts of many kinds. A run that was ended goes on behind its last whole shard."""
    _check_minutes(max_minutes)
    chosen = _worker(worker)
    if check and (worker != "0/1" or max_minutes is not None):
        raise InvalidOption("--check makes nothing, so it takes neither --worker nor --max-minutes")
    with interrupts_end_at_once():
        from ddtree.training.config import read
        from ddtree.training.data import check_data, generate_data

    found = read(config, overrides or ())
    if check:
        _tell(check_data(found))
        return
    _tell(generate_data(found, max_minutes=max_minutes, quiet=not sys.stderr.isatty(), worker=chosen))


@train.command()
def fit(
    config: Config,
    overrides: Set = None,
    init: Annotated[
        str | None, typer.Option("--init", help="A z-lab folder, a name or a hub id to begin with; as drafter.init.")
    ] = None,
    stop_at: Annotated[
        int | None, typer.Option("--stop-at", help="End at this step; the schedule stays that of fit.steps.")
    ] = None,
    max_minutes: MaxMinutes = None,
) -> None:
    """Train the drafter, or go on at the last checkpoint, exactly."""
    _check_minutes(max_minutes)
    if stop_at is not None and stop_at < 1:
        raise InvalidOption(f"--stop-at must be at least 1, not {stop_at}")
    with interrupts_end_at_once():
        from ddtree.training.config import read
        from ddtree.training.fit import fit as train_drafter

    given = [*(overrides or ()), *([f"drafter.init={json.dumps(init)}"] if init is not None else [])]
    _tell(train_drafter(read(config, given), stop_at=stop_at, max_minutes=max_minutes, quiet=not sys.stderr.isatty()))


@train.command()
def pair(
    config: Config,
    overrides: Set = None,
    drafter: Drafter = "best",
    output: Annotated[
        Path | None,
        typer.Option("--output", help="A folder that gets the head, such as the drafter's; default: the run's own."),
    ] = None,
    max_minutes: MaxMinutes = None,
) -> None:
    """Fit a pairwise head (what follows each candidate) to a drafter that stays as it is, or go on with it."""
    _check_minutes(max_minutes)
    with interrupts_end_at_once():
        from ddtree.training.config import read
        from ddtree.training.pairwise import fit_pairwise

    found = read(config, overrides or ())
    _tell(fit_pairwise(found, drafter, output, max_minutes=max_minutes, quiet=not sys.stderr.isatty()))


@train.command("eval")
def evaluate(
    config: Config,
    overrides: Set = None,
    drafter: Drafter = "best",
    prompts: Annotated[
        str, typer.Option("--prompts", help="heldout, suite (that of ddtree bench), or a JSONL file of prompts.")
    ] = "heldout",
    pairwise: Annotated[
        str,
        typer.Option(
            "--pairwise", help="auto: with the pairwise head beside the drafter, or the run's own; off; or a folder."
        ),
    ] = "auto",
    output: Annotated[Path | None, typer.Option("--output", help="Write the JSON there as well.")] = None,
) -> None:
    """Acceptance length of chain and trees by category, ranks and calibration by depth; one JSON object."""
    with interrupts_end_at_once():
        from ddtree.training.config import read
        from ddtree.training.evaluate import evaluate as measure_drafter

    chosen = read(config, overrides or ())
    found = measure_drafter(chosen, drafter, prompts, quiet=not sys.stderr.isatty(), pairwise=pairwise)
    if output is not None:
        try:
            output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidOption(f"--output {output} cannot be written ({error}): name another file") from error
    _tell(found)


@train.command()
def export(
    config: Config,
    output: Annotated[
        Path, typer.Argument(help="A new folder for config.json and model.safetensors.", metavar="FOLDER")
    ],
    overrides: Set = None,
    checkpoint: Annotated[str, typer.Option("--checkpoint", help="best (on held-out chats) or last.")] = "best",
    dtype: Annotated[str, typer.Option("--dtype", help="Of the weights: bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Write the drafter in z-lab's format, which SGLang, vLLM and --drafter take."""
    with interrupts_end_at_once():
        from ddtree.training.config import read
        from ddtree.training.export import export as write_drafter

    _tell(write_drafter(read(config, overrides or ()), output, checkpoint, dtype))


def _worker(text: str) -> tuple[int, int]:
    own, _, count = text.partition("/")
    if not (own.isdecimal() and count.isdecimal() and int(own) < int(count)):
        raise InvalidOption(f"--worker {text!r} is no part of a whole: write I/N, with I from 0 to N-1, as 0/3")
    return int(own), int(count)


def _check_minutes(minutes: float | None) -> None:
    if minutes is not None and not minutes > 0:
        raise InvalidOption(f"--max-minutes must be above 0, not {minutes}")


def _tell(result: dict[str, Any]) -> None:
    typer.echo(json.dumps(result))
