"""From what runs to a generation, one replica at a time; and back again for all that was touched, when one fails.

`apply`, `rollout` and `rollback` are this with other targets and other checks.
"""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ddtree.deploy import beside
from ddtree.deploy.compare import Checks
from ddtree.deploy.failures import DeployFailed
from ddtree.deploy.live import Endpoint
from ddtree.deploy.routers import Nginx
from ddtree.deploy.site import POLL_S, Site, endpoint
from ddtree.deploy.state import Door, Generation, Member, begin

LISTENS_S = 20.0  # for a router to take connections


@dataclass(frozen=True)
class Way:
    """How a replica is replaced."""

    checks: Checks | None = None  # None: health alone
    beside_port: int | None = None  # for a second replica that stands in for the only one


def changed(site: Site, target: Generation) -> list[Member]:
    """The replicas of a generation that do not run as it says, in order."""
    return [member for member in target.members if not _is_there(site, target, member)]


def gone(site: Site, target: Generation) -> list[str]:
    """The services that run and are not in a generation."""
    return [service for service in sorted(site.state.services) if service not in target.units]


def router_change(site: Site, target: Generation) -> str | None:
    """What the router needs: start, restart or reload; None where it runs as the generation says."""
    door = target.door
    if door is None:
        return None
    running = site.running_generation(door.service)
    if running is None or not site.manager.state(door.service).running:
        return "start"
    if running.unit_print(door.service) != target.unit_print(door.service):
        return "restart"
    return "reload" if any(_differs(place, text) for place, text in target.own_files(door.service).items()) else None


def nothing_to_do(site: Site, target: Generation) -> bool:
    """Whether all runs as a generation says."""
    return not changed(site, target) and not gone(site, target) and router_change(site, target) is None


def converge(site: Site, kind: str, target: Generation, way: Way) -> None:
    """Brings every service to the target. Raises DeployFailed after putting back what was touched."""
    source = site.folder.pointed("current")
    begin(site.folder, site.state, kind, source.number if source else None, target.number)
    guarded(site, lambda: _forward(site, target, way))
    settle(site, target)


def guarded(site: Site, work: Callable[[], None]) -> None:
    """Runs a part of an operation; when it fails, puts back all that the operation touched, then raises why."""
    try:
        work()
    except (DeployFailed, OSError) as error:
        left = put_back(site)
        outcome = "what ran before is back" if not left else f"not all could be put back: {'; '.join(left)}"
        separator = "\n" if "\n" in str(error) else "; "  # behind lines of a log
        raise DeployFailed(f"{error}{separator}{outcome}") from error


def settle(site: Site, target: Generation) -> None:
    """The end of an operation: the target is what is current."""
    former = site.folder.pointed("current")
    keep = former is not None and former.number != target.number
    for service, number in site.state.services.items():
        if service in target.units and site.folder.generation(number).print_of(service) == target.print_of(service):
            site.state.services[service] = target.number
    site.folder.point(target.number, former.number if keep and former else None)
    site.state.operation = None
    site.save()
    site.folder.prune()


def put_back(site: Site) -> list[str]:
    """Every touched service as it was before the operation, in reverse. Returns what could not be put back."""
    operation = site.state.operation
    left: list[str] = []
    if operation is None:
        return left
    site.tell("putting back what ran before ...")
    for service, number in reversed(list(operation.touched.items())):
        try:
            _restore(site, service, number)
        except (DeployFailed, OSError) as error:
            left.append(f"{service}: {error}")
    try:
        beside.clear(site)  # last: it has the traffic as long as the replica itself is not back
    except (DeployFailed, OSError) as error:
        left.append(str(error))
    if not left:
        site.state.operation = None
        site.save()
    return left


def replace_one(site: Site, target: Generation, member: Member, way: Way) -> None:
    """One replica out of the router, stopped, started anew, checked, and back in."""
    service = member.service
    site.touch(service)
    old = site.running_generation(service)
    before = old.member(service) if old is not None else None
    running = site.manager.state(service).running
    if old is not None and before is not None and running:
        alone = not [one for one in site.members() if one.service != service]
        if old.print_of(service) == target.print_of(service):
            _check_again(site, target, member, way)  # an interrupted command had come so far
            return
        if way.beside_port is not None and alone and site.router() is not None:
            beside.switch(site, target, member, before, way.beside_port, way.checks)
            return
        site.drain(before, old.unit(service))
        _measure(site, way, service, endpoint(before, old.unit(service)))
        site.stop(service)
    else:
        site.leave_out(before or member)  # else the router would send requests to what has not passed its checks
        if site.manager.state(service).state != "stopped":
            site.stop(service)  # failed, or between two starts
    site.install(target, service)
    took = site.start(target, member)
    _check(site, target, member, way, f"{service}: healthy after {took:.1f} s")
    site.let_in(member, before)


def _check_again(site: Site, target: Generation, member: Member, way: Way) -> None:
    at = endpoint(member, target.unit(member.service))
    site.wait_healthy(member.service, at)
    site.drain(member, target.unit(member.service))
    _check(site, target, member, way, f"{member.service}: runs already")
    site.let_in(member)


def _check(site: Site, target: Generation, member: Member, way: Way, said: str) -> None:
    """Smoke test and comparison, where they are asked for."""
    if way.checks is not None:
        if way.checks.limits.compare and not way.checks.baselines:
            _measure_other(site, target, member, way.checks)
        at = endpoint(member, target.unit(member.service))
        verdict = way.checks.decide(member.service, way.checks.probe(member.service, at))
        said += f"; {verdict.line()}" if verdict is not None else "; the smoke test passed, nothing was compared"
    site.tell(said)


def _measure(site: Site, way: Way, service: str, at: Endpoint) -> None:
    if way.checks is not None and (said := way.checks.baseline(service, at)):
        site.tell(said)


def _measure_other(site: Site, target: Generation, member: Member, checks: Checks) -> None:
    """The baseline of another replica that still runs as before, for one that did not run."""
    for other in site.members():
        generation = site.running_generation(other.service)
        if generation is None or generation.print_of(other.service) == target.print_of(other.service):
            continue
        if other.service != member.service and other.service not in site.state.drained:
            said = checks.baseline(other.service, endpoint(other, generation.unit(other.service)))
            site.tell(said or f"{member.service} is compared with {other.service}, which has traffic meanwhile")
            return


def _forward(site: Site, target: Generation, way: Way) -> None:
    for member in changed(site, target):
        replace_one(site, target, member, way)
    beside.clear(site)  # of an interrupted command
    _turn_router(site, target)
    for service in gone(site, target):
        site.touch(service)
        running = site.running_generation(service)
        former = running.member(service) if running is not None else None
        if running is not None and former is not None and site.manager.state(service).running:
            site.wait_idle(service, endpoint(former, running.unit(service)))
        site.forget(service)
        site.tell(f"{service}: stopped and removed")


def _restore(site: Site, service: str, number: int | None) -> None:
    if number is None:
        if service in site.state.services:
            site.forget(service)
        return
    former = site.folder.generation(number)
    member = former.member(service)
    if member is None:
        _turn_router(site, former)
    elif site.state.services.get(service) == number and site.manager.state(service).running:
        site.wait_healthy(service, endpoint(member, former.unit(service)))
        site.let_in(member)
    else:
        replace_one(site, former, member, Way())
    site.tell(f"{service}: generation {number} again")


def _turn_router(site: Site, target: Generation) -> None:
    """The router as the generation has it. Its own start anew is the one thing here that clients may notice."""
    change, door = router_change(site, target), target.door
    if door is None or change is None:
        if door is not None:
            site.state.services[door.service] = target.number
            site.save()
        return
    site.touch(door.service)
    if change == "reload" and door.kind == "nginx":
        nginx = site.router()
        assert isinstance(nginx, Nginx)
        assert door.config is not None
        texts = target.own_files(door.service)
        nginx.load(texts[door.config])
        site.install(target, door.service)
        site.tell(f"{door.service}: reloaded")
        return
    if site.manager.state(door.service).state != "stopped":
        site.tell(f"{door.service}: starts anew, so requests are refused for a moment")
        site.stop(door.service)
    site.install(target, door.service)
    site.manager.start(door.service)
    _wait_for_door(site, door)
    site.tell(f"{door.service}: listens on {door.address}")


def _wait_for_door(site: Site, door: Door) -> None:
    host, _, port = door.address.rpartition(":")
    host = "127.0.0.1" if host in ("0.0.0.0", "") else host
    until = time.monotonic() + LISTENS_S
    while True:
        found = site.manager.state(door.service)
        if found.state in ("failed", "waiting") or found.restarts:
            raise DeployFailed(f"{door.service} died; its last lines:\n{site.manager.logs(door.service, 20)}")
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            if found.running:
                return
        except OSError:
            time.sleep(POLL_S)
        if time.monotonic() > until:
            raise DeployFailed(f"{door.service} does not listen on {door.address} after {LISTENS_S:g} s")


def _is_there(site: Site, target: Generation, member: Member) -> bool:
    running = site.running_generation(member.service)
    if running is None or running.print_of(member.service) != target.print_of(member.service):
        return False
    if member.service in site.state.drained or not site.manager.state(member.service).running:
        return False
    healthy, _ = endpoint(member, target.unit(member.service)).healthy()
    return healthy


def _differs(place: str, text: str) -> bool:
    try:
        return Path(place).read_text(encoding="utf-8") != text
    except FileNotFoundError:
        return True
