"""Processes by what the kernel says of them (Linux): a number alone may have gone to another one since."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.05


@dataclass(frozen=True)
class Process:
    """One process: its number and its start (clock ticks since boot), which together are never used twice."""

    pid: int
    start: int

    @classmethod
    def find(cls, pid: int) -> "Process | None":
        """The process that has this number now; None for none, and for one that has ended and is not fetched yet."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if fields[0] in ("Z", "X") else cls(pid, int(fields[19]))

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self.find(self.pid) == self

    def signal(self, number: int, group: bool = False) -> bool:
        """Sends a signal, to its whole group where asked; False where it is gone."""
        if not self.alive:
            return False
        try:
            os.killpg(self.pid, number) if group else os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Waits until it is gone, at most so long; whether it is."""
        until = time.monotonic() + seconds
        while self.alive:
            if time.monotonic() > until:
                return False
            time.sleep(POLL_S)
        return True


def children(pid: int) -> list[int]:
    """The numbers of a process' children."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def title(pid: int) -> str:
    """A process' command line, words joined by spaces; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def signal_number(name: str) -> int:
    """SIGTERM's number, or that of another one by its name."""
    return int(signal.Signals[name])


def tree_memory(pid: int) -> int:
    """Bytes that a process and all below it hold in memory; shared pages count once for each."""
    try:
        held = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return held + sum(tree_memory(child) for child in children(pid))
