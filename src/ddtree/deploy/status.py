"""What the services of this host do now, as plain data and as a table."""

from dataclasses import asdict, dataclass
from typing import Any

from ddtree.bench.tables import format_table
from ddtree.deploy.compare import shown
from ddtree.deploy.live import acceptance_of, mode_of
from ddtree.deploy.site import Site, endpoint

COLUMNS = ["replica", "port", "gpus", "manager", "health", "mode"]
FIGURES = ["acceptance", "running", "waiting", "tok/s", "generation"]


@dataclass(frozen=True)
class Row:
    """One replica."""

    replica: str
    port: int
    gpus: tuple[str, ...]
    manager: str  # what the manager says of its process
    health: str  # ok, or what it answered; left out: the router sends it nothing
    mode: str | None
    acceptance_length: float | None  # since its start
    running: int | None
    waiting: int | None
    tok_s: float | None  # of one request's decoding, the mean since its start
    generation: int


def look(site: Site) -> dict[str, Any]:
    """Everything that `ddtree deploy status --json` prints."""
    rows = [_row(site, service) for service in sorted(site.state.services)]
    found = [row for row in rows if row is not None]
    state, current, previous = site.state, site.folder.pointed("current"), site.folder.pointed("previous")
    door, router = site.door(), None
    if door is not None and door.door is not None:
        service = site.manager.state(door.door.service)
        router = {**asdict(door.door), "manager": service.state, "restarts": service.restarts}
    return {
        "folder": str(site.folder.path),
        "manager": site.manager.name,
        "current": current.number if current else None,
        "previous": previous.number if previous else None,
        "replicas": [asdict(row) for row in found],
        "router": router,
        "interrupted": asdict(state.operation) if state.operation else None,
        "stands_in": asdict(state.beside) if state.beside else None,
        "well": bool(found)
        and all(row.health == "ok" for row in found)
        and (router is None or router["manager"] == "running")
        and state.operation is None,
    }


def as_text(found: dict[str, Any]) -> str:
    """The table, and what is unusual under it."""
    rows = [
        [
            row["replica"], str(row["port"]), ",".join(row["gpus"]) or "-", row["manager"], row["health"],
            row["mode"] or "-", shown(row["acceptance_length"]), _count(row["running"]), _count(row["waiting"]),
            shown(row["tok_s"]), str(row["generation"]),
        ]
        for row in found["replicas"]
    ]  # fmt: skip
    lines = [format_table([*COLUMNS, *FIGURES], rows, left=(0, 2, 3, 4, 5))] if rows else ["no replica runs here"]
    if router := found["router"]:
        lines.append(f"router: {router['kind']} on {router['address']}, {router['manager']}")
    lines.append(f"generation {found['current'] or '-'}, previous {found['previous'] or '-'}; {found['folder']}")
    if operation := found["interrupted"]:
        lines.append(
            f"a {operation['kind']} to generation {operation['target']}, begun {operation['began']}, is under way or "
            "was interrupted: the same command goes on, ddtree deploy rollback undoes it"
        )
    if stands := found["stands_in"]:
        lines.append(f"{stands['service']} stands in for {stands['stands_for']} at {stands['address']}")
    return "\n".join(lines)


def _row(site: Site, service: str) -> Row | None:
    generation = site.running_generation(service)
    member = generation.member(service) if generation is not None else None
    if generation is None or member is None:
        return None
    at = endpoint(member, generation.unit(service))
    state = site.manager.state(service)
    healthy, said = at.healthy()
    counters = at.counters() if healthy else {}
    running, waiting = (healthy and at.load()) or (None, None)
    health = "ok" if healthy else said
    if service in site.state.drained:
        health = "left out" if healthy else f"left out, {said}"
    restarts = f" ({state.restarts} restarts)" if state.restarts else ""
    return Row(
        service, int(member.address.rpartition(":")[2]), member.gpus, f"{state.state}{restarts}", health,
        mode_of(at.info()) if healthy else None, acceptance_of(counters), running, waiting, _rate(counters),
        generation.number,
    )  # fmt: skip


def _rate(counters: dict[str, float]) -> float | None:
    seconds = counters.get("ddtree_decode_seconds_sum", 0.0)
    if seconds:
        return counters.get("ddtree_request_generated_tokens_sum", 0.0) / seconds
    return counters.get("sglang:gen_throughput")


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)
