"""`ddtree deploy`: what services are to be, and the files that they run from. Commands on live ones: `deploy_live`."""

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from ddtree.cli import deploy_live
from ddtree.errors import DDTreeError

CANNOT_TELL = 2

deploy = typer.Typer(
    name="deploy",
    help="Services from one TOML file, which docs/deploy.md shows: from its files to a rollout that can go back.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

File = Annotated[Path, typer.Argument(help="The deployment's TOML file.", metavar="FILE")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="A value over the file's, as mode=linear; may be repeated."),
]
Host = Annotated[
    str | None,
    typer.Option("--host", help="Which of the file's hosts this machine is. Default: the one that has its name."),
]
NO_DOCTOR = "Leave out what the doctor looks at: engine, model, drafter, cards."


@deploy.command()
def render(
    file: File,
    out: Annotated[Path, typer.Option("--out", help="A folder; it gets one of each host's name.", metavar="DIR")],
    overrides: Set = None,
) -> None:
    """Write units, environment files and the router's configuration, and show what differs from an older render.

    Files that were not rendered are never written over. Nothing is installed or started.
    """
    from ddtree.deploy import folder
    from ddtree.deploy.render import render as rendered
    from ddtree.deploy.spec import load

    files = rendered(load(file, overrides or ()))
    folder.refuse_foreign(out, files)
    before = folder.older(out, files)
    folder.write(out, files)
    changed = folder.difference(before, files) if before else ""
    if changed:
        typer.echo(changed)
    what = "the same as before" if before == files else "changed as shown" if before else "new"
    typer.echo(f"{out}: {len(files)} files, {what}", err=True)


@deploy.command()
def check(
    file: File,
    overrides: Set = None,
    host: Host = None,
    doctor: Annotated[bool, typer.Option("--doctor/--no-doctor", help=NO_DOCTOR)] = True,
) -> None:
    """Look for what would keep the services from starting on this machine. Writes, installs and starts nothing.

    Exit code 0: fine; 1: it would fail; 2: it could not be told, or an option is wrong.
    """
    from ddtree.deploy.check import check as look
    from ddtree.deploy.spec import load

    try:
        deployment = load(file, overrides or ())
        report = look(deployment, deployment.here(host), doctor=doctor)
    except DDTreeError as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(CANNOT_TELL) from error
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else 0
    coloured = terminal and "NO_COLOR" not in os.environ
    from ddtree.cli.doctor import in_colour, plain

    typer.echo(report.as_text(in_colour if coloured else plain, width))
    raise typer.Exit(report.exit_code)


deploy_live.add(deploy)
