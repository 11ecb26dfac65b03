"""The only replica replaced without a gap: the new one first stands in on a spare port, beside the old one."""

import csv
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

from ddtree.deploy.compare import Checks
from ddtree.deploy.failures import DeployFailed
from ddtree.deploy.generation import Generation, Member
from ddtree.deploy.procs import tree_memory
from ddtree.deploy.site import Site, check_free, endpoint, put_files
from ddtree.deploy.state import Beside
from ddtree.deploy.unit_file import parse

ROOM = 1.1  # what must be free, as a multiple of what the running replica holds
MIB = 1 << 20


def switch(site: Site, target: Generation, member: Member, before: Member, port: int, checks: Checks | None) -> None:
    """Start beside, check, move the traffic over, replace the old one at its own port, move the traffic back."""
    service, old = member.service, site.running_generation(member.service)
    router = site.router()
    assert old is not None
    assert router is not None
    clear(site)  # of an interrupted command
    stand_in = replace(member, service=f"{service}-beside", address=f"{member.address.rpartition(':')[0]}:{port}")
    text = on_port(target.unit_text(service), member.address.rpartition(":")[2], port)
    check_room(site, service, before)
    check_free(stand_in.service, stand_in.address)
    site.state.beside = Beside(stand_in.service, stand_in.address, service, member.address)
    site.save()
    put_files(target, service)
    site.manager.install(stand_in.service, text)
    site.manager.start(stand_in.service)
    at = endpoint(stand_in, parse(stand_in.service, text))
    site.wait_healthy(stand_in.service, at)
    found = checks.probe(service, at) if checks is not None else None
    site.tell(f"{stand_in.service}: healthy on port {port}; the traffic moves there")
    router.move(before.address, stand_in.address)
    site.wait_idle(service, endpoint(before, old.unit(service)))
    if checks is not None and found is not None:
        # Each is measured while the other one has the traffic.
        if said := checks.baseline(service, endpoint(before, old.unit(service))):
            site.tell(said)
        verdict = checks.decide(service, found)
        site.tell(f"{service}: {verdict.line()}" if verdict is not None else f"{service}: the smoke test passed")
    site.stop(service)
    site.install(target, service)
    took = site.start(target, member)
    site.tell(f"{service}: healthy after {took:.1f} s; the traffic moves back")
    clear(site)


def clear(site: Site) -> None:
    """Takes away what stands in, once the replica at its own port has the traffic."""
    stands = site.state.beside
    if stands is None:
        return
    router, generation = site.router(), site.running_generation(stands.stands_for)
    state = site.manager.state(stands.service)
    if router is not None and generation is not None:
        at = endpoint(generation.members[0], generation.unit(stands.stands_for))
        if not at.healthy()[0]:
            raise DeployFailed(f"{stands.service} goes on at {stands.address}: {stands.stands_for} is not healthy")
        router.move(stands.address, stands.home)
        router.let_in(stands.home)
        if state.running:
            site.wait_idle(stands.service, replace(at, address=stands.address))
    if state.state != "stopped":
        site.stop(stands.service)
    site.manager.uninstall(stands.service)
    site.state.beside = None
    site.save()


def on_port(text: str, old: str, new: int) -> str:
    """A unit whose command, health check included, names another port."""
    named = rf"(?P<before>--port |://[^/\s]+:|, port |^Port=){old}(?!\d)"  # a number elsewhere is another thing's
    changed = re.sub(named, lambda found: f"{found['before']}{new}", text, flags=re.MULTILINE)
    if changed == text:
        raise DeployFailed(f"the unit names no port {old}, so a second replica cannot get another one")
    return changed


def check_room(site: Site, service: str, member: Member) -> None:
    """Raises DeployFailed where a second replica like the running one finds too little memory."""
    pid = site.manager.state(service).pid
    if pid is None:
        return
    needed, free = ROOM * tree_memory(pid), _available()
    if free is not None and needed > free:
        raise DeployFailed(
            f"a second replica needs about {needed / MIB:.0f} MiB and {free / MIB:.0f} MiB are available: leave "
            "--beside-port out"
        )
    for gpu in member.gpus:
        used, left = gpu_memory(gpu)
        if ROOM * used > left:
            raise DeployFailed(
                f"GPU {gpu} has {left} MiB free, and the running replica uses {used}: leave --beside-port out"
            )


def gpu_memory(gpu: str) -> tuple[int, int]:
    """MiB used and free on a card. Raises DeployFailed where nvidia-smi does not tell."""
    if shutil.which("nvidia-smi") is None:
        raise DeployFailed(f"GPU {gpu} cannot be asked for its free memory: there is no nvidia-smi")
    command = ["nvidia-smi", "--id", gpu, "--query-gpu=memory.used,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        used, free = next(csv.reader(done.stdout.splitlines()))
        return int(used), int(free)
    except (OSError, ValueError, StopIteration, subprocess.TimeoutExpired) as error:
        raise DeployFailed(f"GPU {gpu} cannot be asked for its free memory: {error}") from error


def _available() -> int | None:
    """Bytes that may be taken without swapping."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"MemAvailable:\s*(\d+) kB", text)
    return int(found[1]) * 1024 if found else None
