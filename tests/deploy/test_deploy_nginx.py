"""nginx itself with the rendered configuration, in front of small servers that do as they are told."""

import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from a_deployment import made
from ddtree.deploy.nginx import config
from ddtree.deploy.spec import RouterPart
from fakes import free_ports

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not here: apt-get install nginx-light")
FLOOD = 256 << 20
BODY = {"messages": [{"role": "user", "content": "x"}]}


class Upstream(ThreadingHTTPServer):
    """A server that counts what it gets. `does`: answer, refuse (503), die (closes without a word), stream or flood."""

    daemon_threads = True

    def __init__(self) -> None:
        self.does, self.posts, self.gets, self.go_on = "answer", 0, 0, threading.Event()
        self.sent = 0  # bytes of a flood
        super().__init__(("127.0.0.1", 0), Handler)
        self.port = int(self.server_address[1])
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Upstream

    def do_GET(self) -> None:
        self.server.gets += 1
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posts += 1
        self._answer()

    def _answer(self) -> None:
        match self.server.does:
            case "die":
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
            case "stream":
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"5\r\nfirst\r\n")
                self.wfile.flush()
                self.server.go_on.wait(20)
                self.wfile.write(b"4\r\nlast\r\n0\r\n\r\n")
            case "flood":
                self.send_response(200)
                self.send_header("Content-Length", str(FLOOD))
                self.end_headers()
                with contextlib.suppress(OSError):  # the client leaves
                    while self.server.sent < FLOOD:
                        self.server.sent += self.wfile.write(b"x" * (1 << 16))
            case does:
                body = json.dumps({"port": self.server.port, "path": self.path}).encode()
                self.send_response(503 if does == "refuse" else 200)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Retry-After", "7")
                self.end_headers()
                self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def upstreams() -> Iterator[list[Upstream]]:
    servers = [Upstream(), Upstream()]
    yield servers
    for server in servers:
        server.go_on.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def prefix() -> Iterator[Path]:
    """A folder that nginx's workers may use too, where root starts it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def router(upstreams: list[Upstream], prefix: Path) -> Iterator[Callable[..., httpx.Client]]:
    """Starts nginx as the unit does, with the two replicas' ports exchanged for those of the servers."""
    running: list[subprocess.Popen[bytes]] = []
    clients: list[httpx.Client] = []

    def start(down: tuple[str, ...] = ()) -> httpx.Client:
        port = free_ports(1)
        text = config(made(router=RouterPart(port=port)), "localhost", down)
        for number, server in zip((30001, 30002), upstreams, strict=True):
            assert f"127.0.0.1:{number} " in text
            text = text.replace(f"127.0.0.1:{number} ", f"127.0.0.1:{server.port} ")
        (prefix / "chat.conf").write_text(text)
        words = [str(NGINX), "-e", "stderr", "-p", f"{prefix}/", "-c", str(prefix / "chat.conf")]
        checked = subprocess.run([*words, "-t"], capture_output=True, text=True, timeout=20)
        assert checked.returncode == 0, checked.stderr
        assert "warn" not in checked.stderr
        with (prefix / "log").open("wb") as log:
            running.append(subprocess.Popen(words, stderr=log))
        clients.append(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False))
        for _ in range(100):
            try:
                clients[-1].get("/nothing")
                return clients[-1]
            except httpx.ConnectError:
                time.sleep(0.1)
        raise AssertionError("nginx does not listen")

    yield start
    for client in clients:
        client.close()
    for process in running:
        process.terminate()
        process.wait(20)


def test_both_replicas_get_requests(router: Callable[..., httpx.Client], upstreams: list[Upstream]) -> None:
    client = router()
    answers = [client.post("/v1/chat/completions", json=BODY) for _ in range(8)]
    assert {answer.status_code for answer in answers} == {200}
    assert answers[0].json()["path"] == "/v1/chat/completions"
    assert [server.posts for server in upstreams] == [4, 4]


def test_a_stream_passes_while_it_runs(router: Callable[..., httpx.Client], upstreams: list[Upstream]) -> None:
    client = router()
    for server in upstreams:
        server.does = "stream"
    with client.stream("POST", "/v1/completions", json=BODY) as answer:
        pieces = answer.iter_raw()
        assert next(pieces) == b"first", "buffered, it would come with the last"
        for server in upstreams:
            server.go_on.set()
        assert b"".join(pieces) == b"last"


def test_a_replica_that_stops_costs_no_request(router: Callable[..., httpx.Client], upstreams: list[Upstream]) -> None:
    client = router()
    upstreams[0].does = "refuse"
    answers = [client.post("/v1/chat/completions", json=BODY) for _ in range(10)]
    assert {(answer.status_code, answer.json()["port"]) for answer in answers} == {(200, upstreams[1].port)}
    assert upstreams[1].posts == 10
    assert upstreams[0].posts >= 1, "it was asked, and refused"
    assert client.get("/health").status_code == 200


def test_a_replica_that_stops_is_the_idlest(router: Callable[..., httpx.Client], upstreams: list[Upstream]) -> None:
    """So a second try may go there again."""
    client = router()
    upstreams[1].does = "stream"
    with contextlib.ExitStack() as streams:
        while not upstreams[1].posts:
            streams.enter_context(client.stream("POST", "/v1/completions", json=BODY))
        upstreams[0].does, upstreams[1].does = "refuse", "answer"
        answers = [client.post("/v1/completions", json=BODY) for _ in range(3)]
        assert {(answer.status_code, answer.json()["port"]) for answer in answers} == {(200, upstreams[1].port)}
        upstreams[1].go_on.set()


def test_a_client_that_does_not_read_holds_the_replica_back(
    router: Callable[..., httpx.Client], upstreams: list[Upstream]
) -> None:
    """Buffered, the answer would go to memory and files."""
    client = router()
    for server in upstreams:
        server.does = "flood"
    with client.stream("POST", "/v1/completions", json=BODY):
        before = -1
        while before != (now := sum(server.sent for server in upstreams)):
            before = now
            time.sleep(0.5)
    assert 0 < now < FLOOD // 2


def test_a_replica_that_is_gone_costs_no_request(
    router: Callable[..., httpx.Client], upstreams: list[Upstream]
) -> None:
    client = router()
    upstreams[0].shutdown()
    upstreams[0].server_close()
    answers = [client.post("/v1/chat/completions", json=BODY) for _ in range(10)]
    assert {answer.status_code for answer in answers} == {200}
    assert upstreams[1].posts == 10


def test_what_may_be_running_is_not_begun_again(router: Callable[..., httpx.Client], upstreams: list[Upstream]) -> None:
    client = router()
    for server in upstreams:
        server.does = "die"
    answer = client.post("/v1/chat/completions", json=BODY)
    assert sum(server.posts for server in upstreams) == 1, "a request that ends a replica must not end them all"
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_replica"
    assert answer.headers["Retry-After"] == "5"


def test_all_refuse_says_so_in_their_words(router: Callable[..., httpx.Client], upstreams: list[Upstream]) -> None:
    client = router()
    for server in upstreams:
        server.does = "refuse"
    answer = client.post("/v1/chat/completions", json=BODY)
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] in ("5", "7")
    assert sum(server.posts for server in upstreams) <= 3
    assert client.get("/health").status_code == 503


def test_a_replica_can_be_left_out(router: Callable[..., httpx.Client], upstreams: list[Upstream]) -> None:
    client = router(down=("chat-1",))
    for _ in range(4):
        assert client.post("/v1/chat/completions", json=BODY).status_code == 200
    assert [server.posts for server in upstreams] == [4, 0]


def test_routes_of_one_replica_are_not_passed_on(
    router: Callable[..., httpx.Client], upstreams: list[Upstream]
) -> None:
    client = router()
    for path in ("/metrics", "/server_info", "/", "/v2/models"):
        assert client.get(path).status_code == 404
    assert client.get("/metrics").json()["error"]["code"] == "not_found"
    assert client.post("/reset_prefix_cache").status_code == 404
    assert client.get("/v1/models").status_code == 200
    assert [server.posts for server in upstreams] == [0, 0]


def test_large_bodies_end_at_the_limit(
    router: Callable[..., httpx.Client], upstreams: list[Upstream], prefix: Path
) -> None:
    client = router()
    assert client.post("/v1/completions", content=b"x" * (15 << 20)).status_code == 200
    chunks = (b"x" * (1 << 20) for _ in range(15))
    assert client.post("/v1/completions", content=chunks).status_code == 200
    assert "temporary file" not in (prefix / "log").read_text(), "a prompt was written to a file"
    assert client.post("/v1/completions", content=b"x" * (17 << 20)).status_code == 413
    assert sum(server.posts for server in upstreams) == 2
