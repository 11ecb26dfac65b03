"""Who starts and stops services: systemd, or processes of our own on a machine without it; one protocol for both."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ddtree.deploy.atomic import write
from ddtree.deploy.failures import DeployFailed
from ddtree.deploy.procs import POLL_S, Process
from ddtree.deploy.unit_file import parse

MANAGERS = ("auto", "systemd", "processes")
STARTED_S = 20.0  # for a supervisor to say that it runs: an interpreter's start on a busy machine
STOP_SLACK_S = 15.0  # beyond the unit's own time to stop
COMMAND_S = 120.0  # for a systemctl that waits for nothing


@dataclass(frozen=True)
class Service:
    """What a manager says of one service."""

    state: str  # running, starting, waiting (for another start), failed, stopped, unsupervised, unknown
    pid: int | None = None  # of the main process
    restarts: int = 0
    detail: str = ""

    @property
    def running(self) -> bool:
        """Whether its process is there."""
        return self.state in ("running", "starting", "unsupervised")


class Manager(Protocol):
    """Each takes a service's name without .service. All raise DeployFailed."""

    name: str

    def install(self, service: str, text: str) -> None:
        """Makes a unit file known under this name; the running service goes on as it is."""

    def uninstall(self, service: str) -> None:
        """Takes back `install`; the service must be stopped."""

    def start(self, service: str) -> None:
        """Starts it as installed, now and (systemd) at boot."""

    def stop(self, service: str) -> None:
        """Stops it, within its own time for it, and for good."""

    def reload(self, service: str) -> None:
        """Runs its ExecReload=."""

    def state(self, service: str) -> Service:
        """What it does now."""

    def logs(self, service: str, lines: int) -> str:
        """The newest lines that it wrote."""


def choose(wanted: str, scope: str, folder: Path) -> tuple[Manager, str]:
    """The manager, and why it is this one. Raises DeployFailed where what is wanted cannot be."""
    if wanted not in MANAGERS:
        raise DeployFailed(f"--manager {wanted!r} is unknown: choose one of {', '.join(MANAGERS)}", param="manager")
    problem = _systemd_problem(scope) if wanted != "processes" else None
    if wanted == "systemd" and problem:
        raise DeployFailed(f"--manager systemd cannot be used: {problem}; choose --manager processes")
    if wanted == "processes" or problem:
        why = "as asked for" if wanted == "processes" else problem
        if sys.platform != "linux":
            raise DeployFailed("--manager processes needs Linux: it tells processes by /proc")
        return Processes(folder), f"processes: {why}"
    return Systemd(scope), f"systemd ({scope}): " + ("as asked for" if wanted == "systemd" else "it answers here")


def _systemd_problem(scope: str) -> str | None:
    """Why systemd cannot be used in this scope; None where it can."""
    if shutil.which("systemctl") is None:
        return "there is no systemctl"
    if scope == "system" and os.geteuid() != 0:
        return "its system scope needs root"
    done = _systemctl(scope, "show", "--property", "Version", "--value")
    if done.returncode or not done.stdout.strip():
        return f"systemd does not answer ({' '.join(done.stderr.split()) or 'no answer'})"
    return None


def _systemctl(scope: str, *words: str, seconds: float = COMMAND_S) -> subprocess.CompletedProcess[str]:
    command = ["systemctl", *(["--user"] if scope == "user" else []), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise DeployFailed(f"{' '.join(command)} did not end within {seconds:g} s") from error


class Systemd:
    """Units of the system's or the user's systemd."""

    name = "systemd"

    def __init__(self, scope: str) -> None:
        self._scope = scope
        config = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
        self.folder = Path("/etc/systemd/system") if scope == "system" else Path(config) / "systemd/user"

    def install(self, service: str, text: str) -> None:
        write(self.folder / f"{service}.service", text, 0o644)
        self._do("daemon-reload")

    def uninstall(self, service: str) -> None:
        self._do("disable", f"{service}.service", may_fail=True)
        (self.folder / f"{service}.service").unlink(missing_ok=True)
        self._do("daemon-reload")
        self._do("reset-failed", f"{service}.service", may_fail=True)

    def start(self, service: str) -> None:
        unit = f"{service}.service"
        self._do("enable", unit)
        self._do("reset-failed", unit, may_fail=True)  # an earlier failure's limit of starts does not count
        self._do("start", "--no-block", unit)
        deadline = time.monotonic() + STARTED_S
        while self.state(service).state == "stopped" and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def stop(self, service: str) -> None:
        unit = f"{service}.service"
        self._do("disable", unit, may_fail=True)
        self._do("stop", unit, seconds=self._stop_seconds(service) + STOP_SLACK_S)
        self._do("reset-failed", unit, may_fail=True)

    def reload(self, service: str) -> None:
        self._do("reload", f"{service}.service")

    def state(self, service: str) -> Service:
        names = "ActiveState,SubState,MainPID,NRestarts,Result,ExecMainCode,ExecMainStatus"
        done = _systemctl(self._scope, "show", f"{service}.service", "--property", names)
        if done.returncode:
            raise DeployFailed(f"systemctl show {service} failed: {' '.join(done.stderr.split())}")
        facts = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
        states = {"active": "running", "reloading": "running", "activating": "starting", "failed": "failed"}
        state = states.get(facts.get("ActiveState", ""), "stopped")
        if facts.get("SubState") == "auto-restart":
            state = "waiting"
        pid = int(facts.get("MainPID") or 0) or None
        detail = f"{facts.get('SubState')}, {facts.get('Result')}"
        if facts.get("SubState") == "start-post" and pid is None and facts.get("ExecMainCode", "0") != "0":
            # It has ended, and systemd still waits for ExecStartPost=, which asks for its health.
            state, detail = "failed", f"ended with {facts.get('ExecMainStatus')}"
        return Service(state, pid, int(facts.get("NRestarts") or 0), detail)

    def logs(self, service: str, lines: int) -> str:
        command = ["journalctl", *(["--user-unit"] if self._scope == "user" else ["--unit"]), f"{service}.service"]
        command += ["--lines", str(lines), "--no-pager", "--output", "cat", "--quiet"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"(its log cannot be read: {error})"
        return done.stdout.strip() or f"(the journal has no line of it: {' '.join(command)})"

    def _stop_seconds(self, service: str) -> float:
        path = self.folder / f"{service}.service"
        return parse(service, path.read_text(encoding="utf-8")).stop_s if path.exists() else 90.0

    def _do(self, *words: str, may_fail: bool = False, seconds: float = COMMAND_S) -> None:
        done = _systemctl(self._scope, *words, seconds=seconds)
        if done.returncode and not may_fail:
            raise DeployFailed(f"systemctl {' '.join(words)} failed: {' '.join(done.stderr.split())[:500]}")


class Processes:
    """Processes of our own under a supervisor each (`ddtree.deploy.supervisor`), with files in FOLDER/run and logs."""

    name = "processes"

    def __init__(self, folder: Path) -> None:
        self._run, self._logs = folder / "run", folder / "logs"

    def install(self, service: str, text: str) -> None:
        parse(service, text)
        write(self._run / f"{service}.service", text, 0o600)

    def uninstall(self, service: str) -> None:
        for suffix in (".service", ".json", ".tmp"):
            (self._run / f"{service}{suffix}").unlink(missing_ok=True)

    def start(self, service: str) -> None:
        if self.state(service).state == "unsupervised":
            self.stop(service)
        status = self._run / f"{service}.json"
        status.unlink(missing_ok=True)
        self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = [sys.executable, "-m", "ddtree.deploy.supervisor", str(self._run / f"{service}.service"), str(status)]
        with open(os.open(self._logs / f"{service}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as log:
            supervisor = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
            )
        _OURS.append(supervisor)
        until = time.monotonic() + STARTED_S
        while not status.exists():
            if supervisor.poll() is not None or time.monotonic() > until:
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
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMMAND_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DeployFailed(f"{service} cannot be reloaded: {error}") from error
        if done.returncode:
            raise DeployFailed(f"{service} cannot be reloaded: {' '.join(done.stderr.split())[:500]}")

    def state(self, service: str) -> Service:
        for ours in _OURS:
            ours.poll()  # fetches those that have ended
        told = self._told(service)
        supervisor, child = _process(told.get("supervisor")), _process(told.get("child"))
        pid = child.pid if child is not None and child.alive else None
        restarts, state = int(told.get("restarts", 0)), str(told.get("state", "stopped"))
        detail = f"ended with {told['code']}" if told.get("code") is not None else ""
        if supervisor is None or not supervisor.alive:
            if pid is not None:
                return Service("unsupervised", pid, restarts, "its supervisor was killed")
            # What ended in good order is stopped; "running" or "waiting" without anybody: both were killed.
            return Service("failed" if state in ("failed", "running", "waiting") else "stopped", None, restarts, detail)
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


# Supervisors outlive this process, so nobody waits for them; kept, since subprocess warns of those that are dropped.
_OURS: list[subprocess.Popen[bytes]] = []


def _process(pair: Any) -> Process | None:
    return Process(*pair) if isinstance(pair, list) and len(pair) == 2 else None
