"""`ddtree deploy check` and `render`: what is found on made-up machines and on this one, and the exit codes."""

import contextlib
import io
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from a_deployment import made
from ddtree.cli import app
from ddtree.deploy import applied, findings, folder
from ddtree.deploy.check import Report, check
from ddtree.deploy.render import render
from ddtree.deploy.spec import Deployment, RouterPart
from ddtree.doctor.facts import Asked, Facts
from fakes import free_ports
from machines import card, cpu, gpu, program, with_card, with_system, with_weights, with_xid

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
needs_analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
needs_nginx = pytest.mark.skipif(NGINX is None, reason="nginx is not here: apt-get install nginx-light")
BARE = RouterPart(kind="none")


@pytest.fixture(autouse=True)
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of this test's own where systemd's units are."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    scopes = {"system": tmp_path / "etc/systemd/system", "user": tmp_path / ".config/systemd/user"}
    monkeypatch.setattr(applied, "unit_folder", lambda scope: scopes[scope])
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Asked, dict[str, str]]]:
    """What the doctor was asked, and in what environment; `machine` changes what it sees."""
    seen: list[tuple[Asked, dict[str, str]]] = []
    machine(monkeypatch, cpu(), seen)
    return seen


def machine(monkeypatch: pytest.MonkeyPatch, facts: Facts, seen: list[Any] | None = None) -> None:
    """The probe sees this one."""

    def probe(asked: Asked, libraries: Any) -> Facts:
        if seen is not None:
            seen.append((asked, dict(os.environ)))
        here = {"CUDA_VISIBLE_DEVICES": os.environ["CUDA_VISIBLE_DEVICES"]}
        return replace(with_system(facts, environment=here), asked=asked)

    monkeypatch.setattr("ddtree.deploy.check.probe", probe)


def here(**changes: Any) -> Deployment:
    """A deployment that this machine could run."""
    return made(**{"python": sys.executable, "router": BARE, "port": free_ports(12)} | changes)


def ids(report: Report) -> list[tuple[str, str]]:
    return [(one.level, one.id) for one in report.findings]


@contextlib.contextmanager
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@needs_analyze
def test_a_sound_deployment_is_fine(asked: list[Any]) -> None:
    report = check(here(mode="linear", drafter="/d"), "localhost")
    assert (ids(report), report.exit_code) == ([], 0)
    assert asked[0][0] == Asked("embedded", "smollm2-135m", "/d", 0, None, None, "linear")
    text = report.as_text()
    assert text.startswith("fine: deployment chat on localhost, 2 of smollm2-135m with embedded, linear: nothing was")
    assert text.count("machine\n") == 1


def test_the_doctor_sees_what_the_services_will(asked: list[Any]) -> None:
    before = dict(os.environ)
    check(here(environment={"HF_HOME": "/hub"}, cache="/big"), "localhost")
    environment = asked[0][1]
    assert (environment["HF_HOME"], environment["HOME"], environment["CUDA_VISIBLE_DEVICES"]) == ("/hub", "/big", "")
    assert dict(os.environ) == before
    check(here(scope="system", user="root"), "localhost")
    assert asked[1][1]["HOME"] == before["HOME"], "systemd makes that folder at the first start"


def test_sglangs_flags_reach_the_doctor(asked: list[Any]) -> None:
    args = ("--attention-backend", "triton", "--grammar-backend=none")
    check(here(engine="sglang", gpus=("0",), args=args), "localhost")
    assert asked[0][0] == Asked("sglang", "smollm2-135m", "auto", 0, "triton", "none", "tree")


def test_without_systemd_it_cannot_be_told(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = here()
    monkeypatch.setenv("PATH", "/nowhere")
    report = check(deployment, "localhost")
    assert (ids(report), report.exit_code) == ([("unknown", "units-unverified")], 2)
    assert "systemd-analyze is not here" in report.as_text()


@needs_analyze
def test_systemds_words_are_shown(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    files = render(here())
    broken = {path: text.replace("OOMPolicy=stop", "OOMPolicy=run") for path, text in files.items()}
    (found,) = findings.verified(here(), "localhost", broken)
    assert found.level in ("fail", "warn")
    assert "run" in found.seen
    assert "/tmp" not in found.seen
    newer = render(here(systemd=254))
    assert list(findings.verified(here(), "localhost", newer)) == [], "an older systemd skips what it does not know"


def test_a_python_that_is_not_there(asked: list[Any]) -> None:
    report = check(here(python="/no/such/python"), "localhost")
    assert ("fail", "python-missing") in ids(report)
    assert report.exit_code == 1


def test_a_python_that_is_not_this_one(asked: list[Any], tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    report = check(here(python=str(tmp_path / "python")), "localhost")
    assert ("unknown", "other-python") in ids(report)
    assert asked == [], "the doctor would look at the wrong one"


@pytest.mark.parametrize(
    ("args", "words"), [(("--budget", "3"), "No such option: --budget"), (("--tree-budget",), "requires an argument")]
)
def test_args_that_the_server_does_not_take(args: tuple[str, ...], words: str) -> None:
    (found,) = findings.programs(here(args=args), "localhost")
    assert (found.level, found.id) == ("fail", "args-refused")
    assert words in found.seen


def test_args_that_it_takes() -> None:
    assert list(findings.programs(here(args=("--tree-budget", "3", "--no-prefix-caching")), "localhost")) == []


def test_a_user_that_is_not_there(asked: list[Any]) -> None:
    report = check(here(scope="system", user="nobody-of-that-name"), "localhost")
    assert ("fail", "user-missing") in ids(report)


def test_a_cache_that_is_not_there(tmp_path: Path) -> None:
    deployment = here(scope="system", user="root", cache=str(tmp_path / "big"))
    (found,) = findings.programs(deployment, "localhost")
    assert (found.level, found.id) == ("fail", "cache-missing")
    assert found.mend == f"install --directory --owner root {tmp_path / 'big'}"
    (tmp_path / "big").mkdir()
    assert list(findings.programs(deployment, "localhost")) == []


def test_secrets_are_for_one_pair_of_eyes(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    deployment = here(secrets=str(path))
    assert [one.id for one in findings.programs(deployment, "localhost")] == ["secrets-missing"]
    path.write_text("A=1\n")
    path.chmod(0o640)
    (found,) = findings.programs(deployment, "localhost")
    assert (found.id, found.seen, found.mend) == ("secrets-open", "mode 640", f"chmod 600 {path}")
    path.chmod(0o600)
    assert list(findings.programs(deployment, "localhost")) == []


def test_ports_that_are_taken(asked: list[Any]) -> None:
    with listening() as port:
        taken = check(here(port=port - 1), "localhost")
        assert [one.about for one in taken.findings if one.id == "port-taken"] == [str(port)]
        assert taken.exit_code == 1
        router = RouterPart(port=port, program="/bin/true")
        assert [one.about for one in findings.ports(here(router=router), "localhost")] == [str(port)]


def test_ports_of_ones_own_services_are_theirs(homes: Path) -> None:
    with listening() as port:
        deployment = here(port=port, cpu_replicas=1)
        units = homes / ".config/systemd/user"
        assert [one.about for one in findings.ports(deployment, "localhost")] == [str(port)]
        folder.write(units, {"chat-0.service": render(deployment)["localhost/systemd/chat-0.service"]})
        assert list(findings.ports(deployment, "localhost")) == []
        assert findings.held(deployment) == [port]
        assert [one.about for one in findings.ports(replace(deployment, name="other"), "localhost")] == [str(port)]


def test_a_generation_that_is_kept_has_no_port(homes: Path) -> None:
    with listening() as port:
        deployment = here(port=port, cpu_replicas=1)
        unit = render(deployment)["localhost/systemd/chat-0.service"]
        folder.write(deployment.state_folder, {"generations/1/files/systemd/chat-0.service": unit})
        assert [one.about for one in findings.ports(deployment, "localhost")] == [str(port)]
        folder.write(deployment.state_folder, {"run/chat-0.service": unit})
        assert list(findings.ports(deployment, "localhost")) == []


def test_ports_that_the_system_hands_out(asked: list[Any]) -> None:
    with listening() as port:
        pass
    report = check(here(port=port if port >= 32768 else 40000, cpu_replicas=1), "localhost")
    assert [one.id for one in report.findings if one.level == "warn"] == ["port-ephemeral"]


def install(homes: Path, deployment: Deployment, scope: str = "user") -> None:
    """Its units, where systemd has them."""
    units = homes / ("etc/systemd/system" if scope == "system" else ".config/systemd/user")
    for path, text in render(deployment).items():
        if "/systemd/" in path:
            units.mkdir(parents=True, exist_ok=True)
            (units / Path(path).name).write_text(text)


@pytest.mark.parametrize("scope", ["system", "user"])
def test_what_another_deployment_has(homes: Path, scope: str) -> None:
    first = free_ports(12)
    install(homes, made(name="first", gpus=("0", "1"), port=first, router=BARE), scope)
    second = here(name="second", gpus=("1", "2"), port=first + 1)
    found = list(findings.duplicates(second, "localhost", applied.applied()))
    assert sorted((one.level, one.id, one.about) for one in found) == [
        ("fail", "port-deployed", str(first + 1)), ("warn", "gpu-shared", "1"),
    ]  # fmt: skip
    assert list(findings.duplicates(here(gpus=("5",), port=first + 4), "localhost", applied.applied())) == []
    routed = here(port=first + 4, router=RouterPart(port=first))
    assert [one.about for one in findings.duplicates(routed, "localhost", applied.applied())] == [str(first)]


def test_names_that_are_taken(homes: Path) -> None:
    deployment = here()
    install(homes, deployment)
    assert list(findings.duplicates(deployment, "localhost", applied.applied())) == [], "itself, applied before"
    other = replace(deployment, source="other.toml")
    assert {one.id for one in findings.duplicates(other, "localhost", applied.applied())} == {"name-reused"}
    (homes / ".config/systemd/user/chat-0.service").write_text("[Service]\nExecStart=/bin/true\n")
    (found,) = findings.duplicates(deployment, "localhost", applied.applied())
    assert (found.level, found.id, found.about) == ("fail", "name-taken", "chat-0")


@needs_nginx
def test_nginx_takes_its_configuration(asked: list[Any]) -> None:
    first = free_ports(12)
    routed = here(port=first, router=RouterPart(program=str(NGINX), port=first + 5))
    assert list(findings.router(routed, "localhost", render(routed))) == []
    files = {path: text.replace("least_conn", "most_conn") for path, text in render(routed).items()}
    (found,) = findings.router(routed, "localhost", files)
    assert (found.level, found.id) == ("fail", "router-refused")


def test_a_router_that_is_not_there() -> None:
    gone = here(router=RouterPart(program="/no/nginx"))
    assert [one.id for one in findings.router(gone, "localhost", render(gone))] == ["router-missing"]
    sglang = here(engine="sglang", gpus=("0",), router=RouterPart())
    (found,) = findings.router(sglang, "localhost", render(sglang))
    assert (found.id, found.mend) == ("router-missing", f"{sys.executable} -m pip install sglang-router")
    assert list(findings.router(here(), "localhost", {})) == []


def test_cards_that_are_not_there(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    report = check(here(gpus=("0",)), "localhost")
    assert ("fail", "gpu-missing") in ids(report), "else it would end at its start"
    machine(monkeypatch, gpu(count=2))
    assert "gpu-missing" not in dict(map(reversed, ids(check(here(gpus=("0", "1")), "localhost"))))
    third = check(here(gpus=("0", "2")), "localhost")
    assert [one.about for one in third.findings if one.id == "gpu-missing"] == ["2"]
    by_uuid = check(here(gpus=("GPU-00000001", "GPU-77")), "localhost")
    assert [one.about for one in by_uuid.findings if one.id == "gpu-missing"] == ["GPU-77"]
    part = check(here(gpus=("MIG-1",)), "localhost")
    assert ("unknown", "gpu-part") in ids(part)


@needs_analyze
def test_each_replicas_card_is_judged(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor judges the first card that is seen: a full second one would pass."""
    full = with_card(with_weights(gpu(count=2), 20_000), 1, free_mib=10_000)
    machine(monkeypatch, full)
    assert check(here(gpus=("0",)), "localhost").exit_code == 0
    both = check(here(gpus=("0", "1")), "localhost")
    assert both.exit_code == 1
    assert any("GPU 1" in one.what + one.about or "GPU 1" in one.seen for one in both.findings), both.findings
    machine(monkeypatch, with_xid(with_card(gpu(count=2), 1, problem="GPU is lost"), 79, 1))
    assert check(here(gpus=("0", "1")), "localhost").exit_code == 1


def test_replicas_that_do_not_fit_together(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, with_system(with_weights(cpu(), 3000), memory_mib=8000))
    assert [one.id for one in check(here(cpu_replicas=2), "localhost").findings if one.level == "fail"] == []
    report = check(here(cpu_replicas=3), "localhost")
    assert ("fail", "replicas-too-large") in ids(report)
    machine(monkeypatch, replace(with_weights(gpu(), 50_000), gpus=(card(memory_mib=140_000),)))
    assert ("fail", "replicas-too-large") not in ids(check(here(gpus=("0",), replicas_per_gpu=2), "localhost"))
    assert ("fail", "replicas-too-large") in ids(check(here(gpus=("0",), replicas_per_gpu=3), "localhost"))


def test_contexts_count_as_the_replicas_are_told(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("--max-running-requests=32", "--max-model-len", "4096", "--max-tree-budget", "7")
    check(here(args=args), "localhost")
    assert asked[0][0] == Asked(port=0, max_model_len=4096, max_running_requests=32, max_tree_budget=7)
    check(here(engine="sglang", gpus=("0",), args=args), "localhost")
    assert asked[1][0] == Asked("sglang", port=0)
    small = card(memory_mib=12_000, free_mib=11_900)
    machine(monkeypatch, replace(gpu(), gpus=(small,)))
    few, many = (("--max-running-requests", number) for number in ("8", "64"))
    assert check(here(gpus=("0",), args=few), "localhost").exit_code == 0
    assert ("fail", "contexts-too-large") in ids(check(here(gpus=("0",), args=many), "localhost"))
    assert check(here(gpus=("0",), args=few, replicas_per_gpu=6), "localhost").exit_code == 0
    together = check(here(gpus=("0",), args=few, replicas_per_gpu=7), "localhost")
    (found,) = together.findings
    assert found.id == "replicas-too-large"
    assert "target context: 9 slots of 8272 positions" in found.seen


@needs_analyze
def test_memory_that_applied_services_hold_is_no_other_programs(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = card(memory_mib=12_000, free_mib=1_000, processes=(program(10_900),))
    machine(monkeypatch, replace(gpu(), gpus=(held,)))
    deployment = here(gpus=("0",))
    assert ids(check(deployment, "localhost")) == [("fail", "contexts-crowded")]
    monkeypatch.setattr(findings, "held", lambda d: [d.port])
    assert ids(check(deployment, "localhost")) == []


def ddtree(*args: str) -> tuple[int, str, str]:
    """The command line in this process: exit code, output, errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        app(list(args), prog_name="ddtree")
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "chat.toml"
    path.write_text(f'name = "chat"\nport = {free_ports(12)}\n[router]\nkind = "none"\n')
    return str(path)


@needs_analyze
def test_the_commands_exit_codes(asked: list[Any], file: str) -> None:
    code, out, err = ddtree("deploy", "check", file)
    assert (code, err) == (0, ""), out
    assert out.startswith("fine: deployment chat on localhost")
    code, out, _ = ddtree("deploy", "check", file, "--set", "python=/no/such/python", "--no-doctor")
    assert code == 1
    assert out.startswith("would fail: ")
    assert "engine, model, drafter, cards  --no-doctor" in out
    code, out, err = ddtree("deploy", "check", file, "--host", "elsewhere")
    assert (code, out) == (2, "")
    assert err.startswith("error: host 'elsewhere' is unknown: choose one of localhost")


def test_other_hosts_are_named(asked: list[Any], file: str) -> None:
    _, out, _ = ddtree("deploy", "check", file, "--set", 'hosts=["a", "b", "c"]', "--host", "b")
    assert "hosts a, c" in out
    assert "run the check there too" in out


def test_render_shows_what_differs(file: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert ddtree("deploy", "render", file, "--out", out) == (0, "", f"{out}: 2 files, new\n")
    assert ddtree("deploy", "render", file, "--out", out) == (0, "", f"{out}: 2 files, the same as before\n")
    code, shown, err = ddtree("deploy", "render", file, "--out", out, "--set", "mode=linear")
    assert (code, err) == (0, f"{out}: 2 files, changed as shown\n")
    assert [line for line in shown.splitlines() if line.startswith("+ExecStart=") and "--mode linear" in line]
    assert "--mode linear" in (tmp_path / "out/localhost/systemd/chat-0.service").read_text()


def test_render_writes_over_nothing_foreign(file: str, tmp_path: Path) -> None:
    own = tmp_path / "out/localhost/systemd/chat-0.service"
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    code, out, err = ddtree("deploy", "render", file, "--out", str(tmp_path / "out"))
    assert (code, out) == (1, "")
    assert "was not made by ddtree deploy" in err
    assert own.read_text() == "mine"
