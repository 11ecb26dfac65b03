"""This host's services in hand: start, stop, drain, and one replica put in another's place."""

import errno
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ddtree.deploy.atomic import write
from ddtree.deploy.failures import DeployFailed
from ddtree.deploy.generation import Generation, Member
from ddtree.deploy.live import Endpoint
from ddtree.deploy.managers import Manager
from ddtree.deploy.routers import Nginx, Router, SGLangRouter
from ddtree.deploy.state import Folder, State
from ddtree.deploy.unit_file import Unit

POLL_S = 0.2
QUIET = 2  # looks in a row that find no request, before a replica counts as idle
MISSED = 3  # looks in a row that find nothing told, before it counts as not telling
SHOWN = 20  # lines of a log behind an error
UNKNOWN_S = 10.0  # drained for so long where a server does not tell its load; its own stop lets answers end too
FREE_S = 10.0  # for a port to come free behind a service that has ended


@dataclass(frozen=True)
class Waits:
    """Seconds that each wait may take."""

    start: float = 1800.0
    drain: float = 300.0


class Site:
    """The folder, the manager and the present state, with the operations that change them in small whole steps."""

    def __init__(self, folder: Folder, manager: Manager, waits: Waits, tell: Callable[[str], None]) -> None:
        self.folder, self.manager, self.waits, self.tell = folder, manager, waits, tell
        self.state: State = folder.state()
        self.state.manager = manager.name

    def save(self) -> None:
        """Writes the state."""
        self.folder.save(self.state)

    # What runs.

    def running_generation(self, service: str) -> Generation | None:
        """The generation whose unit this service has now."""
        number = self.state.services.get(service)
        return None if number is None else self.folder.generation(number)

    def members(self) -> Iterator[Member]:
        """The replicas that are installed, each as its own generation has it."""
        for service in sorted(self.state.services):
            generation = self.running_generation(service)
            if generation is not None and (member := generation.member(service)) is not None:
                yield member

    def door(self) -> Generation | None:
        """The generation of the router that is installed."""
        for service in self.state.services:
            generation = self.running_generation(service)
            if generation is not None and generation.door is not None and generation.door.service == service:
                return generation
        return None

    def router(self) -> Router | None:
        """The router's controls; None where none is installed or it does not run."""
        generation = self.door()
        if generation is None or generation.door is None:
            return None
        door = generation.door
        if not self.manager.state(door.service).running:
            return None
        if door.kind == "nginx":
            assert door.config is not None
            return Nginx(self.manager, door.service, Path(door.config))
        return SGLangRouter(door.address)

    def touch(self, service: str) -> None:
        """Notes what a service ran before it is changed, once an operation."""
        operation = self.state.operation
        if operation is not None and service not in operation.touched:
            operation.touched[service] = self.state.services.get(service)
            self.save()

    # Steps.

    def install(self, generation: Generation, service: str) -> None:
        """Puts the unit and the files that it reads in place; what runs goes on."""
        # Noted first: after a kill in between, what was put in place is known, and is put right or taken away.
        self.state.services[service] = generation.number
        self.save()
        put_files(generation, service)
        self.manager.install(service, generation.unit_text(service))

    def start(self, generation: Generation, member: Member) -> float:
        """Starts an installed replica and waits until it is healthy; seconds that it took."""
        check_free(member.service, member.address)
        began = time.monotonic()
        self.manager.start(member.service)
        self.wait_healthy(member.service, endpoint(member, generation.unit(member.service)))
        took = time.monotonic() - began
        self.state.starts_s[member.service] = round(took, 1)
        self.save()
        return took

    def wait_healthy(self, service: str, at: Endpoint) -> None:
        """Raises DeployFailed with the log's last lines where it dies first, or the time is over."""
        until = time.monotonic() + self.waits.start
        while True:
            found = self.manager.state(service)
            if found.state in ("failed", "ended", "stopped", "waiting") or found.restarts:
                raise DeployFailed(
                    f"{service} died before it was healthy ({found.detail or found.state}); its last lines:\n"
                    f"{self.manager.logs(service, SHOWN)}"
                )
            healthy, said = at.healthy()
            if healthy:
                return
            if time.monotonic() > until:
                raise DeployFailed(
                    f"{service} was not healthy within {self.waits.start:g} s ({said}); start_seconds or "
                    f"--start-seconds gives it longer. Its last lines:\n{self.manager.logs(service, SHOWN)}"
                )
            time.sleep(POLL_S)

    def drain(self, member: Member, unit: Unit) -> None:
        """The router sends it nothing more, and what runs there ends. Raises DeployFailed when that takes too long.

        Where requests cannot go elsewhere there is nothing to wait for: the server's own stop lets answers end.
        """
        if self.leave_out(member):
            self.wait_idle(member.service, endpoint(member, unit))

    def leave_out(self, member: Member) -> bool:
        """The router sends nothing more to a replica, if another one answers; whether it is so."""
        if member.service not in self.state.drained:
            self.state.drained.append(member.service)
            self.save()
        others = [one for one in self.members() if one.service not in self.state.drained]
        router = self.router()
        if router is None or not any(self._answers(one) for one in others):
            return False
        router.leave_out(member.address)
        return True

    def wait_idle(self, service: str, at: Endpoint) -> None:
        """Returns when no request runs or waits there, or it answers nothing any more."""
        until, quiet, missed = time.monotonic() + self.waits.drain, 0, 0
        while quiet < QUIET:
            load = at.load()
            if load is None:
                missed += 1
                if missed >= MISSED:
                    self._wait_blindly(service, at)
                    return
                time.sleep(POLL_S)
                continue
            quiet, missed = quiet + 1 if not any(load) else 0, 0
            if time.monotonic() > until:
                raise DeployFailed(
                    f"{service} still has {load[0]} running and {load[1]} waiting requests after "
                    f"{self.waits.drain:g} s without new ones: --drain-seconds gives them longer"
                )
            time.sleep(POLL_S)

    def _wait_blindly(self, service: str, at: Endpoint) -> None:
        if at.healthy()[0]:
            self.tell(
                f"{service} does not tell how many requests it has (SGLang does with --enable-metrics in args): "
                f"{UNKNOWN_S:g} s for them to end"
            )
            time.sleep(min(UNKNOWN_S, self.waits.drain))

    def let_in(self, member: Member, before: Member | None = None) -> None:
        """The router sends it requests again; its address may be another than before."""
        router = self.router()
        if router is not None:
            if before is not None and before.address != member.address:
                router.move(before.address, member.address)
            router.let_in(member.address)
        if member.service in self.state.drained:
            self.state.drained.remove(member.service)
            self.save()

    def stop(self, service: str) -> None:
        """Stops it, as its unit says."""
        self.manager.stop(service)

    def forget(self, service: str) -> None:
        """Stops it and takes its unit away."""
        generation = self.running_generation(service)
        self.manager.stop(service)
        self.manager.uninstall(service)
        if generation is not None:
            for place in generation.own_files(service):
                Path(place).unlink(missing_ok=True)
        self.state.services.pop(service, None)
        self.state.starts_s.pop(service, None)
        if service in self.state.drained:
            self.state.drained.remove(service)
        self.save()

    def _answers(self, member: Member) -> bool:
        generation = self.running_generation(member.service)
        return generation is not None and endpoint(member, generation.unit(member.service)).healthy()[0]


def put_files(generation: Generation, service: str) -> None:
    """What a service reads, in its place: environment, which may hold secrets, for its owner alone."""
    environment = {path for path, _ in generation.unit(service).environment_files}
    for place, text in generation.own_files(service).items():
        write(Path(place), text, 0o600 if place in environment else 0o644)


def endpoint(member: Member, unit: Unit) -> Endpoint:
    """Where a replica answers, with the key that it was given."""
    key = unit.option("--api-key")
    if key is None:
        try:
            keys = unit.settled_environment().get("DDTREE_API_KEY", "").split()
        except DeployFailed:
            keys = []
        key = keys[0] if keys else None
    return Endpoint(member.address, key)


def check_free(service: str, at: str) -> None:
    """Raises DeployFailed where something else listens on a service's address (host:port)."""
    host, _, port = at.rpartition(":")
    family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    until = time.monotonic() + FREE_S
    while True:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
                return
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise DeployFailed(f"{service} cannot listen on {at}: {error}") from error
        if time.monotonic() > until:
            raise DeployFailed(
                f"{at} is taken by something that is no service of this deployment: stop it, or give {service} "
                "another port"
            )
        time.sleep(POLL_S)
