"""Waiting for a server: refused, loading, ready, never ready."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ddtree.deploy import health


class Server(ThreadingHTTPServer):
    """Answers with the statuses of a list, the last one again and again."""

    statuses: list[int]
    asked = 0


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked += 1
        left = self.server.statuses
        self.send_response(left.pop(0) if len(left) > 1 else left[0])
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/health"


def test_it_waits_for_200(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # of no interest on the machine itself
    server.statuses = [503, 503, 200]
    assert health.wait(url(server), 20)
    assert server.asked == 3


def test_once_is_once(server: Server) -> None:
    server.statuses = [503, 200]
    assert not health.wait(url(server), 0)
    assert health.wait(url(server), 0)
    assert server.asked == 2


def test_something_else_than_http_is_not_healthy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert not health.wait(f"http://127.0.0.1:{listener.getsockname()[1]}/health", 0)
        thread.join(10)


def test_it_gives_up_in_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PAUSE_SECONDS", 0.05)
    server.statuses = [503]
    began = time.monotonic()
    assert not health.wait(url(server), 0.5)
    assert time.monotonic() - began < 5
    assert server.asked > 1
    assert not health.healthy("http://127.0.0.1:1/health")
    assert not health.healthy("no url")


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_as_systemd_and_containers_run_it(server: Server, status: int, code: int) -> None:
    server.statuses = [status]
    words = [sys.executable, "-m", "ddtree.deploy.health", url(server)]
    ran = subprocess.run([*words, "0"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == code
    assert ("did not answer with 200" in ran.stderr) == bool(code)
    assert subprocess.run(words[:3], capture_output=True, timeout=60).returncode == 2
    assert subprocess.run([*words, "soon"], capture_output=True, timeout=60).returncode == 2


def test_it_loads_nothing_heavy() -> None:
    """It runs once every few seconds in a container."""
    program = "import sys, ddtree.deploy.health; print([m for m in ('torch', 'typer', 'httpx') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60).stdout == "[]\n"
