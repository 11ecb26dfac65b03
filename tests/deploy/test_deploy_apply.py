"""apply: idempotent, only what changed, and back to what ran when a replica cannot start."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree.deploy import commands, ours
from ddtree.deploy.failures import DeployFailed, Locked
from ddtree.deploy.render import MADE
from ddtree.deploy.state import Folder, State
from fakes import Deployed, make


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Deployed]:
    """Two replicas that are not started yet."""
    deployed = make(tmp_path)
    yield deployed
    deployed.close()


def test_a_second_apply_changes_nothing(two: Deployed) -> None:
    first = two.apply()
    assert first.changed
    assert first.generation == 1
    assert two.modes() == ["linear", "linear"]
    pids = two.pids()
    second = two.apply()
    assert not second.changed
    assert second.generation == 1
    assert two.pids() == pids
    assert "nothing to do: generation 1 runs" in two.said


def test_only_what_changed_is_restarted(two: Deployed) -> None:
    two.apply()
    pids = two.pids()
    unit = two.path.read_text(encoding="utf-8")
    two.path.write_text(f"# a comment that changes nothing\n{unit}", encoding="utf-8")
    assert not two.apply().changed
    two.apply("cpu_replicas=3")
    assert two.pids()[:2] == pids
    assert len(two.pids()) == 3
    two.apply()
    assert two.pids() == pids
    assert sorted(two.state().services) == ["fake-0", "fake-1"]


def test_the_difference_and_the_plan_are_shown_first(two: Deployed) -> None:
    two.apply()
    two.said.clear()
    outcome = commands.apply(two.asked("mode=tree"), dry_run=True)
    shown = "\n".join(two.said)
    assert "-ExecStart=" in shown
    assert "+ExecStart=" in shown
    assert outcome.figures["plan"] == ["fake-0: replaced", "fake-1: replaced"]
    assert two.modes() == ["linear", "linear"]
    assert two.folder.numbers() == [1]


def test_nothing_happens_without_agreement(two: Deployed) -> None:
    assert not two.apply(agree=lambda _question: False).changed
    assert two.state().services == {}
    assert two.folder.numbers() == []


def test_a_replica_that_dies_at_once(two: Deployed) -> None:
    two.apply()
    before = two.kept()
    with pytest.raises(DeployFailed, match="died before it was healthy") as caught:
        two.apply("mode=tree", "environment.FAKE=dies")
    assert "model.safetensors is truncated" in str(caught.value)
    assert "what ran before is back" in str(caught.value)
    assert two.kept() == before
    assert two.state().operation is None


def test_a_first_apply_that_fails_leaves_nothing_running(two: Deployed) -> None:
    with pytest.raises(DeployFailed, match="died before it was healthy"):
        two.apply("environment.FAKE=dies")
    assert two.state().services == {}
    assert not list((two.folder.path / "run").glob("*.service"))
    assert two.apply().changed


def test_a_replica_that_is_never_healthy(two: Deployed) -> None:
    two.apply()
    before = two.kept()
    with pytest.raises(DeployFailed, match=r"was not healthy within 1 s \(/health answers 503\)"):
        two.apply("mode=tree", "environment.FAKE=never", start_s=1.0)
    assert two.kept() == before


def test_a_port_that_something_else_has(two: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    from ddtree.deploy import site

    monkeypatch.setattr(site, "FREE_S", 0.1)
    with socket.create_server(("127.0.0.1", two.port + 1)), pytest.raises(DeployFailed, match="is taken by something"):
        two.apply()
    assert two.state().services == {}


def test_two_commands_cannot_run_at_once(two: Deployed) -> None:
    with two.folder.held("ddtree deploy rollout"), pytest.raises(Locked, match=r"`ddtree deploy rollout` \(process"):
        two.apply()
    assert two.apply().changed


def test_other_hosts_are_named_and_left_alone(two: Deployed) -> None:
    two.apply('hosts=["localhost", "gpu-7"]')
    assert any("only localhost is changed here. For gpu-7: copy fake.toml there" in line for line in two.said)
    from ddtree.errors import InvalidOption

    with pytest.raises(InvalidOption, match=r"none of gpu-7: .* copy fake\.toml and run this command on it"):
        two.apply('hosts=["gpu-7"]')


def test_secrets_are_for_their_owner_alone(two: Deployed) -> None:
    two.apply("environment.DDTREE_API_KEY=tell-nobody")
    assert not any("tell-nobody" in line for line in two.said)
    holding = [
        path
        for path in two.folder.path.rglob("*")
        if path.is_file() and not path.is_symlink() and b"tell-nobody" in path.read_bytes()
    ]
    assert holding
    assert all(path.stat().st_mode & 0o077 == 0 for path in holding), holding


def test_a_replica_that_was_killed_is_started_again(two: Deployed) -> None:
    import os
    import signal

    from fakes import wait_until

    two.apply()
    pids = two.pids()
    site = two.site()
    os.kill(site.manager._told("fake-1")["supervisor"][0], signal.SIGKILL)
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: site.manager.state("fake-1").state == "failed")
    assert two.apply().changed
    assert two.pids()[0] == pids[0]
    assert two.pids()[1] != pids[1]


def test_remove_leaves_what_is_named(two: Deployed) -> None:
    two.apply()
    stranger = two.folder.path / "notes.txt"
    stranger.write_text("mine", encoding="utf-8")
    commands.remove(two.asked(), keep=["logs"])
    assert sorted(path.name for path in two.folder.path.iterdir()) == ["logs", "notes.txt"]
    with pytest.raises(DeployFailed, match="--keep 'all' is unknown"):
        commands.remove(two.asked(), keep=["all"])


@pytest.mark.parametrize("name", ["nginx", "run", "env"])
def test_a_folder_of_something_else_is_left_alone(two: Deployed, name: str) -> None:
    """As /etc, which has a folder nginx, or /var, which has a link run."""
    theirs = two.folder.path / name / "theirs.conf"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("x", encoding="utf-8")
    for command in (two.apply, lambda: commands.remove(two.asked())):
        with pytest.raises(DeployFailed, match=f"holds {name}, which ddtree deploy did not make"):
            command()
    assert [path for path in two.folder.path.rglob("*") if path.is_file()] == [theirs]


def test_remove_takes_only_what_was_rendered(tmp_path: Path) -> None:
    (tmp_path / "nginx").mkdir()
    (tmp_path / "env").mkdir()
    (tmp_path / "nginx/theirs.conf").write_text("x", encoding="utf-8")
    (tmp_path / "env/.fake-0.env.7.tmp").write_text("# Ma", encoding="utf-8")  # a command was killed here
    (tmp_path / "env/fake-0.env").write_text(f'{MADE}x\nA="1"\n', encoding="utf-8")
    ours.clean(tmp_path, ())
    assert [path.name for path in tmp_path.rglob("*")] == ["nginx", "theirs.conf"]


@pytest.mark.parametrize("place", range(len(ours.OURS)))
def test_remove_killed_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """Whatever is gone by then, the folder is read, and a second remove is let do its work."""
    folder = Folder(tmp_path)
    generation = folder.add({}, {"members": [], "door": None, "units": {}, "places": {}, "purpose": "given"}, "", [])
    folder.point(generation.number, generation.number)
    folder.save(State())
    for name in ("run", "env", "nginx", "logs"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(ours, "OURS", ours.OURS[:place])
    ours.clean(tmp_path, ())
    assert folder.state() == State()
    assert folder.pointed("current") in (None, generation)
    ours.refuse_others(tmp_path)


def test_remove_asks_first(two: Deployed) -> None:
    two.apply()
    questions: list[str] = []
    commands.remove(two.asked(agree=lambda question: bool(questions.append(question))))
    assert "fake-0, fake-1" in questions[0]
    assert two.modes() == ["linear", "linear"]
