"""What starts and stops services: one protocol, for systemd (`systemd`) and for processes of our own (`processes`)."""

from dataclasses import dataclass
from typing import Protocol

MANAGERS = ("auto", "systemd", "processes")


@dataclass(frozen=True)
class Service:
    """What a manager says of one service."""

    state: str  # running, starting, waiting (for another start), failed, ended, stopped, unsupervised
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
