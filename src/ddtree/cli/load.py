"""Loading an engine from a command."""

import sys
from typing import TYPE_CHECKING

import typer

from ddtree.cli.interrupts import interrupts_end_at_once
from ddtree.config import EngineConfig

if TYPE_CHECKING:
    from ddtree.engine import Engine


def load_engine(config: EngineConfig, *, warm: bool = False) -> "Engine":
    """The engine of a command; a terminal is told what takes so long. Raises as `Engine.load` does.

    warm: its first request shall not wait for what can be done before.
    """
    with interrupts_end_at_once():
        from ddtree.engine import Engine

    if sys.stderr.isatty():
        typer.echo(f"loading {config.model} ...", err=True)
    engine = Engine.load(config)
    if warm:
        engine.warm_up()
    return engine
