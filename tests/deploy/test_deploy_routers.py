"""The routers: nginx by its configuration (and itself, where it is installed), sglang-router by its API."""

import json
import os
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from a_deployment import made
from ddtree.deploy import beside, commands, doors, routers, site
from ddtree.deploy.compare import Limits
from ddtree.deploy.failures import DeployFailed
from ddtree.deploy.generation import Door
from ddtree.deploy.managers import Service
from ddtree.deploy.render import render
from ddtree.deploy.routers import Nginx, SGLangRouter, has, mark, readdressed
from ddtree.deploy.units import bracketed
from fakes import Deployed, make, running_command, wait_until

NGINX = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
CONFIG = render(made())["localhost/nginx/chat.conf"]


def test_marks_go_to_one_server_and_come_off_again() -> None:
    down = mark(CONFIG, "127.0.0.1:30001", down=True)
    changed = [line for line in down.splitlines() if line not in CONFIG.splitlines()]
    assert changed == ["        server 127.0.0.1:30001 max_fails=1 fail_timeout=5s down;  # chat-0 of localhost"]
    assert down == render(made(), down=["chat-0"])["localhost/nginx/chat.conf"]
    assert mark(down, "127.0.0.1:30001", down=True) == down
    assert mark(down, "127.0.0.1:30001", down=False) == CONFIG


def test_an_address_is_found_whole() -> None:
    assert has(CONFIG, "127.0.0.1:30001")
    assert not has(CONFIG, "127.0.0.1:3000")
    assert not has(CONFIG, "127.0.0.1:30000")  # where nginx listens
    with pytest.raises(DeployFailed, match=r"no line `server 127\.0\.0\.1:3000;`"):
        mark(CONFIG, "127.0.0.1:3000", down=True)


def test_another_address_keeps_the_rest_of_its_line() -> None:
    moved = readdressed(mark(CONFIG, "127.0.0.1:30002", down=True), "127.0.0.1:30002", "127.0.0.1:39999")
    assert "server 127.0.0.1:39999 max_fails=1 fail_timeout=5s down;" in moved
    assert not has(moved, "127.0.0.1:30002")


# sglang-router, by a server that has its API of workers.


class Workers(BaseHTTPRequestHandler):
    """GET /workers, POST /workers, DELETE /workers/ID, as sglang-router 0.3.2 answers."""

    urls: dict[str, str]
    deaf = False

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        """The list."""
        found = [{"id": key, "url": url, "is_healthy": True} for key, url in self.urls.items()]
        self._send({"workers": found, "total": len(found)}, 200)

    def do_POST(self) -> None:
        """One more."""
        url = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["url"]
        if not self.deaf:
            self.urls[f"id-{url[-1]}"] = url
        self._send({"status": "accepted"}, 202)

    def do_DELETE(self) -> None:
        """One less."""
        known = self.urls.pop(self.path.removeprefix("/workers/"), None)
        self._send({"status": "accepted"} if known else {"error": "no such worker"}, 202 if known else 404)

    def _send(self, value: Any, status: int) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def workers() -> Iterator[tuple[SGLangRouter, dict[str, str]]]:
    """The router's controls, and the workers that it has."""
    urls = {"id-1": "http://127.0.0.1:1", "id-2": "http://127.0.0.1:2"}
    handler = type("Handler", (Workers,), {"urls": urls})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield SGLangRouter(f"127.0.0.1:{server.server_port}"), urls
        server.shutdown()
        thread.join()


def test_workers_come_and_go(workers: tuple[SGLangRouter, dict[str, str]]) -> None:
    router, urls = workers
    router.leave_out("127.0.0.1:1")
    assert urls == {"id-2": "http://127.0.0.1:2"}
    router.leave_out("127.0.0.1:1")  # no mistake
    router.let_in("127.0.0.1:1")
    router.let_in("127.0.0.1:1")
    assert sorted(urls.values()) == ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    router.move("127.0.0.1:2", "127.0.0.1:3")
    assert sorted(urls.values()) == ["http://127.0.0.1:1", "http://127.0.0.1:3"]


def test_a_router_that_takes_nobody_in(
    workers: tuple[SGLangRouter, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routers, "WORKER_S", 0.2)
    monkeypatch.setattr(Workers, "deaf", True)
    with pytest.raises(DeployFailed, match=r"did not take in 127\.0\.0\.1:7 within 0\.2 s"):
        workers[0].let_in("127.0.0.1:7")


def test_a_router_that_is_not_there() -> None:
    with pytest.raises(DeployFailed, match=r"sglang-router at http://127\.0\.0\.1:1/workers: ConnectError"):
        SGLangRouter("127.0.0.1:1").leave_out("127.0.0.1:2")


def test_a_stand_in_gets_another_port_and_nothing_else() -> None:
    unit = render(made(cpu_replicas=1, model="/m/x-30001", args=("--max-queue", "30001")))
    before = unit["localhost/systemd/chat-0.service"]
    after = beside.on_port(before, "30001", 31999)
    assert after.count("31999") == 4, "command, health check, description, and what check reads"
    assert after.count("/m/x-30001") == before.count("/m/x-30001")
    assert "--max-queue 30001" in after
    with pytest.raises(DeployFailed, match="names no port 30009"):
        beside.on_port(before, "30009", 31999)


class Reloads:
    """A manager that counts reloads, and may be killed before one."""

    def __init__(self) -> None:
        self.count, self.killed = 0, False

    def state(self, _service: str) -> Service:
        return Service("running")

    def reload(self, _service: str) -> None:
        if self.killed:
            raise KeyboardInterrupt
        self.count += 1


def test_a_configuration_that_was_written_and_not_read_is_read_the_next_time(tmp_path: Path) -> None:
    config, manager = tmp_path / "chat.conf", Reloads()
    config.write_text(CONFIG, encoding="utf-8")
    router = Nginx(manager, "chat-router", config)
    router.let_in("127.0.0.1:30001")
    assert manager.count == 0, "it is as it was"
    manager.killed = True
    with pytest.raises(KeyboardInterrupt):
        router.leave_out("127.0.0.1:30001")
    manager.killed = False
    router.leave_out("127.0.0.1:30001")
    assert manager.count == 1
    router.leave_out("127.0.0.1:30001")
    assert manager.count == 1
    assert [path.name for path in tmp_path.iterdir()] == ["chat.conf"]


@pytest.mark.parametrize("listener", ["127.0.0.1", "::1"])
def test_a_router_that_listens_is_seen(listener: str) -> None:
    family = socket.AF_INET6 if ":" in listener else socket.AF_INET
    try:
        server = socket.create_server((listener, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {listener}")
    with server:
        address = f"{bracketed(listener)}:{server.getsockname()[1]}"
        site = SimpleNamespace(manager=SimpleNamespace(state=lambda _: Service("running"), logs=lambda *_: ""))
        doors._wait_for_door(site, Door("nginx", "chat-router", address))


# nginx itself.


class Traffic:
    """Clients that keep sending through the router until the end."""

    def __init__(self, url: str, clients: int = 3) -> None:
        self._url, self._clients = url, clients
        self._over = threading.Event()
        self.statuses: Counter[Any] = Counter()

    def __enter__(self) -> "Traffic":
        self._pool = ThreadPoolExecutor(self._clients)
        self._done = [self._pool.submit(self._client, number) for number in range(self._clients)]
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        for done in self._done:
            done.result(timeout=30)
        self._pool.shutdown()

    def _client(self, number: int) -> None:
        turn = number
        with httpx.Client(trust_env=False, timeout=20) as client:
            while not self._over.is_set():
                body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "stream": bool(turn % 2)}
                try:
                    response = client.post(f"{self._url}/v1/chat/completions", json=body)
                    whole = "[DONE]" in response.text if turn % 2 else '"choices"' in response.text
                    ok = response.status_code == httpx.codes.OK
                    self.statuses[f"cut: {response.text[:200]!r}" if ok and not whole else response.status_code] += 1
                except httpx.HTTPError as error:
                    self.statuses[type(error).__name__] += 1
                turn += 1


@pytest.fixture
def routed(tmp_path: Path) -> Iterator[Deployed]:
    """Two replicas behind nginx."""
    if NGINX is None:
        pytest.skip("nginx is not installed")
    deployed = make(tmp_path, router="nginx", FAKE_TOKENS_S="100")
    deployed.apply()
    yield deployed
    deployed.close()


@pytest.mark.full
def test_no_request_is_lost_in_a_rollout_that_holds_and_in_one_that_does_not(routed: Deployed) -> None:
    url = f"http://127.0.0.1:{routed.port + 2}"
    with Traffic(url) as traffic:
        routed.rollout("mode=tree")
        with pytest.raises(DeployFailed, match="answer 1 differs"):
            routed.rollout("mode=tree", "environment.FAKE=wrong")
    assert set(traffic.statuses) == {200}
    assert traffic.statuses[200] > 20
    assert routed.modes() == ["tree", "tree"]
    config = Path(routed.site().door().door.config).read_text(encoding="utf-8")
    assert " down;" not in config


def test_reloads_lose_no_request(routed: Deployed) -> None:
    router = routed.site().router()
    with Traffic(f"http://127.0.0.1:{routed.port + 2}", clients=4) as traffic:
        for turn in range(10):
            address = f"127.0.0.1:{routed.port + turn % 2}"
            router.leave_out(address)
            router.let_in(address)
    assert set(traffic.statuses) == {200}
    assert traffic.statuses[200] > 20


@pytest.mark.full
def test_a_lone_replica_behind_nginx_is_replaced_without_a_gap(tmp_path: Path) -> None:
    if NGINX is None:
        pytest.skip("nginx is not installed")
    deployed = make(tmp_path, replicas=1, router="nginx", FAKE_TOKENS_S="100")
    try:
        deployed.apply()
        with Traffic(f"http://127.0.0.1:{deployed.port + 1}") as traffic:
            deployed.rollout("mode=tree", beside=deployed.port + 2)
            with pytest.raises(DeployFailed, match="answer 1 differs"):
                deployed.rollout("mode=tree", "environment.FAKE=wrong", beside=deployed.port + 2)
        assert set(traffic.statuses) == {200}
        assert deployed.modes() == ["tree"]
        assert deployed.state().beside is None
        assert sorted(path.stem for path in (deployed.folder.path / "run").glob("*.service")) == [
            "fake-0", "fake-router",
        ]  # fmt: skip
    finally:
        deployed.close()


@pytest.mark.full
def test_no_request_is_lost_behind_sglang_router(tmp_path: Path) -> None:
    """With DDTREE_TEST_ROUTER_PYTHON naming an interpreter that has sglang-router (tried with 0.3.2)."""
    interpreter = os.environ.get("DDTREE_TEST_ROUTER_PYTHON")
    if interpreter is None:
        pytest.skip("DDTREE_TEST_ROUTER_PYTHON names no interpreter with sglang-router")
    deployed = make(tmp_path, router="sglang-router", FAKE_TOKENS_S="100")
    program = tmp_path / "python"
    fake = program.rename(tmp_path / "fake_python")
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *sglang_router*) exec {interpreter} "$@";; *) exec {fake} "$@";; esac\n',
        encoding="utf-8",
    )
    program.chmod(0o755)
    url = f"http://127.0.0.1:{deployed.port + 2}"

    def workers() -> list[dict[str, Any]]:
        found = httpx.get(f"{url}/workers", trust_env=False).json()["workers"]
        return [worker for worker in found if worker["is_healthy"]]

    try:
        deployed.apply()
        wait_until(lambda: len(workers()) == 2)
        with Traffic(url) as traffic:
            deployed.rollout("mode=tree")
            with pytest.raises(DeployFailed, match="answer 1 differs"):
                deployed.rollout("mode=tree", "environment.FAKE=wrong")
        assert set(traffic.statuses) == {200}
        assert len(workers()) == 2
        assert deployed.modes() == ["tree", "tree"]
    finally:
        deployed.close()


@pytest.mark.full
@pytest.mark.parametrize("then", ["goes on", "is undone"])
def test_killed_while_another_one_stands_in(tmp_path: Path, then: str) -> None:
    if NGINX is None:
        pytest.skip("nginx is not installed")
    deployed = make(tmp_path, replicas=1, router="nginx", FAKE_TOKENS_S="100")
    words = [str(deployed.path), "--set", "mode=tree", "--beside-port", str(deployed.port + 2), "--min-speed", "0"]
    try:
        deployed.apply()
        config = Path(deployed.site().door().door.config)
        with Traffic(f"http://127.0.0.1:{deployed.port + 1}") as traffic:
            with running_command(deployed, "rollout", *words) as command:
                wait_until(lambda: has(config.read_text(encoding="utf-8"), f"127.0.0.1:{deployed.port + 2}"), 60)
                command.kill()
            assert deployed.state().beside is not None
            if then == "goes on":
                limits = Limits(0, prompts=1, max_tokens=4)
                deployed.rollout("mode=tree", limits=limits, beside=deployed.port + 2)
            else:
                commands.rollback(deployed.asked())
        assert set(traffic.statuses) == {200}
        assert deployed.modes() == ["tree" if then == "goes on" else "linear"]
        assert deployed.state().beside is None
        assert deployed.state().operation is None
    finally:
        deployed.close()


def test_a_lone_replica_has_a_gap_without_that(tmp_path: Path) -> None:
    if NGINX is None:
        pytest.skip("nginx is not installed")
    deployed = make(tmp_path, replicas=1, router="nginx", FAKE_TOKENS_S="100")
    try:
        deployed.apply()
        with Traffic(f"http://127.0.0.1:{deployed.port + 1}") as traffic:
            deployed.rollout("mode=tree", limits=Limits(0, prompts=1, max_tokens=4))
        assert set(traffic.statuses) == {200, 503}  # answers that ran have ended
        assert deployed.modes() == ["tree"]
    finally:
        deployed.close()


def test_the_router_s_port_is_taken(routed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "FREE_S", 0.1)
    pids = routed.pids()
    with (
        socket.create_server(("127.0.0.1", routed.port + 3)),
        pytest.raises(DeployFailed, match="is taken by something that is no service of this deployment"),
    ):
        routed.apply(f"router.port={routed.port + 3}")
    assert httpx.get(f"http://127.0.0.1:{routed.port + 2}/health", trust_env=False).status_code == httpx.codes.OK
    assert routed.pids() == pids


def test_too_little_memory_for_a_second_replica(routed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_available", lambda: 1 << 20)
    member = next(routed.site().members())
    with pytest.raises(DeployFailed, match="1 MiB are available: leave --beside-port out"):
        beside.check_room(routed.site(), "fake-0", member)


def test_nginx_that_refuses_a_configuration_keeps_the_former(routed: Deployed) -> None:
    router = routed.site().router()
    path = Path(routed.site().door().door.config)
    before = path.read_text(encoding="utf-8")
    with pytest.raises(DeployFailed, match="cannot be reloaded"):
        router.load("no configuration")
    assert path.read_text(encoding="utf-8") == before
