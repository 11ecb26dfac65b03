"""The folder: generations whole or not there, links, the lock, and a state that a killed command leaves."""

import multiprocessing
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddtree.deploy import state as room
from ddtree.deploy.atomic import link, write
from ddtree.deploy.failures import DeployFailed, Locked
from ddtree.deploy.generation import Generation
from ddtree.deploy.site import Site, Waits
from ddtree.deploy.state import Folder, Operation, State

UNIT = "[Service]\nExecStart=/bin/true --port 1\nEnvironmentFile=/place/env/chat-0.env\n"
FACTS = {
    "members": [
        {"service": "chat-0", "index": 0, "host": "localhost", "address": "127.0.0.1:1", "gpus": [], "mode": "tree",
         "engine": "embedded"},
    ],
    "door": None, "purpose": "given", "units": {"chat-0": "systemd/chat-0.service"},
    "places": {"env/chat-0.env": "/place/env/chat-0.env"},
}  # fmt: skip


def add(folder: Folder, environment: str = 'A="1"\n') -> Generation:
    """One more generation."""
    return folder.add({"systemd/chat-0.service": UNIT, "env/chat-0.env": environment}, FACTS, "name = 'chat'", [])


def test_generations_count_up_and_are_read_back(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    first, second = add(folder), add(folder, 'A="2"\n')
    assert (first.number, second.number) == (1, 2)
    assert folder.generation(2) == second
    assert second.own_files("chat-0") == {"/place/env/chat-0.env": 'A="2"\n'}
    assert first.print_of("chat-0") != second.print_of("chat-0")
    assert first.print_of("chat-9") is None
    assert (tmp_path / "generations/1").stat().st_mode & 0o077 == 0
    assert (tmp_path / "generations/1/files/env/chat-0.env").stat().st_mode & 0o777 == 0o600


def test_comments_and_the_source_change_no_service(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert add(folder).print_of("chat-0") == add(folder, '# from another file\nA="1"\n').print_of("chat-0")


def test_half_a_generation_is_none(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    add(folder)
    (tmp_path / "generations/.2.tmp/files").mkdir(parents=True)  # a command was killed while it wrote
    (tmp_path / "generations/3").mkdir()
    assert folder.numbers() == [1]
    assert add(folder).number == 4


def test_what_a_killed_command_had_installed_is_known(tmp_path: Path) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    folder, environment = Folder(tmp_path / "place"), str(tmp_path / "place/env/chat-0.env")
    files = {"systemd/chat-0.service": UNIT.replace("/place/env/chat-0.env", environment), "env/chat-0.env": 'A="1"\n'}
    generation = folder.add(files, {**FACTS, "places": {"env/chat-0.env": environment}}, "", [])
    taken: list[str] = []
    manager = SimpleNamespace(name="systemd", install=killed, stop=taken.append, uninstall=taken.append)
    with pytest.raises(KeyboardInterrupt):
        Site(folder, manager, Waits(), print).install(generation, "chat-0")
    assert Path(environment).exists()
    Site(folder, manager, Waits(), print).forget("chat-0")  # by another command, which knows what the state says
    assert taken == ["chat-0", "chat-0"]
    assert not Path(environment).exists()


def test_links_move_in_one_step(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    add(folder), add(folder)
    assert folder.pointed("current") is None
    folder.point(1, None)
    folder.point(2, 1)
    assert folder.pointed("current").number == 2
    assert folder.pointed("previous").number == 1
    assert os.readlink(tmp_path / "current") == "generations/2"


def test_old_generations_go_but_those_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "KEPT", 2)
    folder = Folder(tmp_path)
    for _ in range(6):
        add(folder)
    folder.point(6, 3)
    folder.save(State(services={"chat-0": 1}))
    folder.prune()
    assert folder.numbers() == [1, 3, 5, 6]


def test_the_state_is_read_back(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert folder.state() == State()
    state = State("processes", {"chat-0": 1}, ["chat-0"], Operation("rollout", 1, 2, "now", {"chat-0": None}))
    state.beside = room.Beside("chat-0-beside", "127.0.0.1:9", "chat-0", "127.0.0.1:1")
    folder.save(state)
    assert folder.state() == state


@pytest.mark.parametrize("text", ["{", "[]", '{"operation": 1, "beside": null}', '{"services": 1}'])
def test_a_damaged_state_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text, encoding="utf-8")
    with pytest.raises(DeployFailed, match=r"state\.json is damaged"):
        Folder(tmp_path).state()


def _hold(path: Path, ready: "multiprocessing.Event") -> None:
    with Folder(path).held("ddtree deploy rollout"):
        ready.set()
        time.sleep(60)


def test_a_killed_command_leaves_no_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, ready))
    holder.start()
    try:
        assert ready.wait(30)
        with (
            pytest.raises(Locked, match=rf"`ddtree deploy rollout` \(process {holder.pid}, since "),
            Folder(tmp_path).held("ddtree deploy apply"),
        ):
            pytest.fail("two at once")
        os.kill(holder.pid, signal.SIGKILL)
        holder.join(10)
        with Folder(tmp_path).held("ddtree deploy apply"):
            assert "ddtree deploy apply" in (tmp_path / "lock").read_text(encoding="utf-8")
        assert (tmp_path / "lock").read_text(encoding="utf-8") == ""
    finally:
        holder.kill()
        holder.join()


def test_what_an_interrupted_command_touched_stays_known(tmp_path: Path) -> None:
    folder, state = Folder(tmp_path), State()
    room.begin(folder, state, "rollout", 1, 2)
    state.operation.touched["chat-0"] = 1
    room.begin(folder, state, "apply", 1, 3)
    assert folder.state().operation.touched == {"chat-0": 1}
    assert folder.state().operation.kind == "apply"


def test_files_are_whole_and_have_their_rights_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a/b.env"
    write(path, "x", 0o600)
    write(path, "y", 0o640)
    assert path.read_text(encoding="utf-8") == "y"
    assert path.stat().st_mode & 0o777 == 0o640
    link(tmp_path / "to", "a")
    link(tmp_path / "to", "a/b.env")
    assert (tmp_path / "to").read_text(encoding="utf-8") == "y"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "to"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with (
        pytest.raises(DeployFailed, match=r"file/place cannot be written \(Not a directory\): run this as who may"),
        Folder(tmp_path / "file/place").held("ddtree deploy apply"),
    ):
        pytest.fail("it cannot be held")
