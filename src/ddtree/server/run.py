"""Listening: the socket, the signals, the line that says the server is ready, and a stop that nothing holds up."""

import asyncio
import errno
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import uvicorn

from ddtree.errors import InvalidOption, PortInUse
from ddtree.server.app import create_app
from ddtree.server.logs import log_to_stderr
from ddtree.server.options import ServerOptions
from ddtree.server.worker import EngineWorker

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ddtree.engine import Engine

LAST_WORDS_SECONDS = 1.0  # for an answer that was cut to reach its client
KEEP_ALIVE_SECONDS = 10  # above the 5 s after which httpx, so OpenAI's client too, drops an idle connection itself
HEAD_SECONDS = 30.0  # for the head of a request, from the connection's begin or the answer before


def check_port(host: str, port: int) -> None:
    """Raises what `serve` would raise for this address, so that nobody waits for a model in vain."""
    listen(host, port).close()


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one.

    Raises `PortInUse` when the address is taken, `InvalidOption` when it cannot be listened on at all.
    """
    if not 0 <= port <= 65535:
        raise InvalidOption(f"port must be from 0 to 65535, not {port}", param="port")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise InvalidOption(f"host {host!r} is no address of this machine: {error}", param="host") from error
    # A name such as localhost may stand for both kinds of address: most clients try the older one first.
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    sock = socket.socket(family, kind, protocol)
    try:
        if sys.platform != "win32":  # there it would let two servers share a port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen()
    except OSError as error:
        sock.close()
        where = f"{host}:{port}"
        if error.errno == errno.EADDRINUSE:
            message = f"{where} is already in use: stop what listens there, or choose another --port"
            raise PortInUse(message, param="port") from error
        message = f"cannot listen on {where}: {error.strerror}; choose another --host or --port"
        raise InvalidOption(message, param="port" if error.errno == errno.EACCES else "host") from error
    return sock


class Server(uvicorn.Server):
    """uvicorn's server with a ready line, and with a stop that lets answers end, but not for ever.

    A stop has two parts. While running answers end, it still listens: new requests learn with 503 when to come back,
    and `/health` tells balancers to send none. Then it closes.
    """

    def __init__(self, app: "FastAPI", options: ServerOptions, ready: str = "") -> None:
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="on", timeout_keep_alive=KEEP_ALIVE_SECONDS
        )
        super().__init__(config)
        self._worker: EngineWorker = app.state.worker
        self._seconds = options.shutdown_timeout
        self._ready = ready
        self._headless: dict[Any, tuple[Any, float]] = {}  # by connection: its last request, and since when it waits
        self._draining: asyncio.Task[None] | None = None
        self.stop_asked = False  # set by `serve`'s signal handlers; seen within a tenth of a second

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to `serve`: uvicorn raises them again once it has stopped, which ends in a traceback."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept, then says so."""
        await super().startup(sockets)
        if self._ready and not self.should_exit:
            print(self._ready, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops to accept; what still runs ends within the time for it."""
        self._drain()
        ending = asyncio.create_task(self._end_answers())
        await super().shutdown(sockets)
        await ending

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second. Once a second it also drops connections that send no whole head."""
        if counter % 10 == 0:
            self._drop_headless(time.monotonic())
        if self.stop_asked:
            self.should_exit |= self._drain().done()
        return await super().on_tick(counter)

    def _drain(self) -> "asyncio.Task[None]":
        """Lets the worker take nothing more; done when nothing runs. Says so, once."""
        if self._draining is None:
            left = self._worker.busy
            answers = f"{left} running answer" + ("s" if left > 1 else "")
            busy = f": {answers} may take up to {self._seconds:g} s (Ctrl-C again ends at once)" if left else ""
            print(f"stopping{busy}", file=sys.stderr, flush=True)
            self._draining = asyncio.create_task(self._worker.stop(self._seconds))
            # It may be done at once: then the first tick ends the server.
        return self._draining

    def _drop_headless(self, now: float) -> None:
        """uvicorn's keep-alive ends with the first byte, so half a head would hold its connection for ever."""
        waiting = {}
        for connection in list(self.server_state.connections):
            cycle = getattr(connection, "cycle", None)  # uvicorn's name of a request and its answer
            if cycle is None or cycle.response_complete:
                last, since = self._headless.get(connection, (cycle, now))
                waiting[connection] = (cycle, since if last is cycle else now)
                if now - waiting[connection][1] > HEAD_SECONDS:
                    connection.transport.abort()
        self._headless = waiting

    async def _end_answers(self) -> None:
        await self._drain()
        for _ in range(10):
            if not self.server_state.connections:
                return
            await asyncio.sleep(LAST_WORDS_SECONDS / 10)
        for connection in list(self.server_state.connections):  # clients that read nothing, or never ended a request
            connection.transport.abort()


def serve(engine: "Engine", host: str, port: int, options: ServerOptions) -> None:
    """Serves until SIGINT or SIGTERM, in the main thread. Prints one line when ready, and one (to stderr) at a stop.

    A stop lets running answers go on for `options.shutdown_timeout`, then cuts them; a second SIGINT ends at once.
    A server that a signal stopped does not come back: it ends the process with code 0. Raises as `listen` does.
    """
    sock = listen(host, port)
    log_to_stderr(options.log_level)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{sock.getsockname()[1]}/v1"
    info = engine.info()
    how = f"mode {engine.speculation.mode}, {info['dtype']} on {info['device']}"
    ready = f"ddtree ready: {address} (model {options.name}, {how})"
    app = create_app(engine, options)
    server = Server(app, options, ready)
    with sock, _stop_on_signals(server) as stopped_by:
        server.run(sockets=[sock])
        if stopped_by or app.state.worker.busy:
            # Everything is closed. The interpreter's own end takes a second or more after torch, and would abort
            # on a thread inside native code: a prefill cannot be cut.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


@contextmanager
def _stop_on_signals(server: Server) -> Iterator[list[int]]:
    """SIGINT and SIGTERM stop the server, a second SIGINT ends the process at once. Gives the signals that came."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def stop(number: int, _: Any) -> None:
        if came and number == signal.SIGINT:
            os._exit(128 + number)  # as a shell tells the death by this signal
        came.append(number)
        server.stop_asked = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
