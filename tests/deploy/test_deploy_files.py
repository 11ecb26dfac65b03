"""The container files and the example: what they name exists, and the server takes their commands."""

import importlib.util
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from ddtree.cli.app import app
from ddtree.deploy.render import render
from ddtree.deploy.spec import load

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy"


def accepted(words: list[str]) -> dict[str, Any]:
    """The options that `ddtree` takes the words for. Raises UsageError where it does not take them."""
    commands: Any = get_command(app)
    name, *rest = words
    return dict(commands.commands[name].make_context(name, rest).params)


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    """Of the Containerfile: names and arguments, comments left out and long lines joined."""
    text = (FOLDER / "Containerfile").read_text(encoding="utf-8")
    lines = re.sub(r"\\\n", " ", re.sub(r"^ *#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines if line.strip())]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
    return found


def said(instructions: list[tuple[str, str]], name: str) -> list[str]:
    return [rest for instruction, rest in instructions if instruction == name]


def test_the_containerfile_holds_known_instructions(instructions: list[tuple[str, str]]) -> None:
    known = {"FROM", "RUN", "ARG", "WORKDIR", "COPY", "USER", "VOLUME", "ENV", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK",
             "ENTRYPOINT", "CMD"}  # fmt: skip
    names = [name for name, _ in instructions]
    assert set(names) == known
    assert names[0] == "FROM"


def test_what_is_copied_is_there_and_whole(instructions: list[tuple[str, str]]) -> None:
    copied = [source for rest in said(instructions, "COPY") for source in rest.split()[:-1]]
    assert all((ROOT / source).exists() for source in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"pyproject.toml", "src", project["readme"], *project["license-files"]} == set(copied), "what a build reads"
    assert re.search(r'pip install [^&]*"\.\$\{EXTRAS\}"', " ".join(said(instructions, "RUN")))


def test_it_does_not_run_as_root_and_keeps_its_cache(instructions: list[tuple[str, str]]) -> None:
    (user,) = said(instructions, "USER")
    assert user not in ("root", "0")
    assert any(re.search(rf"useradd --uid \d+ .*{user}\b", run) for run in said(instructions, "RUN"))
    names = [name for name, _ in instructions]
    assert names.index("USER") < names.index("ENTRYPOINT")
    (volume,) = said(instructions, "VOLUME")
    assert f"HOME={volume} " in said(instructions, "ENV")[0]
    assert any(f"--owner {user} {volume}" in run for run in said(instructions, "RUN"))


def test_its_command_and_its_health_are_the_servers(instructions: list[tuple[str, str]]) -> None:
    entry, command = (json.loads(said(instructions, name)[0]) for name in ("ENTRYPOINT", "CMD"))
    assert entry == ["python", "-m", "ddtree"]
    options = accepted(command)
    assert (options["host"], str(options["port"])) == ("0.0.0.0", said(instructions, "EXPOSE")[0])
    (health,) = said(instructions, "HEALTHCHECK")
    words = json.loads(health.partition("CMD ")[2])
    assert words[:2] == ["python", "-m"]
    assert importlib.util.find_spec(words[2]) is not None
    assert words[3] == f"http://127.0.0.1:{options['port']}/health"


def test_compose_runs_one_replica_a_card(compose: dict[str, Any], instructions: list[tuple[str, str]]) -> None:
    services = compose["services"]
    assert len(services) == 2
    cards = [card for service in services.values() for gpu in service["gpus"] for card in gpu["device_ids"]]
    assert sorted(cards) == ["0", "1"]
    published = []
    for service in services.values():
        assert (FOLDER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        options = accepted(service["command"])
        assert options["device"] == "cuda", "a card that is gone is no reason to run on the CPU"
        outer, inner = service["ports"][0].rsplit(":", 1)
        assert int(inner) == options["port"] == int(said(instructions, "EXPOSE")[0])
        published.append(outer)
        assert int(service["stop_grace_period"].removesuffix("s")) > options["shutdown_timeout"]
        (volume, _, place) = service["volumes"][0].partition(":")
        assert volume in compose["volumes"]
        assert [place] == said(instructions, "VOLUME")
        assert service["shm_size"]
        assert service["restart"].startswith("on-failure")
        assert not service.get("privileged")
    assert len(set(published)) == 2


def test_a_word_that_the_server_does_not_know_is_seen() -> None:
    """So that the tests above can fail."""
    with pytest.raises(Exception, match="No such option"):
        accepted(["serve", "--prot=1"])


def test_the_example_renders() -> None:
    deployment = load(FOLDER / "example.toml")
    assert [replica.gpus for replica in deployment.replicas()] == [(str(card),) for card in range(8)]
    assert len(render(deployment)) == 8 * 2 + 2
    for replica in deployment.replicas():
        assert accepted(list(replica.argv[3:]))["port"] == replica.port
