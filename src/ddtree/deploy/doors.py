"""The router's own service: started, reloaded, or started anew, as a generation has it."""

import socket
import time
from pathlib import Path

from ddtree.deploy.failures import DeployFailed
from ddtree.deploy.generation import Door, Generation
from ddtree.deploy.routers import Nginx, unread
from ddtree.deploy.site import POLL_S, SHOWN, Site, check_free

LISTENS_S = 20.0  # for a router to take connections


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
    if door.config is not None and unread(Path(door.config)).exists():
        return "reload"
    return "reload" if any(_differs(place, text) for place, text in target.own_files(door.service).items()) else None


def turn_router(site: Site, target: Generation) -> None:
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
    check_free(door.service, door.address)
    site.install(target, door.service)
    if door.config is not None:
        unread(Path(door.config)).unlink(missing_ok=True)  # a start reads it
    site.manager.start(door.service)
    _wait_for_door(site, door)
    site.tell(f"{door.service}: listens on {door.address}")


def _wait_for_door(site: Site, door: Door) -> None:
    host, _, port = door.address.rpartition(":")
    host = host.strip("[]")
    until = time.monotonic() + LISTENS_S
    while True:
        found = site.manager.state(door.service)
        if found.state in ("failed", "ended", "waiting") or found.restarts:
            raise DeployFailed(f"{door.service} died; its last lines:\n{site.manager.logs(door.service, SHOWN)}")
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            if found.running:
                return
        except OSError:
            time.sleep(POLL_S)
        if time.monotonic() > until:
            raise DeployFailed(f"{door.service} does not listen on {door.address} after {LISTENS_S:g} s")


def _differs(place: str, text: str) -> bool:
    try:
        return Path(place).read_text(encoding="utf-8") != text
    except FileNotFoundError:
        return True
