"""Addresses, signals and the ready line. Processes of their own where signals matter."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ddtree.errors import InvalidOption, PortInUse
from ddtree.server import ServerOptions, check_port, run, serve
from ddtree.server.run import listen

OPTIONS = ServerOptions(("scripted",))
SCRIPT = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("scripted_engine", sys.argv[1])
scripted = importlib.util.module_from_spec(spec)
sys.modules["scripted_engine"] = scripted
spec.loader.exec_module(scripted)
import atexit, time
atexit.register(time.sleep, float(sys.argv[5]))
from ddtree.server import ServerOptions, run
options = ServerOptions(("scripted",), shutdown_timeout=float(sys.argv[4]), access_log=sys.argv[6] == "log")
engine = scripted.FakeEngine(pieces=["word "] * int(sys.argv[2]), round_seconds=float(sys.argv[3]))
run.serve(engine, "127.0.0.1", 0, options)
"""


class Process:
    """`serve` with a scripted engine, in a process of its own, ready."""

    def __init__(self, rounds: int, round_seconds: float, grace: float, teardown: float, log: bool) -> None:
        conftest = Path(__file__).with_name("conftest.py")
        command = [sys.executable, "-c", SCRIPT, str(conftest), *map(str, (rounds, round_seconds, grace, teardown))]
        command.append("log" if log else "")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.ready = self.process.stdout.readline()
        assert self.ready, self.process.stderr.read()
        self.connections: list[http.client.HTTPConnection] = []
        self.address = self.ready.split("http://")[1].split("/v1")[0]

    def ask(self, stream: bool = False) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self.address, timeout=20)
        self.connections.append(connection)
        body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": stream})
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        return connection

    def end(self, number: int) -> tuple[int, str, float]:
        """Sends a signal; the exit code, all that was printed, and the seconds it took."""
        begin = time.monotonic()
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out + err, time.monotonic() - begin


@pytest.fixture
def start():
    started: list[Process] = []

    def begin(
        rounds: int = 3, round_seconds: float = 0.0, grace: float = 0.3, teardown: float = 0.0, log: bool = False
    ) -> Process:
        started.append(Process(rounds, round_seconds, grace, teardown, log))
        return started[-1]

    yield begin
    for one in started:
        for connection in one.connections:
            connection.close()
        one.process.kill()
        one.process.wait()
        one.process.stdout.close()
        one.process.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ready_line_then_a_signal(start, number):
    one = start()
    assert one.ready == f"ddtree ready: http://{one.address}/v1 (model scripted, mode tree, float32 on cpu)\n"
    assert int(one.address.split(":")[1]) > 0
    answer = one.ask().getresponse()
    assert answer.status == 200
    answer.read()
    code, printed, seconds = one.end(number)
    assert code == 0
    assert printed == "stopping\n"
    assert seconds < 3


def test_a_second_ctrl_c_ends_at_once(start):
    one = start(rounds=1, round_seconds=60, grace=60)
    one.ask()
    time.sleep(0.5)
    one.process.send_signal(signal.SIGINT)
    assert (
        one.process.stderr.readline() == "stopping: 1 running answer may take up to 60 s (Ctrl-C again ends at once)\n"
    )
    code, printed, seconds = one.end(signal.SIGINT)
    assert code == 128 + signal.SIGINT
    assert printed == ""
    assert seconds < 3


def test_nothing_after_the_server_holds_an_idle_exit_up(start):
    """The end of the interpreter may take seconds on a loaded machine, which nobody needs."""
    one = start(teardown=60)
    code, printed, seconds = one.end(signal.SIGINT)
    assert (code, printed) == (0, "stopping\n")
    assert seconds < 3


def test_half_a_head_is_dropped(live, monkeypatch, eventually):
    """Also where an answer came before it on the connection; one that is answered just now is let be."""
    monkeypatch.setattr(run, "HEAD_SECONDS", 0.5)
    host, port = live.url.removeprefix("http://").split(":")
    silent, half, second = (socket.create_connection((host, int(port)), timeout=10) for _ in range(3))
    half.sendall(b"POST /v1/chat/comp")
    second.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea")
    assert second.recv(9) == b"HTTP/1.1 "
    for sock in (silent, half, second):
        with sock, contextlib.suppress(ConnectionResetError):
            while sock.recv(4096):
                pass
    eventually(lambda: not live.server.server_state.connections)


def test_a_slow_answer_is_not_taken_for_half_a_head(live, engine, monkeypatch):
    monkeypatch.setattr(run, "HEAD_SECONDS", 0.1)
    engine.round_seconds = 0.5
    answer = live.openai().chat.completions.create(model="scripted", messages=[{"role": "user", "content": "Hi"}])
    assert answer.choices[0].finish_reason == "stop"


def test_a_running_answer_may_end(start):
    one = start(rounds=10, round_seconds=0.1, grace=10)
    connection = one.ask(stream=True)
    answer = connection.getresponse()
    assert answer.readline()
    code, printed, _ = one.end(signal.SIGTERM)
    text = answer.read().decode()
    assert code == 0
    assert printed == "stopping: 1 running answer may take up to 10 s (Ctrl-C again ends at once)\n"
    assert '"finish_reason":"stop"' in text
    assert text.endswith("data: [DONE]\n\n")


def test_while_answers_end_new_requests_are_refused(start):
    """On new connections, too: a balancer must read why, and a client when to come back."""
    one = start(rounds=30, round_seconds=0.1, grace=20)
    answers = [one.ask(stream=True).getresponse() for _ in range(3)]
    assert all(answer.readline() for answer in answers)
    one.process.send_signal(signal.SIGTERM)
    assert (
        one.process.stderr.readline() == "stopping: 3 running answers may take up to 20 s (Ctrl-C again ends at once)\n"
    )
    for method, path in (("GET", "/health"), ("HEAD", "/health"), ("POST", "/v1/chat/completions")):
        connection = http.client.HTTPConnection(one.address, timeout=10)
        body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) if method == "POST" else None
        connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        refused = connection.getresponse()
        assert refused.status == 503
        assert refused.headers["connection"] == "close"
        assert int(refused.headers["retry-after"]) > 0
        if method != "HEAD":
            assert json.loads(refused.read())["error"]["code"] == "server_stopping"
        connection.close()
    for answer in answers:
        text = answer.read().decode()
        assert '"finish_reason":"stop"' in text
        assert text.endswith("data: [DONE]\n\n")
    assert one.process.wait(5) == 0


def test_the_access_log_is_on_standard_error(start):
    one = start(log=True)
    answer = one.ask().getresponse()
    assert answer.read()
    _, printed, _ = one.end(signal.SIGTERM)
    line, stopping = printed.splitlines()
    assert line.endswith(f"INFO [{answer.headers['x-request-id']}] {line.rpartition('] ')[2]}")
    assert "] POST /v1/chat/completions 200 " in line
    assert stopping == "stopping"


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_answer_is_cut_and_told_so(start, stream):
    one = start(rounds=2000, round_seconds=0.05)
    connection = one.ask(stream)
    if stream:
        answer = connection.getresponse()
        assert answer.readline()
    else:
        time.sleep(0.3)
    code, printed, seconds = one.end(signal.SIGTERM)
    answer = answer if stream else connection.getresponse()
    text = answer.read().decode()
    assert code == 0
    assert printed == "stopping: 1 running answer may take up to 0.3 s (Ctrl-C again ends at once)\n"
    assert seconds < 8
    assert "server_stopping" in text
    assert answer.status == (200 if stream else 503)
    assert text.endswith("data: [DONE]\n\n") is stream


def test_a_round_that_does_not_end_holds_no_exit_up(start):
    one = start(rounds=1, round_seconds=60)
    connection = one.ask()
    time.sleep(0.3)
    code, printed, seconds = one.end(signal.SIGINT)
    assert code == 0
    assert "Traceback" not in printed
    assert seconds < 8
    answer = connection.getresponse()
    assert answer.status == 503
    answer.read()


def test_clients_that_do_nothing_hold_no_exit_up(start):
    """One sent half a request, one half a body, one nothing."""
    one = start()
    host, port = one.address.split(":")
    sockets = [socket.create_connection((host, int(port))) for _ in range(3)]
    sockets[0].sendall(b"POST /v1/chat/comp")
    sockets[1].sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
    sockets[1].sendall(b"Content-Length: 1000\r\n\r\n{")
    time.sleep(0.3)
    code, printed, seconds = one.end(signal.SIGTERM)
    assert "Traceback" not in printed
    assert code == 0
    assert seconds < 8
    for sock in sockets:
        sock.close()


def test_a_client_that_does_not_read_holds_no_exit_up(start):
    one = start(rounds=200_000)
    one.ask(stream=True)
    time.sleep(0.5)
    code, printed, seconds = one.end(signal.SIGTERM)
    assert "Traceback" not in printed
    assert code == 0
    assert seconds < 8


def test_port_in_use(engine):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        for call in (lambda: check_port("127.0.0.1", port), lambda: serve(engine, "127.0.0.1", port, OPTIONS)):
            with pytest.raises(PortInUse, match=rf"127\.0\.0\.1:{port} is already in use.*--port") as caught:
                call()
            assert caught.value.param == "port"
    check_port("127.0.0.1", port)  # free again


def test_check_port_leaves_the_port_free():
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    check_port("127.0.0.1", port)
    listen("127.0.0.1", port).close()


@pytest.mark.parametrize(
    ("host", "port", "param"),
    [
        ("127.0.0.1", 65536, "port"),
        ("127.0.0.1", -1, "port"),
        ("no such host", 0, "host"),
        ("a" * 300, 0, "host"),
        ("192.0.2.1", 0, "host"),  # kept for documentation: never this machine's
    ],
)
def test_addresses_that_cannot_be_listened_on(host, port, param):
    with pytest.raises(InvalidOption) as caught:
        check_port(host, port)
    assert caught.value.param == param


def test_localhost_and_ipv6():
    with listen("localhost", 0) as sock:
        assert sock.family == socket.AF_INET
    if socket.has_ipv6 and os.path.exists("/proc/net/if_inet6"):
        with listen("::1", 0) as sock:
            assert sock.family == socket.AF_INET6


def test_serve_outside_the_main_thread(engine, capsys, eventually):
    """No signals there; it still serves and says so."""
    made = []

    class Recorded(run.Server):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "Server", Recorded)
        thread = threading.Thread(target=serve, args=(engine, "127.0.0.1", 0, OPTIONS))
        thread.start()
        eventually(lambda: bool(made) and made[0].started)
        made[0].should_exit = True
        thread.join(10)
    assert not thread.is_alive()
    assert capsys.readouterr().out.startswith("ddtree ready: http://127.0.0.1:")
