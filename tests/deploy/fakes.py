"""A deployment of fake servers in a folder of its own, and commands on it."""

import json
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ddtree.deploy import commands
from ddtree.deploy.compare import Limits
from ddtree.deploy.processes import Processes
from ddtree.deploy.site import Site, Waits
from ddtree.deploy.state import Folder, State
from ddtree.deploy.trial import Trial

SERVER = Path(__file__).with_name("fake_server.py")
QUICK = Limits(prompts=2, max_tokens=8, min_speed=0.3)


@dataclass
class Deployed:
    """One deployment; everything that runs is ended by `close`."""

    path: Path
    port: int
    said: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Folder:
        """Its folder."""
        return Folder(self.path.parent / "place")

    def asked(self, *sets: str, start_s: float = 20.0, agree: Callable[[str], bool] = lambda _: True) -> Any:
        """What commands are given."""
        return commands.Asked(
            self.path, sets, manager="processes", start_s=start_s, drain_s=20.0, tell=self.said.append, agree=agree
        )

    def apply(self, *sets: str, **options: Any) -> commands.Outcome:
        """`ddtree deploy apply`."""
        return commands.apply(self.asked(*sets, **options))

    def rollout(
        self, *sets: str, limits: Limits = QUICK, trial: Trial | None = None, beside: int | None = None, **options: Any
    ) -> commands.Outcome:
        """`ddtree deploy rollout`."""
        return commands.rollout(self.asked(*sets, **options), limits, beside_port=beside, trial_limits=trial)

    def site(self) -> Site:
        """The services in hand."""
        return Site(self.folder, Processes(self.folder.path), Waits(20.0, 20.0), self.said.append)

    def state(self) -> State:
        """What the folder says."""
        return self.folder.state()

    def info(self, index: int) -> dict[str, Any]:
        """A replica's /server_info."""
        return dict(httpx.get(f"http://127.0.0.1:{self.port + index}/server_info", trust_env=False).json())

    def modes(self) -> list[str]:
        """The modes that the replicas run."""
        return [self.info(index)["speculation"]["mode"] for index in range(len(self.folder.pointed("current").members))]

    def pids(self) -> list[int]:
        """The replicas' processes."""
        return [self.info(index)["pid"] for index in range(len(self.folder.pointed("current").members))]

    def kept(self) -> dict[str, Any]:
        """Links and services: what a failed command must leave as it was."""
        state = self.state()
        current = self.folder.pointed("current")
        return {"services": state.services, "current": current and current.number, "modes": self.modes()}

    def close(self) -> None:
        """Ends all that was started."""
        site = self.site()
        stands = [site.state.beside.service] if site.state.beside else []
        for service in (*site.state.services, *stands):
            for pair in (site.manager._told(service).get(name) for name in ("supervisor", "child")):
                with suppress(ProcessLookupError, TypeError):
                    os.kill(pair[0], signal.SIGCONT)
            site.manager.stop(service)


def free_ports(count: int) -> int:
    """The first of `count` free ports in a row: below those that the system gives away by itself, from where no other
    process of pytest-xdist takes any."""
    low = 20000 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 10 * 1000
    while True:
        first = random.randrange(low, low + 1000 - count)
        sockets: list[socket.socket] = []
        try:
            for port in range(first, first + count):
                sockets.append(socket.create_server(("127.0.0.1", port)))
            return first
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()


def make(folder: Path, replicas: int = 2, router: str = "none", **environment: str) -> Deployed:
    """A deployment of `replicas` fake servers in mode linear; ports from one on, the router's is the last."""
    program = folder / "python"
    program.write_text(f"#!{sys.executable}\n{SERVER.read_text(encoding='utf-8')}", encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    port = free_ports(replicas + 2)
    lines = [
        'name = "fake"', 'mode = "linear"', 'gpus = "none"', f"cpu_replicas = {replicas}", f"port = {port}",
        f'python = "{program}"', f'folder = "{folder / "place"}"', "stop_seconds = 5", "start_seconds = 20",
        "[environment]", *(f"{name} = {json.dumps(value)}" for name, value in environment.items()),
        "[router]", f'kind = "{router}"', *([f"port = {port + replicas}"] if router != "none" else []),
    ]  # fmt: skip
    path = folder / "fake.toml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Deployed(path, port)


def running_command(deployed: Deployed, *words: str) -> subprocess.Popen[str]:
    """The command line itself, in a process of its own."""
    command = [sys.executable, "-m", "ddtree", "deploy", *words, "--manager", "processes", "--yes"]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def wait_until(what: Callable[[], bool], seconds: float = 20.0) -> None:
    """Waits until something holds; fails after the time."""
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)
