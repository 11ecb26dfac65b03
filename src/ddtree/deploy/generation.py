"""A generation: the rendered files of one host, and what the commands on live services need to know of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddtree.deploy.unit_file import Unit, parse


@dataclass(frozen=True)
class Member:
    """One replica of a generation, as far as the commands on live services need it."""

    service: str  # its unit's name, without .service
    index: int
    host: str
    address: str  # host:port where it answers
    gpus: tuple[str, ...]
    mode: str
    engine: str


@dataclass(frozen=True)
class Door:
    """The router in front of a generation's replicas."""

    kind: str  # nginx or sglang-router
    service: str
    address: str  # where it listens
    config: str | None = None  # path of its rendered configuration, for nginx


@dataclass(frozen=True)
class Generation:
    """A generation: on disk, or (number 0) not written yet."""

    number: int
    texts: dict[str, str] = field(repr=False)  # rendered path -> text
    members: tuple[Member, ...]
    door: Door | None
    units: dict[str, str]  # service -> its unit's rendered path
    places: dict[str, str]  # rendered path -> where it belongs, for all but units
    purpose: str = "given"  # or shadow: the same with mode shadow-linear

    @classmethod
    def of(cls, number: int, texts: Mapping[str, str], facts: Mapping[str, Any]) -> "Generation":
        """From rendered files and what generation.json holds. Raises KeyError and TypeError where that is damaged."""
        members = tuple(Member(**{**one, "gpus": tuple(one["gpus"])}) for one in facts["members"])
        door = Door(**facts["door"]) if facts["door"] else None
        return cls(number, dict(texts), members, door, facts["units"], facts["places"], facts["purpose"])

    def unit_text(self, service: str) -> str:
        """A service's unit as it is written."""
        return self.texts[self.units[service]]

    def unit(self, service: str) -> Unit:
        """A service's unit, read."""
        return parse(service, self.unit_text(service))

    def member(self, service: str) -> Member | None:
        """The replica of this service."""
        return next((member for member in self.members if member.service == service), None)

    def own_files(self, service: str) -> dict[str, str]:
        """What this service reads beside its unit: place -> text."""
        unit = self.unit(service)
        wanted = {path for path, _ in unit.environment_files}
        if self.door is not None and service == self.door.service:
            members = {place for m in self.members for place, _ in self.unit(m.service).environment_files}
            wanted |= set(self.places.values()) - members
        return {place: self.texts[path] for path, place in self.places.items() if place in wanted}

    def print_of(self, service: str) -> tuple[str, tuple[tuple[str, str], ...]] | None:
        """What makes a service another one when it changes: its unit and what it reads. None where it is not here."""
        if service not in self.units:
            return None
        files = tuple(sorted((place, _meaning(text)) for place, text in self.own_files(service).items()))
        return self.unit_print(service), files

    def unit_print(self, service: str) -> str:
        """The unit alone, without what changes nothing."""
        return _meaning(self.unit_text(service))


def _meaning(text: str) -> str:
    """A file without what changes nothing: comments, and where it was rendered from."""
    lines = (line for line in text.splitlines() if not line.startswith(("#", "Source=")))
    return "\n".join(lines).strip()
