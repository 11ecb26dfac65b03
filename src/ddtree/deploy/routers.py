"""The router in front of the replicas: one left out and let in again, without a request lost."""

import re
import time
from pathlib import Path
from typing import Protocol

import httpx

from ddtree.deploy.atomic import write
from ddtree.deploy.failures import DeployFailed
from ddtree.deploy.live import SHORT_S
from ddtree.deploy.managers import Manager
from ddtree.deploy.procs import POLL_S, children, title
from ddtree.deploy.render import MADE

SWITCH_S = 20.0  # for nginx to let its new workers take over
WORKER_S = 30.0  # for sglang-router to take in a worker


class Router(Protocol):
    """Addresses are host:port; one that the router does not have is no mistake. All raise DeployFailed."""

    def leave_out(self, address: str) -> None:
        """Sends no new request there; those under way go on."""

    def let_in(self, address: str) -> None:
        """Sends requests there again."""

    def move(self, old: str, new: str) -> None:
        """What went to one address goes to another."""


class Nginx:
    """By `down` at the server's line in the configuration, and a reload, which cuts nothing."""

    def __init__(self, manager: Manager, service: str, config: Path) -> None:
        self._manager, self._service, self._config = manager, service, config

    def leave_out(self, address: str) -> None:
        if has(self._text(), address):
            self._change(mark(self._text(), address, down=True))

    def let_in(self, address: str) -> None:
        if has(self._text(), address):
            self._change(mark(self._text(), address, down=False))

    def move(self, old: str, new: str) -> None:
        self._change(readdressed(self._text(), old, new))

    def load(self, text: str) -> None:
        """Takes a whole new configuration."""
        self._change(text)

    def _text(self) -> str:
        return self._config.read_text(encoding="utf-8")

    def _change(self, text: str) -> None:
        """Writes and reloads; returns once no worker with the former configuration takes requests."""
        before, mark_file = self._text(), unread(self._config)
        if text == before and not mark_file.exists():
            return
        write(mark_file, f"{MADE}a command: {self._config.name} is not read yet\n", 0o644)
        master = self._manager.state(self._service).pid
        workers = set(children(master)) if master else set()
        write(self._config, text, 0o644)
        try:
            self._manager.reload(self._service)
        except DeployFailed:
            write(self._config, before, 0o644)
            raise
        if master:
            self._wait_for_workers(master, workers)
        mark_file.unlink(missing_ok=True)

    def _wait_for_workers(self, master: int, former: set[int]) -> None:
        until = time.monotonic() + SWITCH_S
        while time.monotonic() < until:
            now = set(children(master))
            if now - former and not any("shutting down" not in title(pid) for pid in now & former):
                return
            time.sleep(POLL_S)
        said = self._manager.logs(self._service, 5)
        raise DeployFailed(f"{self._service} did not take its new configuration within {SWITCH_S:g} s:\n{said}")


class SGLangRouter:
    """By its own list of workers, over HTTP."""

    def __init__(self, address: str, api_key: str | None = None) -> None:
        self._url = f"http://{address}"
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def leave_out(self, address: str) -> None:
        for worker in self._workers():
            if worker["url"].removeprefix("http://") == address:
                self._send("DELETE", f"/workers/{worker['id']}")
        self._wait(address, there=False)

    def let_in(self, address: str) -> None:
        if any(worker["url"] == f"http://{address}" for worker in self._workers()):
            return
        self._send("POST", "/workers", {"url": f"http://{address}"})
        self._wait(address, there=True)

    def move(self, old: str, new: str) -> None:
        self.let_in(new)
        self.leave_out(old)

    def _wait(self, address: str, there: bool) -> None:
        """Both are taken up in the background."""
        until = time.monotonic() + WORKER_S
        while True:
            found = [worker for worker in self._workers() if worker["url"] == f"http://{address}"]
            if (any(worker.get("is_healthy", True) for worker in found)) if there else not found:
                return
            if time.monotonic() > until:
                what = "take in" if there else "let go of"
                raise DeployFailed(f"sglang-router at {self._url} did not {what} {address} within {WORKER_S:g} s")
            time.sleep(POLL_S)

    def _workers(self) -> list[dict[str, str]]:
        found = self._send("GET", "/workers").get("workers")
        return [worker for worker in found or [] if isinstance(worker, dict) and "url" in worker]

    def _send(self, method: str, path: str, body: object = None) -> dict[str, list[dict[str, str]]]:
        try:
            response = httpx.request(
                method, f"{self._url}{path}", json=body, headers=self._headers, timeout=SHORT_S, trust_env=False,
                verify=False,  # as for replicas
            )  # fmt: skip
            found = response.json() if response.content else {}
        except (httpx.HTTPError, ValueError) as error:
            raise DeployFailed(f"sglang-router at {self._url}{path}: {type(error).__name__} {error}") from error
        if response.status_code >= httpx.codes.BAD_REQUEST:
            raise DeployFailed(f"sglang-router at {self._url}{path} answers {response.status_code}: {found}")
        return found if isinstance(found, dict) else {}


def unread(config: Path) -> Path:
    """A file that is there while nginx may not have read its configuration: a command may be killed before a reload."""
    return config.with_name(f".{config.name}.unread")


def has(text: str, address: str) -> bool:
    """Whether a configuration of nginx has a server line of this address."""
    return _lines(address).search(text) is not None


def mark(text: str, address: str, down: bool) -> str:
    """A configuration of nginx whose server lines of this address have `down`, or have it not."""
    pattern, found = _lines(address), 0

    def changed(line: re.Match[str]) -> str:
        nonlocal found
        found += 1
        rest = re.sub(r"\s+down\b", "", line["rest"])
        return f"{line['head']}{rest}{' down' if down else ''};"

    changed_text = pattern.sub(changed, text)
    if not found:
        raise DeployFailed(f"the router's configuration has no line `server {address};`: apply writes it anew")
    return changed_text


def readdressed(text: str, old: str, new: str) -> str:
    """The same with another address at these lines."""
    return _lines(old).sub(lambda line: f"{line['head'].replace(old, new)}{line['rest']};", text)


def _lines(address: str) -> re.Pattern[str]:
    return re.compile(rf"^(?P<head>[ \t]*server[ \t]+{re.escape(address)})(?P<rest>(?:[ \t][^;\n]*)?);", re.MULTILINE)
