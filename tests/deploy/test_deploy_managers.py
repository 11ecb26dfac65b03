"""Units read back, the supervisor that stands in for systemd, and systemd itself as far as its commands go."""

import os
import pwd
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from a_deployment import made
from ddtree.deploy.choose import choose
from ddtree.deploy.failures import DeployFailed
from ddtree.deploy.processes import Processes
from ddtree.deploy.procs import Process
from ddtree.deploy.render import MADE, render
from ddtree.deploy.supervisor import Supervisor
from ddtree.deploy.systemd import Systemd
from ddtree.deploy.unit_file import parse, read_environment, seconds
from fakes import wait_until

UNIT = """\
[Unit]
StartLimitIntervalSec=30s
StartLimitBurst=3

[Service]
ExecStart={python} -c "{code}" %%h $$HOME
Environment=PLAIN=1 "SPACED=a b"
Restart=on-failure
RestartSec=50ms
TimeoutStopSec={stop}
"""
WAITS = "import time; print('up', flush=True); time.sleep(600)"


def unit(code: str, stop: str = "5") -> str:
    """A unit that runs a line of Python."""
    return UNIT.format(python=sys.executable, code=code, stop=stop)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """The manager, whose service `it` is ended."""
    manager = Processes(tmp_path)
    yield manager
    manager.stop("it")


def test_a_rendered_unit_is_read_back_word_for_word() -> None:
    deployment = made(environment={"NOTE": 'a "quoted" $HOME\nand more', "PLAIN": "x"}, args=("--name", "100% a;b"))
    files = render(deployment)
    replica = deployment.replicas()[0]
    found = parse(replica.name, files[f"localhost/systemd/{replica.name}.service"])
    assert found.argv == replica.argv
    assert found.restart == "on-failure"
    assert found.never_again == (2,)
    assert (found.stop_s, found.burst, found.interval_s) == (45.0, 5, 1800.0)
    assert found.environment_files == ((str(deployment.state_folder / f"env/{replica.name}.env"), False),)
    assert read_environment(files[f"localhost/env/{replica.name}.env"]) == dict(replica.environment)


def test_the_router_s_unit_is_read_back(tmp_path: Path) -> None:
    deployment = made()
    found = parse("chat-router", render(deployment)["localhost/systemd/chat-router.service"], str(tmp_path))
    config = deployment.state_folder / "nginx/chat.conf"
    assert found.argv == (
        "/usr/sbin/nginx", "-e", "stderr", "-p", f"{tmp_path}/chat-router/", "-c", str(config),
    )  # fmt: skip
    assert found.reload == (*found.argv, "-s", "reload")
    assert found.stop_signal == "SIGQUIT"
    assert found.folders == (f"{tmp_path}/chat-router",)


@pytest.mark.parametrize(
    ("text", "value"), [("90", 90), ("5s", 5), ("1min 30s", 90), ("500ms", 0.5), ("infinity", float("inf"))]
)
def test_times(text: str, value: float) -> None:
    assert seconds(text) == value


def test_the_home_that_systemd_makes_is_made_without_it() -> None:
    deployment = made(scope="system", user="ddtree")
    unit_text = render(deployment)["localhost/systemd/chat-0.service"]
    assert parse("chat-0", unit_text).folders == (deployment.replicas()[0].environment["HOME"],)


def test_an_empty_value_takes_back_those_before_it() -> None:
    found = parse("it", "[Service]\nExecStart=/bin/false\nExecStart=\nExecStart=/bin/true\nUser=me\nUser=\n")
    assert (found.argv, found.user) == (("/bin/true",), None)


def test_a_long_line_ends_at_an_empty_one() -> None:
    found = parse("it", "[Service]\nExecStart=/bin/true \\\n  --a \\\n\nUser=me\n")
    assert (found.argv, found.user) == (("/bin/true", "--a"), "me")


def test_an_environment_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.env"
    found = parse("it", f"[Service]\nExecStart=/bin/true\nEnvironmentFile={path}\n")
    with pytest.raises(DeployFailed, match="which is not there"):
        found.settled_environment()
    path.write_bytes(b"A=\xff\n")
    with pytest.raises(DeployFailed, match="which cannot be read"):
        found.settled_environment()


def test_what_cannot_be_read_is_named() -> None:
    with pytest.raises(DeployFailed, match="time 'soon'"):
        seconds("soon")
    with pytest.raises(DeployFailed, match="0 lines ExecStart="):
        parse("it", "[Service]\n")
    with pytest.raises(DeployFailed, match="uses %i, which only systemd knows"):
        parse("it", "[Service]\nExecStart=/bin/true %i\n")


def test_start_and_stop(processes: Processes, tmp_path: Path) -> None:
    processes.install("it", unit(WAITS))
    assert processes.state("it").state == "stopped"
    processes.start("it")
    wait_until(lambda: processes.logs("it", 1) == "up")
    state = processes.state("it")
    assert state.state == "running"
    process = Process.find(state.pid)
    words = Path(f"/proc/{state.pid}/cmdline").read_bytes().split(b"\0")
    assert words[-3:-1] == [b"%h", b"$HOME"]
    environment = Path(f"/proc/{state.pid}/environ").read_bytes().split(b"\0")
    assert b"SPACED=a b" in environment
    assert not any(line.startswith(b"PYTEST_CURRENT_TEST=") for line in environment)
    processes.stop("it")
    assert not process.alive
    assert processes.state("it").state == "stopped"
    assert (tmp_path / "logs/it.log").stat().st_mode & 0o077 == 0


def test_started_again_with_a_limit(processes: Processes) -> None:
    processes.install("it", unit("print('no'); raise SystemExit(7)"))
    processes.start("it")
    wait_until(lambda: processes.state("it").state == "failed")
    assert processes.state("it").detail == "ended with 7"
    assert processes.logs("it", 20).count("no") == 3
    assert "started 3 times in a row: given up" in processes.logs("it", 1)


def test_some_ends_are_for_good(processes: Processes) -> None:
    processes.install("it", unit("raise SystemExit(2)") + "RestartPreventExitStatus=2\n")
    processes.start("it")
    wait_until(lambda: processes.state("it").state == "failed")
    processes.install("it", unit("print('done')"))
    processes.start("it")
    wait_until(lambda: processes.state("it").state == "ended")  # on-failure: this is none


def test_killed_when_it_does_not_end_in_its_time(processes: Processes) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: print('no', flush=True)); " + WAITS
    processes.install("it", unit(code, stop="300ms"))
    processes.start("it")
    wait_until(lambda: processes.logs("it", 1) == "up")
    process = Process.find(processes.state("it").pid)
    processes.stop("it")
    assert not process.alive
    assert "not ended within 0.3 s: killed" in processes.logs("it", 1)


def test_a_command_that_is_not_there(processes: Processes) -> None:
    processes.install("it", "[Service]\nExecStart=/no/such/program\nRestart=no\n")
    processes.start("it")
    wait_until(lambda: processes.state("it").state == "failed")
    assert "cannot be started: [Errno 2]" in processes.logs("it", 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a service as another user")
def test_a_service_of_another_user(processes: Processes) -> None:
    user = pwd.getpwnam("nobody")
    code = "import os; print(os.getuid(), os.getgid(), os.environ['USER'], flush=True); import time; time.sleep(600)"
    processes.install("it", unit(code).replace(sys.executable, "/usr/bin/env python3") + "User=nobody\n")
    processes.start("it")
    wait_until(lambda: processes.logs("it", 1).endswith("nobody"))
    assert processes.logs("it", 1) == f"{user.pw_uid} {user.pw_gid} nobody"


def test_children_of_a_service_end_with_it(processes: Processes) -> None:
    code = "import subprocess, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); time.sleep(600)"
    processes.install("it", unit(code))
    processes.start("it")
    wait_until(lambda: processes.logs("it", 1).isdigit())
    child = Process.find(int(processes.logs("it", 1)))
    processes.stop("it")
    assert child.wait(5)


def test_a_service_whose_supervisor_was_killed(processes: Processes) -> None:
    processes.install("it", unit(WAITS))
    processes.start("it")
    wait_until(lambda: processes.logs("it", 1) == "up")
    process = Process.find(processes.state("it").pid)
    os.kill(processes._told("it")["supervisor"][0], signal.SIGKILL)
    wait_until(lambda: processes.state("it").state == "unsupervised")
    processes.start("it")  # takes its place
    assert not process.alive
    assert processes.state("it").running


def test_a_number_that_another_process_has_now(processes: Processes, tmp_path: Path) -> None:
    """The pid file names this very test: by another start time, so it is not the service, and is not ended."""
    (tmp_path / "run").mkdir()
    me = Process.find(os.getpid())
    (tmp_path / "run/it.json").write_text(
        f'{{"state": "running", "supervisor": [{me.pid}, {me.start - 1}], "child": [{me.pid}, {me.start - 1}]}}',
        encoding="utf-8",
    )
    assert processes.state("it").state == "failed"
    processes.stop("it")


def test_a_supervisor_that_fails_leaves_nothing_running(tmp_path: Path) -> None:
    """As on a full disk: its status cannot be written."""
    (tmp_path / "it.service").write_text(unit(WAITS), encoding="utf-8")
    (tmp_path / "full").touch()
    supervisor = Supervisor(tmp_path / "it.service", tmp_path / "full/it.json")
    children: list[int] = []
    write = supervisor._write

    def noted(state: str, code: int | None) -> None:
        children.append(supervisor._child.pid)
        write(state, code)

    supervisor._write = noted
    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        with pytest.raises(FileExistsError):
            supervisor.run()
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    assert len(children) == 1
    wait_until(lambda: Process.find(children[0]) is None)


# systemd, by a program that notes what it is asked.


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A systemctl that writes down its words, and answers as `answer` says."""
    folder, noted, answer = tmp_path / "bin", tmp_path / "noted", tmp_path / "answer"
    folder.mkdir()
    program = folder / "systemctl"
    program.write_text(f'#!/bin/sh\necho "$@" >> {noted}\ncase "$*" in *show*) cat {answer};; esac\n', encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    answer.write_text("Version=252\n", encoding="utf-8")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return noted


def test_what_systemd_is_told(systemctl: Path, tmp_path: Path) -> None:
    (tmp_path / "answer").write_text(
        "ActiveState=activating\nSubState=start-post\nMainPID=7\nNRestarts=0\nResult=success\n", encoding="utf-8"
    )
    manager = Systemd("user")
    path = tmp_path / "config/systemd/user/it.service"
    path.parent.mkdir(parents=True)
    path.write_text("[Service]\nExecStart=/bin/true\n", encoding="utf-8")
    with pytest.raises(DeployFailed, match="was not made by ddtree deploy: take it away"):
        manager.install("it", unit("pass"))
    path.unlink()
    text = f"{MADE}it.toml\n{unit('pass')}"
    manager.install("it", text)
    assert path.read_text(encoding="utf-8") == text
    manager.start("it")
    assert manager.state("it").state == "starting"
    assert manager.state("it").pid == 7
    manager.reload("it")
    manager.stop("it")
    manager.uninstall("it")
    assert not list((tmp_path / "config/systemd/user").iterdir())
    told = [line for line in systemctl.read_text(encoding="utf-8").splitlines() if " show " not in f"{line} "]
    assert told == [
        "--user daemon-reload", "--user enable it.service", "--user reset-failed it.service",
        "--user start --no-block it.service", "--user reload it.service", "--user disable it.service",
        "--user stop it.service", "--user reset-failed it.service", "--user disable it.service",
        "--user daemon-reload", "--user reset-failed it.service",
    ]  # fmt: skip


def test_what_was_never_installed_is_stopped_already(systemctl: Path, tmp_path: Path) -> None:
    (tmp_path / "answer").write_text("ActiveState=inactive\nSubState=dead\nMainPID=0\n", encoding="utf-8")
    Systemd("user").stop("it")
    assert " stop " not in systemctl.read_text(encoding="utf-8"), "which fails for a unit that is not there"


@pytest.mark.parametrize(
    ("active", "sub", "state"),
    [
        ("active", "running", "running"),
        ("failed", "failed", "failed"),
        ("inactive", "dead", "stopped"),
        ("activating", "auto-restart", "waiting"),
        ("activating", "start-post", "failed"),  # without a main process: its health is asked for in vain
    ],
)
def test_systemd_s_states(systemctl: Path, tmp_path: Path, active: str, sub: str, state: str) -> None:
    (tmp_path / "answer").write_text(
        f"ActiveState={active}\nSubState={sub}\nMainPID=0\nExecMainCode=1\n", encoding="utf-8"
    )
    assert Systemd("user").state("it").state == state


def test_auto_says_what_it_took_and_why(systemctl: Path, tmp_path: Path) -> None:
    manager, why = choose("auto", "user", tmp_path)
    assert isinstance(manager, Systemd)
    assert why == "systemd (user): it answers here"
    (tmp_path / "answer").write_text("", encoding="utf-8")
    manager, why = choose("auto", "user", tmp_path)
    assert isinstance(manager, Processes)
    assert why == "processes: systemd does not answer (no answer)"
    with pytest.raises(DeployFailed, match="--manager systemd cannot be used: systemd does not answer"):
        choose("systemd", "user", tmp_path)
    with pytest.raises(DeployFailed, match="--manager 'docker' is unknown"):
        choose("docker", "user", tmp_path)
