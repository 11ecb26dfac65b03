"""The rendered files: what units say, what systemd and nginx say of them, and how they are written."""

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from a_deployment import PYTHON, made
from ddtree.deploy import atomic, folder, nginx
from ddtree.deploy.limits import systemd_here
from ddtree.deploy.render import MADE, render
from ddtree.deploy.spec import Deployment, RouterPart
from ddtree.deploy.units import health_url
from ddtree.errors import InvalidOption
from systemd_rules import read_command, read_environment

ANALYZE = shutil.which("systemd-analyze")
needs_analyze = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not here: apt-get install systemd")
SYSTEM = {"scope": "system", "user": "ddtree"}
SGLANG = {"engine": "sglang", "gpus": ("0", "1"), "model": "Qwen/Qwen3-8B"}


def keys(text: str, section: str = "Service") -> dict[str, list[str]]:
    """The lines of a section of a unit."""
    found: dict[str, list[str]] = {}
    (part,) = re.findall(rf"^\[{section}\]\n((?:(?!\[).*\n?)*)", text, re.MULTILINE)
    for line in filter(None, part.splitlines()):
        found.setdefault(line.partition("=")[0], []).append(line.partition("=")[2])
    return found


def unit(deployment: Deployment, name: str = "chat-0", host: str = "localhost") -> dict[str, list[str]]:
    return keys(render(deployment)[f"{host}/systemd/{name}.service"])


def test_the_files_of_each_host() -> None:
    files = render(made(hosts=("a", "b")))
    names = {"systemd/chat-0.service", "systemd/chat-1.service", "systemd/chat-router.service", "env/chat-0.env",
             "env/chat-1.env", "nginx/chat.conf"}  # fmt: skip
    assert set(files) == {f"{host}/{name}" for host in "ab" for name in names}
    assert set(render(made(router=RouterPart(kind="none")))) == {
        f"localhost/{name}" for name in names if "router" not in name and "nginx" not in name
    }
    assert set(render(made(**SGLANG))) == {f"localhost/{name}" for name in names if "nginx" not in name}


def test_the_same_deployment_gives_the_same_text_with_a_head() -> None:
    assert render(made()) == render(made())
    for text in render(made()).values():
        head = "# Made by `ddtree deploy render` from chat.toml: edits are lost. Change chat.toml, and render again.\n"
        assert text.startswith(head)
        assert head.startswith(MADE)


def test_a_replicas_unit_runs_its_command() -> None:
    found = unit(made(args=("--served-model-name", 'a $b 100% "c"')))
    (start,) = found["ExecStart"]
    assert read_command(start) == list(made(args=("--served-model-name", 'a $b 100% "c"')).replicas()[0].argv)
    assert found["EnvironmentFile"] == ["%h/.local/share/ddtree/chat/env/chat-0.env"]
    assert found["ExecStartPost"] == [f"{PYTHON} -m ddtree.deploy.health http://127.0.0.1:30001/health 1800"]


def test_a_unit_waits_for_loading_and_for_running_answers() -> None:
    found = unit(made(start_seconds=100, stop_seconds=40))
    assert int(found["TimeoutStartSec"][0]) > 100
    assert found["ExecStartPost"][0].endswith(" 100")
    assert "--shutdown-timeout 40 " in found["ExecStart"][0]
    assert int(found["TimeoutStopSec"][0]) > 40
    assert (found["KillMode"], found["KillSignal"]) == (["mixed"], ["SIGTERM"])
    router = unit(made(start_seconds=100, stop_seconds=40), "chat-router")
    assert int(router["TimeoutStopSec"][0]) > 40
    assert router["KillSignal"] == ["SIGQUIT"]


def test_restarts_back_off_and_end() -> None:
    text = render(made(systemd=254))["localhost/systemd/chat-0.service"]
    found = keys(text)
    assert found["Restart"] == ["on-failure"]
    assert (found["RestartSec"], found["RestartSteps"], found["RestartMaxDelaySec"]) == (["5"], ["5"], ["120"])
    assert keys(text, "Unit")["StartLimitBurst"] == ["5"]
    old = unit(made(systemd=252))
    assert "RestartSteps" not in old, "unknown before systemd 254"
    assert int(old["RestartSec"][0]) * 5 < 30 * 60, "the limit of starts is met within its interval"


def test_what_a_gpu_needs_is_not_taken_away() -> None:
    found = unit(made(**SYSTEM, gpus=("0",)))
    for key in ("PrivateDevices", "DevicePolicy", "DeviceAllow", "MemoryDenyWriteExecute", "PrivateUsers",
                "PrivateNetwork", "ProtectClock", "ProcSubset", "SystemCallFilter"):  # fmt: skip
        assert key not in found, key
    assert found["NoNewPrivileges"] == found["PrivateTmp"] == ["yes"]
    assert found["ProtectSystem"] == ["strict"]
    assert found["CacheDirectory"] == ["ddtree/chat"]
    assert found["LimitMEMLOCK"] == ["infinity"]
    assert found["User"] == ["ddtree"]
    assert found["CapabilityBoundingSet"] == [""]
    assert found["OOMPolicy"] == ["stop"]


def test_a_cache_of_ones_own_can_be_written() -> None:
    found = unit(made(**SYSTEM, cache="/big disk"))
    assert found["ReadWritePaths"] == ['"/big disk"']
    assert "CacheDirectory" not in found


def test_the_users_systemd_gets_nothing_that_it_cannot_do() -> None:
    found = unit(made())
    for key in ("User", "ProtectSystem", "ProtectHome", "PrivateTmp", "CapabilityBoundingSet", "CacheDirectory"):
        assert key not in found, key
    assert keys(render(made())["localhost/systemd/chat-0.service"], "Install") == {"WantedBy": ["default.target"]}
    system = render(made(**SYSTEM))["localhost/systemd/chat-0.service"]
    assert keys(system, "Install") == {"WantedBy": ["multi-user.target"]}
    assert keys(system, "Unit")["After"] == ["network-online.target"]


def test_keys_and_tokens_are_in_environment_files_alone() -> None:
    deployment = made(environment={"DDTREE_API_KEY": "s3cr3t", "A": "a b"}, secrets="/etc/ddtree/chat.secret")
    files = render(deployment)
    assert [path for path, text in files.items() if "s3cr3t" in text] == [f"localhost/env/chat-{i}.env" for i in (0, 1)]
    assert read_environment(files["localhost/env/chat-0.env"]) == dict(deployment.replicas()[0].environment)
    assert unit(deployment)["EnvironmentFile"][1:] == ["/etc/ddtree/chat.secret"], "later files win"


def test_names_with_signs_of_systemd_are_only_names() -> None:
    text = render(made(model="/models/100%/x", folder="/srv/100%"))["localhost/systemd/chat-0.service"]
    assert keys(text, "Unit")["Description"] == ["chat-0: /models/100%%/x, tree, no GPU, port 30001"]
    assert keys(text)["EnvironmentFile"] == ["/srv/100%%/env/chat-0.env"]


def test_a_unit_tells_what_it_has() -> None:
    text = render(made(gpus=("3", "1"), name="n"))["localhost/systemd/n-1.service"]
    told = {"Deployment": ["n"], "Source": ["chat.toml"], "Port": ["30002"], "Gpus": ["1"]}
    assert keys(text, "X-DDTree") == told


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:1/health"), ("0.0.0.0", "http://127.0.0.1:1/health"),
     ("::", "http://[::1]:1/health"), ("10.0.0.7", "http://10.0.0.7:1/health")],
)  # fmt: skip
def test_where_a_replica_is_asked(host: str, url: str) -> None:
    assert health_url(host, 1) == url


def test_low_ports_need_one_capability() -> None:
    found = unit(made(**SYSTEM, router=RouterPart(port=80)), "chat-router")
    assert found["AmbientCapabilities"] == found["CapabilityBoundingSet"] == ["CAP_NET_BIND_SERVICE"]
    assert "AmbientCapabilities" not in unit(made(**SYSTEM), "chat-router")


def test_sglangs_router_gets_the_workers() -> None:
    router = RouterPart(host="0.0.0.0", reach="all", args=("--policy", "round_robin"))
    deployment = made(**SGLANG, hosts=("a", "b"), host="0.0.0.0", router=router)
    (start,) = unit(deployment, "chat-router", "b")["ExecStart"]
    words = read_command(start)
    assert words[:3] == [PYTHON, "-m", "sglang_router.launch_router"]
    urls = words[words.index("--worker-urls") + 1 : words.index("--host")]
    assert urls == ["http://a:30001", "http://a:30002", "http://127.0.0.1:30001", "http://127.0.0.1:30002"]
    assert words[words.index("--port") + 1] == "30000"
    assert words[-2:] == ["--policy", "round_robin"]
    assert "--tp-size 1" in unit(deployment, "chat-0", "a")["ExecStart"][0]


def test_nginx_knows_the_replicas_of_its_reach() -> None:
    hosts = {"hosts": ("a", "b"), "host": "0.0.0.0"}
    own = nginx.config(made(**hosts), "a")
    assert re.findall(r"^ +server (\S+) ", own, re.MULTILINE)[:2] == ["127.0.0.1:30001", "127.0.0.1:30002"]
    every = nginx.config(made(**hosts, router=RouterPart(reach="all")), "a", down=("chat-1",))
    lines = re.findall(r"^ +server (\S+) (.*);", every, re.MULTILINE)
    assert [address for address, _ in lines] == ["127.0.0.1:30001", "127.0.0.1:30002", "b:30001", "b:30002"]
    assert [rest.endswith(" down") for _, rest in lines] == [False, True, False, False]


def verify(tmp_path: Path, files: dict[str, str], user: bool) -> tuple[int, str]:
    """systemd-analyze's exit code, and all that it said."""
    units = []
    for path, text in files.items():
        if "/systemd/" in path:
            units.append(tmp_path / Path(path).name)
            units[-1].write_text(text)
    words = [str(ANALYZE), "verify", "--man=no", *(["--user"] if user else []), *map(str, units)]
    ran = subprocess.run(
        words, capture_output=True, text=True, timeout=60, env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    )
    return ran.returncode, ran.stdout + ran.stderr


@needs_analyze
@pytest.mark.parametrize("scope", ["system", "user"])
@pytest.mark.parametrize("what", [{}, {"gpus": ("0", "1"), "replicas_per_gpu": 2}, SGLANG | {"secrets": "/etc/s"}])
def test_systemd_finds_no_fault(tmp_path: Path, scope: str, what: dict[str, Any]) -> None:
    user = "ddtree" if scope == "system" else ""
    more = {"scope": scope, "user": user, "systemd": systemd_here()}
    router = {"router": RouterPart(program="" if "engine" in what else "/bin/true", port=80 if user else 30000)}
    odd = {"model": "/models/a b 100%", "args": ("--served-model-name", 'x $y "z"'), "folder": "/srv/a b/100%"}
    files = render(made(**what | more | router | odd, python=sys.executable))
    assert verify(tmp_path, files, scope == "user") == (0, "")


@needs_analyze
def test_systemd_would_find_a_fault(tmp_path: Path) -> None:
    """So that the test above can fail."""
    files = render(made(python=sys.executable, router=RouterPart(kind="none")))
    broken = {path: text.replace("KillMode=mixed", "KillMode=some") for path, text in files.items()}
    assert "Failed to parse kill mode" in verify(tmp_path, broken, True)[1]
    gone = {path: text.replace(sys.executable, "/no/such/python") for path, text in files.items()}
    assert verify(tmp_path, gone, True)[0] == 1


def test_files_are_written_whole_and_for_the_right_eyes(tmp_path: Path) -> None:
    files = render(made())
    folder.write(tmp_path / "out", files)
    assert folder.older(tmp_path / "out") == files
    modes = {path: stat.S_IMODE((tmp_path / "out" / path).stat().st_mode) for path in files}
    assert {mode for path, mode in modes.items() if path.endswith(".env")} == {0o600}
    assert {mode for path, mode in modes.items() if not path.endswith(".env")} == {0o644}
    os.chmod(tmp_path / "out/localhost/env/chat-0.env", 0o644)
    folder.write(tmp_path / "out", render(made(cpu_replicas=1)))
    assert set(folder.older(tmp_path / "out")) == set(render(made(cpu_replicas=1))), "what is no longer made goes away"
    assert stat.S_IMODE((tmp_path / "out/localhost/env/chat-0.env").stat().st_mode) == 0o600
    names = [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert sorted(names) == ["chat-0.env", "chat-0.service", "chat-router.service", "chat.conf"]


def test_foreign_files_stay(tmp_path: Path) -> None:
    own = tmp_path / "localhost/systemd/chat-1.service"
    own.parent.mkdir(parents=True)
    own.write_text("[Service]\n")
    with pytest.raises(InvalidOption, match=r"chat-1\.service was not made by ddtree deploy"):
        folder.write(tmp_path, render(made()))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["chat-1.service"], "nothing was written"
    own.unlink()
    own.symlink_to("/dev/null")
    with pytest.raises(InvalidOption, match="is no plain file"):
        folder.write(tmp_path, render(made()))
    own.unlink()
    (tmp_path / "mine.conf").write_text("x")
    folder.write(tmp_path, render(made()))
    assert (tmp_path / "mine.conf").read_text() == "x"
    with pytest.raises(InvalidOption, match="is a file: name a folder"):
        folder.write(tmp_path / "mine.conf", render(made()))


def test_differences_show_no_secrets() -> None:
    before = render(made(environment={"DDTREE_API_KEY": "first", "MODE_X": "old"}))
    after = render(made(environment={"DDTREE_API_KEY": "second\nline of it", "MODE_X": "new"}))
    shown = folder.difference(before, after)
    assert "first" not in shown
    assert "second" not in shown
    assert "line of it" not in shown
    assert "\n-DDTREE_API_KEY=... (not shown)\n" in shown
    assert "\n+DDTREE_API_KEY=... (not shown, another one)\n" in shown
    assert '\n-MODE_X="old"\n' in shown
    assert '\n+MODE_X="new"' in shown
    assert folder.difference(after, after) == ""
    assert "--- /dev/null\n+++ localhost/nginx/chat.conf" in folder.difference({}, after)
    assert "+++ /dev/null" in folder.difference(before, {})


def test_secrets_beside_a_change_and_of_many_lines_are_not_shown_either() -> None:
    same = {
        "HF_TOKEN": "hf_private", "TLS_KEY": "-----BEGIN-----\nMIIEabc=\nMIIE_2=\n-----END-----",
        "HTTPS_PROXY": "http://me:word@proxy:3128",
    }  # fmt: skip
    before, after = (render(made(environment={**same, "MODE_X": mode})) for mode in ("old", "new"))
    shown = folder.difference(before, after)
    assert '\n+MODE_X="new"' in shown
    assert not [word for word in ("hf_private", "MIIE", "END", "me:word") if word in shown]
    assert "MIIE" not in folder.difference({}, after)
    assert "MIIE" not in folder.difference(before, {})


def test_two_specifications_share_a_folder(tmp_path: Path) -> None:
    one, two = render(made(source="one.toml")), render(made(name="other", port=31001, source="two.toml"))
    folder.write(tmp_path, one)
    folder.write(tmp_path, two)
    assert folder.older(tmp_path) == one | two
    assert folder.older(tmp_path, two) == two
    installed = tmp_path / ".config/systemd/user/chat-9.service"  # what is applied, under a home that is the folder
    installed.parent.mkdir(parents=True)
    installed.write_text(one["localhost/systemd/chat-0.service"], encoding="utf-8")
    folder.write(tmp_path, render(made(source="one.toml", cpu_replicas=1)))
    assert installed.exists()
    assert not (tmp_path / "localhost/systemd/chat-1.service").exists()
    assert (tmp_path / "localhost/systemd/other-1.service").exists()


def test_nothing_stays_of_a_file_that_could_not_be_written(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        atomic.write(tmp_path / "x.env", "\udc80", 0o600)
    assert not list(tmp_path.iterdir())
