"""`ddtree deploy` on live services: arguments, questions to the user, and what is printed."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree.errors import InvalidOption

if TYPE_CHECKING:
    from ddtree.deploy.commands import Asked, Outcome

MANAGER = "Who runs the services: systemd, or processes (for machines without it); auto: systemd where it answers."
DRAIN = "Seconds for a replica's requests to end once the router sends it no new ones."
START = "Seconds until a replica must be healthy. Default: the file's start_seconds."
SPEED = "Tokens per second that a new replica must reach, as a share of the old one's; 0: no limit."
ACCEPTANCE = "Tokens a round that it must reach, as a share of the old one's; 0: no limit."
BESIDE = "Replace a lone replica without a gap: a second one stands in on this port, where memory allows."
SHADOW = "Run the trees as shadow-linear on one replica first, and go on only where parity and gain are shown."
GAIN = "With --shadow-first: tokens a round of the tree that are needed, over those of the chain."
WATCH = "With --shadow-first: seconds of live traffic to count; 0: prompts of the suite instead."
KEEP = "Leave generations or logs in the folder; may be given twice."

FileArgument = Annotated[Path, typer.Argument(help="The deployment's TOML file.", metavar="FILE")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="A value over the file's, as mode=linear.")
]
Host = Annotated[
    str | None, typer.Option("--host", help="Which of the file's hosts this machine is. Default: by its name.")
]
ManagerOption = Annotated[str, typer.Option("--manager", help=MANAGER)]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the difference and what would be done; change nothing.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object; all else goes to standard error.")]
DrainSeconds = Annotated[float, typer.Option("--drain-seconds", help=DRAIN)]
StartSeconds = Annotated[float | None, typer.Option("--start-seconds", help=START)]


def add(app: typer.Typer) -> None:
    """Adds the commands on live services to the group `ddtree deploy`."""
    for command in (apply, status, rollout, rollback, remove):
        app.command()(command)


def apply(
    file: FileArgument,
    sets: Set = None,
    host: Host = None,
    manager: ManagerOption = "auto",
    yes: Yes = False,
    dry_run: DryRun = False,
    start_seconds: StartSeconds = None,
    drain_seconds: DrainSeconds = 300.0,
    as_json: Json = False,
) -> None:
    """Bring this host's services to what the file says: start what is new, restart what changed, drop what is gone."""
    from ddtree.deploy import commands

    asked = _asked(file, sets, host, manager, yes or dry_run, as_json, start_seconds, drain_seconds)
    with _log_on_its_lines():
        _end(commands.apply(asked, dry_run), as_json)


def status(
    file: FileArgument, sets: Set = None, host: Host = None, manager: ManagerOption = "auto", as_json: Json = False
) -> None:
    """Show what each replica does. Exit code 1 where one is not well, or a command was interrupted."""
    from ddtree.deploy import commands
    from ddtree.deploy import status as room
    from ddtree.deploy.draft import draft

    asked = _asked(file, sets, host, manager, True, as_json, None, 1.0)
    with _log_on_its_lines():
        found = room.look(commands.open_site(asked, draft(asked.path, asked.sets, asked.host)[0]))
    typer.echo(json.dumps(found) if as_json else room.as_text(found))
    if not found["well"]:
        raise typer.Exit(1)


def rollout(
    file: FileArgument,
    sets: Set = None,
    host: Host = None,
    manager: ManagerOption = "auto",
    yes: Yes = False,
    dry_run: DryRun = False,
    start_seconds: StartSeconds = None,
    drain_seconds: DrainSeconds = 300.0,
    min_speed: Annotated[float, typer.Option("--min-speed", help=SPEED)] = 0.8,
    min_acceptance: Annotated[float, typer.Option("--min-acceptance", help=ACCEPTANCE)] = 0.8,
    prompts: Annotated[int, typer.Option("--prompts", help="Prompts of the suite that are compared.")] = 4,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens of each compared answer.")] = 48,
    beside_port: Annotated[int | None, typer.Option("--beside-port", help=BESIDE)] = None,
    shadow_first: Annotated[bool, typer.Option("--shadow-first", help=SHADOW)] = False,
    min_gain: Annotated[float | None, typer.Option("--min-gain", help=f"{GAIN} Default: 1.")] = None,
    shadow_seconds: Annotated[float | None, typer.Option("--shadow-seconds", help=f"{WATCH} Default: 0.")] = None,
    as_json: Json = False,
) -> None:
    """Replace replica by replica, each compared with the old one; at the first failure all touched go back."""
    from ddtree.deploy import commands
    from ddtree.deploy.compare import Limits
    from ddtree.deploy.trial import Trial

    if not shadow_first and (min_gain is not None or shadow_seconds is not None):
        raise InvalidOption("--min-gain and --shadow-seconds go with --shadow-first: add it, or leave them out")
    if beside_port is not None and not 1 <= beside_port <= 65535:
        raise InvalidOption(f"--beside-port must be from 1 to 65535, not {beside_port}")
    asked = _asked(file, sets, host, manager, yes or dry_run, as_json, start_seconds, drain_seconds)
    limits = Limits(min_speed, min_acceptance, prompts, max_tokens)
    trial = Trial(1.0 if min_gain is None else min_gain, shadow_seconds or 0.0) if shadow_first else None
    with _log_on_its_lines():
        _end(commands.rollout(asked, limits, dry_run, beside_port, trial), as_json)


def rollback(
    file: FileArgument,
    sets: Set = None,
    host: Host = None,
    manager: ManagerOption = "auto",
    yes: Yes = False,
    start_seconds: StartSeconds = None,
    drain_seconds: DrainSeconds = 300.0,
    as_json: Json = False,
) -> None:
    """Undo an interrupted command, or go back to the previous generation, replica by replica."""
    from ddtree.deploy import commands

    asked = _asked(file, sets, host, manager, yes, as_json, start_seconds, drain_seconds)
    with _log_on_its_lines():
        _end(commands.rollback(asked), as_json)


def remove(
    file: FileArgument,
    sets: Set = None,
    host: Host = None,
    manager: ManagerOption = "auto",
    yes: Yes = False,
    keep: Annotated[list[str] | None, typer.Option("--keep", help=KEEP)] = None,
    as_json: Json = False,
) -> None:
    """Stop the services of this host and remove what deploy made, logs included."""
    from ddtree.deploy import commands

    asked = _asked(file, sets, host, manager, yes, as_json, None, 300.0)
    with _log_on_its_lines():
        _end(commands.remove(asked, keep or ()), as_json)


def _asked(
    file: Path,
    sets: list[str] | None,
    host: str | None,
    manager: str,
    yes: bool,
    as_json: bool,
    start_seconds: float | None,
    drain_seconds: float,
) -> "Asked":
    from ddtree.deploy.commands import Asked

    for name, value in (("start", start_seconds), ("drain", drain_seconds)):
        if value is not None and not 0 < value <= 7 * 86400:
            raise InvalidOption(f"--{name}-seconds must be above 0 and at most a week, not {value:g}")
    tell = _tell_aside if as_json else typer.echo
    return Asked(file, tuple(sets or ()), host, manager, start_seconds, drain_seconds, tell, _agree(yes, as_json))


def _agree(yes: bool, as_json: bool) -> Callable[[str], bool]:
    """Asks on the terminal; where there is none, nothing is changed without --yes."""

    def agree(question: str) -> bool:
        if yes:
            return True
        if sys.stdin is None or not sys.stdin.isatty():
            raise InvalidOption(f"{question} There is no terminal to ask on: add --yes")
        return typer.confirm(question, err=as_json)

    return agree


@contextmanager
def _log_on_its_lines() -> Iterator[None]:
    """An error that quotes a service's log keeps its lines; one of a file names it; Ctrl-C says how to go on."""
    from ddtree.deploy.failures import DeployFailed

    try:
        yield
    except DeployFailed as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    except OSError as error:
        if error.filename is None:  # of the output, say
            raise
        typer.echo(f"error: {error.filename}: {error.strerror}; run this as who may, or make room", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        typer.echo("interrupted: the same command goes on from here, ddtree deploy rollback undoes it", err=True)
        raise


def _tell_aside(line: str) -> None:
    typer.echo(line, err=True)


def _end(outcome: "Outcome", as_json: bool) -> None:
    if as_json:
        told: dict[str, Any] = {"changed": outcome.changed, "generation": outcome.generation, **outcome.figures}
        typer.echo(json.dumps(told))
