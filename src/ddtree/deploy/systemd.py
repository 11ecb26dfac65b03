"""Services as units of the system's or the user's systemd."""

import os
import shutil
import subprocess
import time

from ddtree.deploy.applied import unit_folder
from ddtree.deploy.atomic import write
from ddtree.deploy.failures import DeployFailed
from ddtree.deploy.managers import Service
from ddtree.deploy.procs import POLL_S
from ddtree.deploy.render import MADE
from ddtree.deploy.unit_file import parse

STARTED_S = 20.0  # for a start to be under way
STOP_SLACK_S = 15.0  # beyond the unit's own time to stop
COMMAND_S = 120.0  # for a systemctl that waits for nothing


class Systemd:
    """Units of the system's or the user's systemd."""

    name = "systemd"

    def __init__(self, scope: str) -> None:
        self._scope = scope
        self.folder = unit_folder(scope)

    def install(self, service: str, text: str) -> None:
        path = self.folder / f"{service}.service"
        if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(MADE):
            raise DeployFailed(f"{path} was not made by ddtree deploy: take it away, or choose another name")
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
        if not (self.folder / unit).exists() and self.state(service).state in ("stopped", "failed"):
            return  # a command was killed before it had installed it
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
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30)
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


def problem(scope: str) -> str | None:
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
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise DeployFailed(f"{' '.join(command)} did not end within {seconds:g} s") from error
