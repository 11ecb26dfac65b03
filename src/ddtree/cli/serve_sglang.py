"""`ddtree serve --engine sglang`: SGLang itself with the plug-in, by the options that both servers have."""

import os
import shlex
from collections.abc import Sequence
from typing import Annotated

import typer

from ddtree.cli import options as opt
from ddtree.config import EMBEDDED
from ddtree.errors import InvalidOption

NAME = "serve-sglang"  # the hidden command that `serve --engine sglang` becomes
BUDGET = "Nodes of a tree, without its root."
TOP_K = "Candidate tokens for each depth of a tree."
PRINT = "Print the command instead of running it."
LOOK = "Look at the machine before the start, as ddtree doctor does, and refuse where it would fail."


def chosen(args: Sequence[str]) -> list[str] | None:
    """The words of the hidden command, where `args` are those of `serve --engine sglang`; else None."""
    if not args or args[0] != "serve":
        return None
    rest = list(args[1:])
    for place, word in enumerate(rest):
        if word == "--engine" and rest[place + 1 : place + 2] == ["sglang"]:
            return [NAME, *rest[:place], *rest[place + 2 :]]
        if word == "--engine=sglang":
            return [NAME, *rest[:place], *rest[place + 1 :]]
    return None


def serve_sglang(
    context: typer.Context,
    model: opt.Model = opt.ENGINE.model,
    drafter: opt.Drafter = opt.ENGINE.drafter,
    mode: opt.Mode = "tree",
    tree_budget: Annotated[int, typer.Option("--tree-budget", help=BUDGET)] = 31,
    tree_top_k: Annotated[int, typer.Option("--tree-top-k", help=TOP_K)] = 8,
    draft_pairwise: opt.DraftPairwise = opt.ENGINE.draft_pairwise,
    max_model_len: opt.MaxModelLen = opt.ENGINE.max_model_len,
    print_command: Annotated[bool, typer.Option("--print-command", help=PRINT)] = False,
    doctor: Annotated[bool, typer.Option("--doctor/--no-doctor", help=LOOK)] = True,
) -> None:
    """Serve the model by SGLang with DDTREE (serve --engine sglang). Any other option goes to SGLang as it is."""
    from ddtree.models import resolve_drafter, resolve_model
    from ddtree.sglang import launch

    launch.check()
    ours = model == EMBEDDED or model.endswith(".gguf")  # SGLang finds folders and hub ids itself
    target = str(resolve_model(model)) if ours else model
    found: str | None = drafter
    if mode == "ar" or drafter == "none":
        found = None
    elif drafter == "auto":
        found = str(resolve_drafter(drafter, model))
    wanted = launch.Launch(target, found, mode, tree_budget, tree_top_k, max_model_len, draft_pairwise)
    words = launch.command(wanted, _card(), context.args, launch.installed_grammars())
    if print_command:
        typer.echo(shlex.join(words))
        return
    if doctor:
        _look(words, model, "none" if found is None else drafter, mode)
    os.execv(words[0], words)


def _look(words: Sequence[str], model: str, drafter: str, mode: str) -> None:
    """Say what would keep the command from working, or may. Exit code 1 where it would not start."""
    from ddtree.doctor import Asked, judge, load, text
    from ddtree.doctor.probe import probe
    from ddtree.sglang.launch import value

    port = value(words, "--port") or "30000"
    if not port.isdecimal() or int(port) > 65535:
        raise InvalidOption(f"--port must be from 0 to 65535, not {port}", param="port")
    backends = (value(words, "--attention-backend"), value(words, "--grammar-backend"))
    asked = Asked("sglang", model, drafter, int(port), *backends, mode)
    tables = load(None)
    facts = probe(asked, tables.sonames(asked.engine))
    diagnosis = judge(facts, tables)
    if diagnosis.findings:
        typer.echo(text.as_text(facts, diagnosis), err=True)
    if diagnosis.verdict == "would fail":
        typer.echo("error: it would not start (--no-doctor tries it all the same)", err=True)
        raise typer.Exit(1)


def _card() -> tuple[int, int]:
    """Compute capability of the first GPU."""
    import torch

    if not torch.cuda.is_available():
        raise InvalidOption("--engine sglang needs a GPU that torch can use, and there is none: leave --engine out")
    return torch.cuda.get_device_capability()
