"""Services as processes of our own, on a machine without systemd: a supervisor each, files in FOLDER/run and logs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ddtree.deploy.atomic import write
from ddtree.deploy.failures import DeployFailed
from ddtree.deploy.managers import Service
from ddtree.deploy.procs import POLL_S, Process
from ddtree.deploy.unit_file import parse

STARTED_S = 20.0  # for a supervisor to say that it runs: an interpreter's start on a busy machine
STOP_SLACK_S = 15.0  # beyond the unit's own time to stop
RELOAD_S = 120.0


class Processes:
    """Processes of our own under a supervisor each (`ddtree.deploy.supervisor`), with files in FOLDER/run and logs."""

    name = "processes"

    def __init__(self, folder: Path) -> None:
        self._run, self._logs = folder / "run", folder / "logs"

    def install(self, service: str, text: str) -> None:
        parse(service, text)
        write(self._run / f"{service}.service", text, 0o600)

    def uninstall(self, service: str) -> None:
        for suffix in (".service", ".json"):
            (self._run / f"{service}{suffix}").unlink(missing_ok=True)

    def start(self, service: str) -> None:
        if self.state(service).state == "unsupervised":
            self.stop(service)
        status = self._run / f"{service}.json"
        status.unlink(missing_ok=True)
        self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = [sys.executable, "-m", "ddtree.deploy.supervisor", str(self._run / f"{service}.service"), str(status)]
        with open(os.open(self._logs / f"{service}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as log:
            # It leaves this process at once (two forks), so that nobody has to wait for it.
            try:
                subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", timeout=STARTED_S)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise DeployFailed(f"{service} could not be started: {error}") from error
        until = time.monotonic() + STARTED_S
        while not status.exists():
            if time.monotonic() > until:
                raise DeployFailed(f"{service} could not be started:\n{self.logs(service, 20)}")
            time.sleep(POLL_S)

    def stop(self, service: str) -> None:
        told = self._told(service)
        supervisor, child = _process(told.get("supervisor")), _process(told.get("child"))
        path = self._run / f"{service}.service"
        seconds = (parse(service, path.read_text(encoding="utf-8")).stop_s if path.exists() else 90.0) + STOP_SLACK_S
        seconds = min(seconds, 86400.0)
        if supervisor is not None and supervisor.signal(signal.SIGTERM):
            if not supervisor.wait(seconds):
                supervisor.signal(signal.SIGKILL)
                supervisor.wait(STOP_SLACK_S)
        elif child is not None and child.signal(signal.SIGTERM):  # its supervisor was killed
            child.wait(seconds)
        told = self._told(service)
        child = _process(told.get("child")) or child
        if child is not None and child.signal(signal.SIGKILL, group=True) and not child.wait(STOP_SLACK_S):
            raise DeployFailed(f"{service} (process {child.pid}) cannot be ended, not even by SIGKILL")
        (self._run / f"{service}.json").unlink(missing_ok=True)

    def reload(self, service: str) -> None:
        text = (self._run / f"{service}.service").read_text(encoding="utf-8")
        unit = parse(service, text, str(self._run / "runtime"))
        pid = self.state(service).pid
        if not unit.reload or pid is None:
            raise DeployFailed(f"{service} cannot be reloaded: it does not run, or its unit has no ExecReload=")
        command = [word.replace("$MAINPID", str(pid)).replace("${MAINPID}", str(pid)) for word in unit.reload]
        environment = {**os.environ, **unit.settled_environment()}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, errors="replace", timeout=RELOAD_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DeployFailed(f"{service} cannot be reloaded: {error}") from error
        if done.returncode:
            raise DeployFailed(f"{service} cannot be reloaded: {' '.join(done.stderr.split())[:500]}")

    def state(self, service: str) -> Service:
        told = self._told(service)
        supervisor, child = _process(told.get("supervisor")), _process(told.get("child"))
        pid = child.pid if child is not None and child.alive else None
        restarts, state = int(told.get("restarts", 0)), str(told.get("state", "stopped"))
        detail = f"ended with {told['code']}" if told.get("code") is not None else ""
        if supervisor is None or not supervisor.alive:
            if pid is not None:
                return Service("unsupervised", pid, restarts, "its supervisor was killed")
            # "running" or "waiting" without anybody: both were killed.
            return Service("failed" if state in ("running", "waiting") else state, None, restarts, detail)
        return Service("starting" if state == "running" and pid is None else state, pid, restarts, detail)

    def logs(self, service: str, lines: int) -> str:
        try:
            text = (self._logs / f"{service}.log").read_bytes()[-200 * 1024 :].decode(errors="replace")
        except FileNotFoundError:
            return "(it wrote no log)"
        return "\n".join(text.splitlines()[-lines:])

    def _told(self, service: str) -> dict[str, Any]:
        try:
            found = json.loads((self._run / f"{service}.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _process(pair: Any) -> Process | None:
    return Process(*pair) if isinstance(pair, list) and len(pair) == 2 else None
