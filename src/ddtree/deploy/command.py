"""The command of one replica: what `ddtree serve` is told."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddtree.deploy.spec import Deployment


def argv(deployment: "Deployment", port: int) -> list[str]:
    """The words, the interpreter first. `ddtree serve --engine sglang` becomes SGLang's own server."""
    d = deployment
    words = [d.python or sys.executable, "-m", "ddtree", "serve"]
    if d.engine == "sglang":
        words += ["--engine", "sglang"]
    words += ["--model", d.model, "--drafter", d.drafter, "--mode", d.mode, "--host", d.host, "--port", str(port)]
    if d.engine == "embedded":
        words += ["--shutdown-timeout", str(d.stop_seconds)]
        words += ["--device", "cuda" if d.gpus else "cpu"]  # a card that is gone ends the start, not its speed
    elif not named(d.args, TENSOR_PARALLEL):
        words += ["--tp-size", str(d.gpus_per_replica)]
    return [*words, *d.args]


TENSOR_PARALLEL = ("--tp-size", "--tensor-parallel-size", "--tp")
DATA_PARALLEL = ("--dp-size", "--data-parallel-size", "--dp")


def named(args: tuple[str, ...], flags: tuple[str, ...]) -> str | None:
    """The value that the last of `flags` has in `args`; None where none is there; "" where it has no value."""
    found = None
    for place, word in enumerate(args):
        flag, equals, value = word.partition("=")
        if flag in flags:
            found = value if equals else "".join(args[place + 1 : place + 2])
    return found
