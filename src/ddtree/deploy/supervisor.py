"""Runs one unit's command on a machine without systemd: `python -m ddtree.deploy.supervisor UNIT STATUS`.

What systemd would do with the same file: the command in its environment, started again when it ends, with a growing
pause and a limit, and stopped by its signal within its time. Hardening and accounting are systemd's alone.
"""

import json
import os
import pwd
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from ddtree.deploy.atomic import write
from ddtree.deploy.failures import DeployFailed
from ddtree.deploy.procs import Process, signal_number
from ddtree.deploy.unit_file import Unit, parse

LOOK_S = 0.1  # between two looks whether a stop was asked for, or the command has ended
GROWTH = 2.0  # each pause before another start is so much longer
MOST_GROWTHS = 60  # beyond it, a pause is the longest one whatever it began with
KILLED_S = 5.0  # for the kernel to end what was killed
PRE_SECONDS = 90.0  # for a command of ExecStartPre=
# What a service of the user's systemd has of its manager's environment; all else comes from the unit.
KEPT = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR",
    "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME",
)  # fmt: skip


class Supervisor:
    """One unit, its present process and its starts."""

    def __init__(self, unit_file: Path, status_file: Path) -> None:
        runtime = str(unit_file.parent / "runtime")
        self._unit: Unit = parse(unit_file.stem, unit_file.read_text(encoding="utf-8"), runtime)
        self._status = status_file
        self._child: subprocess.Popen[bytes] | None = None
        self._stop = False  # no Event: its set() in a signal's handler can wait for ever for the lock of its wait()
        self._starts: deque[float] = deque()
        self._restarts = 0

    def run(self) -> int:
        """Until it is told to stop (0), or the limit of starts is met, or the command ended and shall (its code)."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._asked_to_stop)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal that this was started from has closed
        try:
            return self._starts_until_over()
        finally:  # also of a fault of our own, as a full disk: nothing runs that nobody knows of
            if self._child is not None:
                self._kill_group(self._child.pid)
                self._child.wait(timeout=KILLED_S)

    def _starts_until_over(self) -> int:
        while True:
            code = self._once()
            if self._stop:
                return self._end("stopped", code, 0)
            over = self._unit.restart == "no" or (self._unit.restart == "on-failure" and code == 0)
            if over or code in self._unit.never_again:
                return self._end("ended" if code == 0 else "failed", code, abs(code))
            if self._too_many():
                print(f"{self._unit.name}: started {len(self._starts)} times in a row: given up", flush=True)
                return self._end("failed", code, 1)
            pause = min(self._unit.restart_s * GROWTH ** min(self._restarts, MOST_GROWTHS), self._unit.restart_most_s)
            self._write("waiting", code)
            print(f"{self._unit.name}: ended with {code}; started again in {pause:g} s", flush=True)
            if self._pause(pause):
                return self._end("stopped", code, 0)
            self._restarts += 1

    def _pause(self, seconds: float) -> bool:
        """Waits, but no longer than until a stop is asked for; whether it is."""
        until = time.monotonic() + seconds
        while not self._stop and time.monotonic() < until:
            time.sleep(min(LOOK_S, seconds))
        return self._stop

    def _once(self) -> int:
        """One start, until its end; the exit code, negative for a signal."""
        self._starts.append(time.monotonic())
        try:
            options = self._options()
            for folder in self._unit.folders:
                Path(folder).mkdir(mode=0o755, parents=True, exist_ok=True)
                if "user" in options:
                    os.chown(folder, options["user"], options["group"])
            for command in self._unit.before:
                done = subprocess.run(command, timeout=PRE_SECONDS, **options)
                if done.returncode:
                    return done.returncode
            self._child = subprocess.Popen(self._unit.argv, stdin=subprocess.DEVNULL, start_new_session=True, **options)
        except (OSError, KeyError, subprocess.SubprocessError, DeployFailed) as error:
            print(f"{self._unit.name}: cannot be started: {error}", flush=True)
            return 203  # what systemd says then
        if self._stop:  # told between the fork and here
            self._signal_child()
        self._write("running", None)
        code = self._wait()
        self._kill_group(self._child.pid)
        self._child = None
        return code

    def _options(self) -> dict[str, Any]:
        """Environment, folder and user of the command: no more of this process' environment than systemd gives."""
        environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        options: dict[str, Any] = {"cwd": self._unit.folder or "/"}
        if self._unit.user is not None:
            user = pwd.getpwnam(self._unit.user)
            environment |= {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "SHELL": user.pw_shell}
            if user.pw_uid != os.geteuid():
                groups = os.getgrouplist(user.pw_name, user.pw_gid)
                options |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": groups}
        return {**options, "env": {**environment, **self._unit.settled_environment()}}

    def _wait(self) -> int:
        """The child's exit code; once a stop is asked for, within its time, or it is killed."""
        assert self._child is not None
        until = None
        while True:
            try:
                return self._child.wait(timeout=LOOK_S)
            except subprocess.TimeoutExpired:
                if self._stop:
                    until = until or time.monotonic() + self._unit.stop_s
                    if time.monotonic() > until:
                        print(f"{self._unit.name}: not ended within {self._unit.stop_s:g} s: killed", flush=True)
                        self._kill_group(self._child.pid)

    def _asked_to_stop(self, _number: int, _frame: Any) -> None:
        if not self._stop:
            self._stop = True
            self._signal_child()

    def _signal_child(self) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal_number(self._unit.stop_signal))

    def _kill_group(self, group: int) -> None:
        """What is left of the command's processes, as systemd ends what is left in the unit's group."""
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return

    def _too_many(self) -> bool:
        newest = self._starts[-1]
        while self._starts and newest - self._starts[0] > self._unit.interval_s:
            self._starts.popleft()
            self._restarts = 0  # it ran for long enough: the next pause is short again
        return self._unit.burst > 0 and len(self._starts) >= self._unit.burst

    def _end(self, state: str, code: int, own: int) -> int:
        self._write(state, code)
        return own

    def _write(self, state: str, code: int | None) -> None:
        child = Process.find(self._child.pid) if self._child is not None else None
        own = Process.find(os.getpid())
        told = {
            "state": state,
            "code": code,
            "supervisor": [own.pid, own.start] if own else None,
            "child": [child.pid, child.start] if child else None,
            "starts": len(self._starts),
            "restarts": self._restarts,
            "at": time.time(),
        }
        write(self._status, json.dumps(told), 0o644)


if __name__ == "__main__":
    if os.fork():
        os._exit(0)  # who started this goes on
    os.setsid()
    sys.exit(Supervisor(Path(sys.argv[1]), Path(sys.argv[2])).run())
