"""The start of SGLang servers: side by side on one GPU each, one after another on several; and what they wait for."""

import time
from collections.abc import Sequence
from pathlib import Path

from sglang_servers import Server, Settings, start, words_of

TOLD_S = 20  # between two lines about a server that is not up
COMPILERS = ("nvcc", "cicc", "ptxas", "cc1plus", "ninja")


def bring_up(names: Sequence[str], settings: Settings, most: float, flashinfer: float) -> list[Server]:
    """All of them, those that came up and those that did not.

    Args:
        most, flashinfer: seconds that a server may take; the second for those that use FlashInfer.
    """
    several = [name for name in names if words_of(name, settings)[1] > 1]
    servers: list[Server] = []
    try:
        servers += start([name for name in names if name not in several], settings)
        wait(servers, most, flashinfer)
        for name in several:
            servers += start([name], settings)
            wait(servers[-1:], most, flashinfer)
    except BaseException:
        for server in servers:
            server.stop()
        raise
    return servers


def wait(servers: Sequence[Server], most: float, flashinfer: float) -> list[Server]:
    """Those that come up in time; each is told as it comes up or fails, and what the others wait for."""
    waiting, told = list(servers), time.monotonic()
    while waiting:
        for server in list(waiting):
            seconds = time.monotonic() - server.started
            if server.process.poll() is not None:
                server.fail(f"ended with code {server.process.returncode} after {seconds:.0f} s")
            elif server.healthy():
                server.up_s = round(seconds, 1)
                print(f"{server.name}: up after {seconds:.0f} s", flush=True)
            elif seconds > (flashinfer if server.flashinfer else most) or time.monotonic() > server.settings.end:
                reason = f"not up after {seconds:.0f} s, {doing(server)}"
                server.trace()
                server.fail(reason)
            else:
                continue
            waiting.remove(server)
        if waiting and time.monotonic() - told > TOLD_S:
            told = time.monotonic()
            for server in waiting:
                print(f"{server.name}: not up after {told - server.started:.0f} s, {doing(server)}", flush=True)
        time.sleep(0.3)
    return [server for server in servers if server.problem is None]


def doing(server: Server) -> str:
    """Which compilers run for a server, and the last line of its log."""
    lines = [line for line in server.log.read_text(errors="replace").splitlines() if line.strip()]
    running = sorted({name for name in programs(server.process.pid) if name in COMPILERS})
    compiling = f"compiling ({', '.join(running)})" if running else "no compiler runs"
    return f"{compiling}, last line: {lines[-1][-160:] if lines else ''}"


def programs(session: int) -> list[str]:
    """Names of the programs that run in a session (Linux)."""
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, rest = place.read_text(errors="replace").rpartition(")")
        except OSError:  # it ended
            continue
        if int(rest.split()[3]) == session:
            found.append(head.partition("(")[2])
    return found
