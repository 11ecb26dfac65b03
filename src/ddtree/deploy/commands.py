"""What `ddtree deploy` does to the services of this host: apply, rollout, rollback and remove."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddtree.deploy import ours, trial
from ddtree.deploy.choose import choose
from ddtree.deploy.compare import Checks, Limits
from ddtree.deploy.converge import (
    Way,
    changed,
    converge,
    gone,
    nothing_to_do,
    put_back,
)  # fmt: skip
from ddtree.deploy.doors import router_change
from ddtree.deploy.draft import Draft, draft, shadow
from ddtree.deploy.failures import DeployFailed
from ddtree.deploy.generation import Generation
from ddtree.deploy.site import Site, Waits
from ddtree.deploy.spec import Deployment
from ddtree.deploy.state import Folder

KEEPABLE = ("generations", "logs")


@dataclass(frozen=True)
class Asked:
    """What every command is given."""

    path: Path
    sets: tuple[str, ...] = ()
    host: str | None = None
    manager: str = "auto"
    start_s: float | None = None  # None: the file's start_seconds
    drain_s: float = Waits.drain
    tell: Callable[[str], None] = print
    agree: Callable[[str], bool] = field(default=lambda _question: True)  # asks the user


@dataclass(frozen=True)
class Outcome:
    """How a command ended: whether anything was changed, and figures for --json."""

    changed: bool
    generation: int | None
    figures: dict[str, Any] = field(default_factory=dict)


def open_site(asked: Asked, deployment: Deployment) -> Site:
    """The services of this host, with the manager that they were started by. Raises DeployFailed."""
    folder = Folder(deployment.state_folder)
    state = folder.state()
    wanted = asked.manager
    if state.services and state.manager is not None:
        if wanted not in ("auto", state.manager):
            raise DeployFailed(
                f"the services of {deployment.name} were started by {state.manager}, and --manager {wanted} would "
                "start them twice: ddtree deploy remove first"
            )
        wanted = state.manager
    manager, why = choose(wanted, deployment.scope, folder.path)
    started = asked.manager == "auto" and wanted != "auto"
    asked.tell(f"manager: {f'{wanted}: it started what runs' if started else why}")
    waits = Waits(deployment.start_seconds if asked.start_s is None else asked.start_s, asked.drain_s)
    return Site(folder, manager, waits, asked.tell)


def apply(asked: Asked, dry_run: bool = False) -> Outcome:
    """This host's services as the file says: starts what is new, restarts what changed, stops what is gone."""
    return _change(asked, "apply", Way(), dry_run)


def rollout(
    asked: Asked,
    limits: Limits,
    dry_run: bool = False,
    beside_port: int | None = None,
    trial_limits: "trial.Trial | None" = None,
) -> Outcome:
    """As apply, each new replica compared with the old one; with `trial_limits` its trees run in the shadow first."""
    return _change(asked, "rollout", Way(Checks(limits), beside_port), dry_run, trial_limits)


def rollback(asked: Asked) -> Outcome:
    """Undoes an interrupted command; else goes back to the previous generation, by health and smoke test alone."""
    deployment, _ = draft(asked.path, asked.sets, asked.host)
    with Folder(deployment.state_folder).held("ddtree deploy rollback"):
        site = open_site(asked, deployment)
        operation = site.state.operation
        if operation is not None:
            if not asked.agree(f"undo the interrupted {operation.kind} to generation {operation.target}?"):
                return Outcome(False, operation.source)
            if left := put_back(site):
                raise DeployFailed(f"not all could be put back: {'; '.join(left)}")
            return Outcome(True, operation.source)
        current, target = site.folder.pointed("current"), site.folder.pointed("previous")
        if current is None or target is None:
            raise DeployFailed(f"{site.folder.path} holds no previous generation: nothing to go back to")
        asked.tell(Draft(target.texts, {}, "", ()).difference(current))
        if not asked.agree(f"go back from generation {current.number} to {target.number}?"):
            return Outcome(False, current.number)
        converge(site, "rollback", target, Way(Checks(Limits(compare=False))))
        return Outcome(True, target.number)


def remove(asked: Asked, keep: Sequence[str] = ()) -> Outcome:
    """Stops and removes all services and the folder's contents, but what `keep` names."""
    unknown = [name for name in keep if name not in KEEPABLE]
    if unknown:
        raise DeployFailed(f"--keep {unknown[0]!r} is unknown: choose of {', '.join(KEEPABLE)}")
    deployment, _ = draft(asked.path, asked.sets, asked.host)
    folder = Folder(deployment.state_folder)
    if not folder.path.exists():
        raise DeployFailed(f"there is nothing of {deployment.name} here: {folder.path} does not exist")
    ours.refuse_others(folder.path)
    with folder.held("ddtree deploy remove"):
        site = open_site(asked, deployment)
        services = sorted(site.state.services)
        kept = f"but {', '.join(keep)}" if keep else "logs included"
        if not asked.agree(f"stop and remove {', '.join(services) or 'nothing'}, and all of {folder.path}, {kept}?"):
            return Outcome(False, None)
        door = site.door()
        first = door.door.service if door is not None and door.door is not None else None
        stands = [site.state.beside.service] if site.state.beside is not None else []
        for service in stands:
            site.manager.stop(service)
            site.manager.uninstall(service)
        for service in sorted(services, key=lambda name: name != first):  # the router first: it ends what runs
            site.forget(service)
            asked.tell(f"{service}: stopped and removed")
        ours.clean(folder.path, keep)
    if not any(folder.path.iterdir()):
        folder.path.rmdir()
    return Outcome(True, None)


def _change(asked: Asked, kind: str, way: Way, dry_run: bool, trial_limits: "trial.Trial | None" = None) -> Outcome:
    deployment, wanted = draft(asked.path, asked.sets, asked.host)
    in_shadow = shadow(asked.path, asked.sets, asked.host) if trial_limits is not None else None
    folder = Folder(deployment.state_folder)
    ours.refuse_others(folder.path)
    _tell_of_others(asked, deployment)
    if way.beside_port is not None:
        _check_beside(wanted.unwritten(), way.beside_port)
    if dry_run:
        return _show(asked, open_site(asked, deployment), wanted.unwritten(), kind)
    with folder.held(f"ddtree deploy {kind}"):
        site = open_site(asked, deployment)
        current, operation = folder.pointed("current"), site.state.operation
        if kind == "rollout" and current is None and operation is None:
            raise DeployFailed(f"nothing of {deployment.name} runs here yet: ddtree deploy apply starts it")
        if operation is not None:
            asked.tell(
                f"a {operation.kind} to generation {operation.target}, begun {operation.began}, was interrupted: this "
                "goes on from there (ddtree deploy rollback undoes it)"
            )
        if operation is None and wanted.same_as(current) and current and nothing_to_do(site, current):
            asked.tell(f"nothing to do: generation {current.number} runs")
            return Outcome(False, current.number)
        _show(asked, site, wanted.unwritten(), kind, way)
        if not asked.agree(f"{kind} this?"):
            return Outcome(False, current.number if current else None)
        figures: dict[str, Any] = {}
        if in_shadow is not None and trial_limits is not None:
            figures["shadow"] = trial.run(site, in_shadow.write(folder), way, trial_limits)
        target = wanted.write(folder)
        converge(site, kind, target, way)
        if way.checks is not None:
            figures["comparisons"] = way.checks.verdicts
        return Outcome(True, target.number, figures)


def _check_beside(target: Generation, port: int) -> None:
    """Raises DeployFailed where a second replica would have no use, or no port."""
    if len(target.members) != 1 or target.door is None:
        raise DeployFailed("--beside-port is for one replica behind a router: leave it out")
    known = [target.members[0].address, target.door.address]
    if any(address.endswith(f":{port}") for address in known):
        raise DeployFailed(f"--beside-port {port} is a port of the deployment itself: choose a free one")


def _show(asked: Asked, site: Site, target: Generation, kind: str, way: Way | None = None) -> Outcome:
    """The difference, and what it means for each service."""
    current = site.folder.pointed("current")
    if shown := Draft(target.texts, {}, "", ()).difference(current):
        asked.tell(shown)
    lines = []
    for member in changed(site, target):
        running = site.manager.state(member.service).running
        lines.append(f"{member.service}: {'replaced' if running else 'started'}")
        alone = len(target.members) == 1
        if running and alone and (way is None or way.beside_port is None):
            took = site.state.starts_s.get(member.service)
            last = f", the last time {took:g} s" if took is not None else ""
            lines.append(
                f"{member.service} is the only replica: requests are refused while it starts{last}; "
                "rollout --beside-port avoids that"
            )
    lines += [f"{service}: stopped and removed" for service in gone(site, target)]
    if target.door is not None and (change := router_change(site, target)):
        lines.append(f"{target.door.service}: {change}")
    asked.tell("\n".join(lines) or "no service changes")
    return Outcome(False, current.number if current else None, {"plan": lines, "command": kind})


def _tell_of_others(asked: Asked, deployment: Deployment) -> None:
    here = deployment.here(asked.host)
    others = [host for host in deployment.hosts if host != here]
    if others:
        asked.tell(
            f"only {here} is changed here. For {', '.join(others)}: copy {asked.path.name} there and run the same "
            "command on each, or copy what ddtree deploy render writes"
        )
        if deployment.router.reach == "all":
            asked.tell("the other hosts' routers are not told; they pass on what a stopping replica refuses")
