"""From a deployment's file to a generation of this host, and what would change against what runs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddtree.deploy.failures import DeployFailed
from ddtree.deploy.folder import difference
from ddtree.deploy.generation import Door, Generation, Member
from ddtree.deploy.render import render
from ddtree.deploy.routers import has
from ddtree.deploy.spec import Deployment, load
from ddtree.deploy.state import Folder
from ddtree.deploy.units import reached
from ddtree.errors import InvalidOption

SHADOW, SHADOW_OF = "shadow-linear", "tree"


@dataclass(frozen=True)
class Draft:
    """A generation that is not written yet."""

    files: dict[str, str]  # by path below the host's folder
    facts: dict[str, Any]
    given: str
    sets: tuple[str, ...]

    def same_as(self, generation: Generation | None) -> bool:
        """Whether a generation has the very same files."""
        return generation is not None and generation.texts == self.files

    def difference(self, generation: Generation | None) -> str:
        """A unified diff against a generation; secrets are not shown."""
        return difference(generation.texts if generation is not None else {}, self.files)

    def unwritten(self) -> Generation:
        """As a generation that has no number yet."""
        return Generation.of(0, self.files, self.facts)

    def write(self, folder: Folder) -> Generation:
        """As the folder's next generation; the current one where it is the same already."""
        current = folder.pointed("current")
        operation = folder.state().operation
        target = folder.generation(operation.target) if operation and operation.target in folder.numbers() else None
        for found in (current, target):
            if found is not None and self.same_as(found):
                return found
        return folder.add(self.files, self.facts, self.given, list(self.sets))


def draft(path: Path, sets: Sequence[str], host: str | None, purpose: str = "given") -> tuple[Deployment, Draft]:
    """This host's part of a deployment. Raises InvalidOption where this machine is none of its hosts."""
    deployment = load(path, sets)
    try:
        here = deployment.here(host)
    except InvalidOption as error:
        raise InvalidOption(
            f"{error}; another machine's services are changed there: copy {path.name} and run this command on it, or "
            "copy what ddtree deploy render writes"
        ) from error
    prefix = f"{here}/"
    files = {name.removeprefix(prefix): text for name, text in render(deployment).items() if name.startswith(prefix)}
    members = [
        Member(
            replica.name, replica.index, here, f"{reached(deployment.host)}:{replica.port}", replica.gpus,
            deployment.mode, deployment.engine,
        )
        for replica in deployment.on(here)
    ]  # fmt: skip
    door, place = None, str(deployment.state_folder)
    if deployment.routed != "none":
        config = f"{place}/nginx/{deployment.name}.conf" if deployment.routed == "nginx" else None
        address = f"{reached(deployment.router.host)}:{deployment.router.port}"
        door = Door(deployment.routed, deployment.router_name, address, config)
        if config is not None:
            _check_lines(files[f"nginx/{deployment.name}.conf"], members)
    units = {Path(name).stem: name for name in files if name.startswith("systemd/")}
    facts = {
        "name": deployment.name, "host": here, "purpose": purpose,
        "members": [asdict(member) for member in members],
        "door": asdict(door) if door is not None else None,
        "units": units,
        "places": {name: f"{place}/{name}" for name in files if name not in units.values()},
    }  # fmt: skip
    return deployment, Draft(files, facts, path.read_text(encoding="utf-8"), tuple(sets))


def shadow(path: Path, sets: Sequence[str], host: str | None) -> Draft:
    """The same deployment with its trees in the shadow of the chain. Raises DeployFailed for another mode than tree."""
    mode = load(path, sets).mode
    if mode != SHADOW_OF:
        raise DeployFailed(f"--shadow-first is for mode {SHADOW_OF}, and the file says {mode}: leave it out")
    return draft(path, [*sets, f'mode="{SHADOW}"'], host, purpose="shadow")[1]


def _check_lines(config: str, members: Sequence[Member]) -> None:
    for member in members:
        if not has(config, member.address):
            raise DeployFailed(f"nginx's configuration has no line for {member.service} at {member.address}")
