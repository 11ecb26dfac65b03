"""From what runs to a generation, one replica at a time; and back again for all that was touched, when one fails.

`apply`, `rollout` and `rollback` are this with other targets and other checks.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ddtree.deploy import beside
from ddtree.deploy.compare import Checks
from ddtree.deploy.doors import router_change, turn_router
from ddtree.deploy.failures import DeployFailed
from ddtree.deploy.generation import Generation, Member
from ddtree.deploy.live import Endpoint
from ddtree.deploy.site import Site, endpoint, put_files
from ddtree.deploy.state import begin
from ddtree.errors import DDTreeError


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
    except Exception as error:  # also of a fault of our own: services are put back whatever it was
        left = put_back(site)
        outcome = "what ran before is back" if not left else f"not all could be put back: {'; '.join(left)}"
        separator = "\n" if "\n" in str(error) else "; "  # behind lines of a log
        said = str(error) if isinstance(error, DDTreeError | OSError) else f"{type(error).__name__}: {error}"
        raise DeployFailed(f"{said}{separator}{outcome}") from error


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
        except Exception as error:  # the others are put back all the same
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
    turn_router(site, target)
    for service in gone(site, target):
        site.touch(service)
        running = site.running_generation(service)
        former = running.member(service) if running is not None else None
        up = site.manager.state(service).running and site.router() is not None  # which sends it nothing any more
        if running is not None and former is not None and up:
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
        turn_router(site, former)
    elif site.state.services.get(service) == number and site.manager.state(service).running:
        put_files(former, service)  # a stand-in may have had others
        site.wait_healthy(service, endpoint(member, former.unit(service)))
        site.let_in(member)
    else:
        replace_one(site, former, member, Way())
    site.tell(f"{service}: generation {number} again")


def _is_there(site: Site, target: Generation, member: Member) -> bool:
    running = site.running_generation(member.service)
    if running is None or running.print_of(member.service) != target.print_of(member.service):
        return False
    if member.service in site.state.drained or not site.manager.state(member.service).running:
        return False
    healthy, _ = endpoint(member, target.unit(member.service)).healthy()
    return healthy
