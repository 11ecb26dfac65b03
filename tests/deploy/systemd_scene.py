"""A deployment through a systemd of the user that runs: what `test_deploy_systemd.py` starts beside one."""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from ddtree.deploy import commands, status
from ddtree.deploy.failures import DeployFailed
from ddtree.deploy.spec import load
from fakes import QUICK, make


def main() -> None:
    """Prints one JSON object."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        deployed = make(Path(folder))

        def asked(*sets: str) -> commands.Asked:
            return dataclasses.replace(deployed.asked(*sets), manager="auto")

        try:
            commands.apply(asked())
            found["manager"] = deployed.state().manager
            found["again"] = commands.apply(asked()).changed
            commands.rollout(asked("mode=tree"), QUICK)
            found["modes"] = deployed.modes()
            for fault in ("dies", "wrong"):
                try:
                    commands.rollout(asked("mode=tree", f"environment.FAKE={fault}"), QUICK)
                except DeployFailed as error:
                    found[fault] = str(error)
            found["kept"] = deployed.modes()
            found["status"] = status.look(commands.open_site(asked(), load(deployed.path)))
            commands.rollback(asked())
            found["back"] = deployed.modes()
        finally:
            commands.remove(asked())
        found["left"] = [path.name for path in Path(folder).glob("place/*")]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
