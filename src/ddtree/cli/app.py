"""`ddtree`: the application, its version flag, and the one place where errors become a line and an exit code."""

import errno
import io
import os
import re
import sys
from typing import Annotated

import typer
from typer.core import TyperGroup

from ddtree import __version__
from ddtree.cli import commands
from ddtree.cli.deploy import deploy
from ddtree.cli.doctor import doctor
from ddtree.cli.interrupts import INTERRUPTED
from ddtree.cli.serve import serve
from ddtree.cli.serve_sglang import NAME, chosen, serve_sglang
from ddtree.cli.train import train
from ddtree.errors import DDTreeError
from ddtree.threads import share_cores

LONG_FIELDS = (
    "max_tokens", "max_model_len", "tree_budget", "tree_top_k", "tree_spine", "tree_context", "max_tree_budget",
    "max_running_requests", "prefill_chunk", "prefix_caching", "cuda_graphs", "draft_dtype", "draft_vocab",
    "draft_pairwise", "served_model_name", "api_key", "reasoning_parser", "tool_call_parser", "max_queue",
    "max_body_mib", "shutdown_timeout", "log_level", "per_request_spec_decode_metrics",
)  # fmt: skip
LONG_NAMES = re.compile(rf"\b({'|'.join(LONG_FIELDS)})\b")
RENAMED = {"prefill_chunk": "chunked_prefill_size"}  # fields whose options bear the names of other servers
SHORT_FIELDS = "model drafter mode modes budgets device dtype numerics seed temperature limit repeat output host port"
OPTIONS = frozenset((*SHORT_FIELDS.split(), *LONG_FIELDS))
OUTPUT_LOST = (errno.ENOSPC, errno.EIO)


def _one_line(error: DDTreeError) -> str:
    """The message on one line, with field names spelled as the options that the user typed.

    A short name such as `mode` is an ordinary word too: it is spelled so only where the message begins with it.
    """
    text = " ".join(str(error).split())
    if error.param in OPTIONS and text.startswith(f"{error.param} "):
        text = _spelled(error.param) + text[len(error.param) :]
    return LONG_NAMES.sub(lambda found: _spelled(found[0]), text)


def _spelled(field: str) -> str:
    return f"--{RENAMED.get(field, field).replace('_', '-')}"


class Commands(TyperGroup):
    """A group whose commands may raise `DDTreeError` and be interrupted, and never show a traceback for either."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # as below
        """`serve --engine sglang` has other options, and passes on those that it does not know."""
        return super().parse_args(ctx, chosen(args) or args)

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]  # the context class is click's or typer's own
        try:
            return super().invoke(ctx)
        except DDTreeError as error:
            typer.echo(f"error: {_one_line(error)}", err=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(INTERRUPTED) from error
        except OSError as error:
            if error.errno not in OUTPUT_LOST:
                raise
            typer.echo(f"error: the output could not be written: {error.strerror}", err=True)
            raise typer.Exit(1) from error


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ddtree {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="ddtree",
    cls=Commands,
    help="Lossless speculative decoding with DFlash drafters and draft trees.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain text: one line stays one line in a log
    pretty_exceptions_enable=False,
)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Options before the command's name; `--version` ends in its callback."""


app.command()(serve)
app.command(NAME, hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(
    serve_sglang
)
app.command()(commands.generate)
app.command()(commands.smoke)
app.command()(commands.bench)
app.command()(commands.models)
app.command()(doctor)
app.add_typer(train)
app.add_typer(deploy)


def main() -> None:
    """The console script: as `app`, and a character that the terminal cannot show never ends the program."""
    share_cores()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller closed it: what would be printed has nowhere to go
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app()
    except KeyboardInterrupt:  # between commands: while arguments are read
        sys.exit(INTERRUPTED)
