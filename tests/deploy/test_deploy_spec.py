"""A deployment's file: what it becomes, and what is refused by name."""

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from a_deployment import PYTHON, made, written
from ddtree.deploy.spec import HERE, Deployment, RouterPart, load
from ddtree.errors import DamagedFile, DDTreeError, InvalidOption, ModelNotFound

DOCS = Path(__file__).parents[2] / "docs/deploy.md"
NO_FIELDS = ("source",)


def test_an_empty_file_is_one_replica_of_the_embedded_model_here(tmp_path: Path) -> None:
    deployment = written(tmp_path, "")
    (replica,) = deployment.replicas()
    assert (replica.host, replica.index, replica.name, replica.port, replica.gpus) == (HERE, 0, "ddtree-0", 30001, ())
    assert replica.argv[:4] == (sys.executable, "-m", "ddtree", "serve")
    assert replica.environment["CUDA_VISIBLE_DEVICES"] == "", "a card that is there is not seen"
    assert replica.environment["PATH"].split(":")[:2] == [str(Path(sys.executable).parent), "/usr/local/sbin"]
    assert len(replica.environment) == 2
    assert (deployment.scope, deployment.routed, deployment.router.port) == ("user", "nginx", 30000)
    assert deployment.source == "chat.toml"
    assert deployment.systemd >= 247


def test_fields_of_the_file_and_sets_over_it(tmp_path: Path) -> None:
    text = 'name = "a"\nmode = "linear"\nargs = ["--max-queue", "8"]\n[router]\nport = 31000\n[environment]\nA = "1"\n'
    deployment = written(tmp_path, text, "mode=ar", "router.port=32000", "environment.B=x y", 'hosts=["h1", "h2"]')
    assert (deployment.mode, deployment.router.port, deployment.hosts) == ("ar", 32000, ("h1", "h2"))
    assert deployment.environment == {"A": "1", "B": "x y"}
    assert deployment.replicas()[0].argv[-2:] == ("--max-queue", "8")
    assert [replica.host for replica in deployment.replicas()] == ["h1", "h2"]


def test_the_command_says_every_field_that_the_server_takes() -> None:
    first, second = made(model="/m", drafter="/d", mode="linear", stop_seconds=7).replicas()
    assert first.argv == (
        PYTHON, "-m", "ddtree", "serve", "--model", "/m", "--drafter", "/d", "--mode", "linear", "--host", "127.0.0.1",
        "--port", "30001", "--shutdown-timeout", "7", "--device", "cpu",
    )  # fmt: skip
    assert (second.port, second.name, second.index) == (30002, "chat-1", 1)


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ({"gpus": ("0", "1")}, ["0", "1"]),
        ({"gpus": ("3", "1"), "replicas_per_gpu": 2}, ["3", "3", "1", "1"]),
        ({"gpus": ("0", "1", "2", "3"), "gpus_per_replica": 2, "engine": "sglang"}, ["0,1", "2,3"]),
        ({"gpus": ("GPU-8a1b", "GPU-9c2d")}, ["GPU-8a1b", "GPU-9c2d"]),
    ],
)
def test_each_replica_sees_its_own_cards(changes: dict[str, Any], gpus: list[str]) -> None:
    deployment = made(**changes)
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in deployment.replicas()] == gpus
    assert [one.environment["CUDA_DEVICE_ORDER"] for one in deployment.replicas()] == ["PCI_BUS_ID"] * len(gpus)
    assert [",".join(one.gpus) for one in deployment.replicas()] == gpus
    assert deployment.per_host == len(gpus)


def test_named_cards_are_never_exchanged_for_the_cpu() -> None:
    argv = made(gpus=("0",)).replicas()[0].argv
    assert argv[argv.index("--device") + 1] == "cuda"


def test_sglang_gets_its_tensor_parallelism_unless_args_name_it() -> None:
    cards = {"engine": "sglang", "gpus": ("0", "1", "2", "3"), "gpus_per_replica": 4}
    argv = made(**cards).replicas()[0].argv
    assert argv[4:6] == ("--engine", "sglang")
    assert argv[-2:] == ("--tp-size", "4")
    assert "--shutdown-timeout" not in argv
    assert "--device" not in argv
    own = made(**cards, args=("--tp-size=2", "--dp-size", "2")).replicas()[0].argv
    assert [word for word in own if word.startswith("--tp")] == ["--tp-size=2"]


@pytest.mark.parametrize("args", [("--tp", "4", "--enable-dp-attention", "--dp", "2"), ("--tp", "8", "--nnodes", "2")])
def test_sizes_that_use_the_cards_are_taken(args: tuple[str, ...]) -> None:
    assert made(engine="sglang", gpus=("0", "1", "2", "3"), gpus_per_replica=4, args=args).per_host == 1


def test_the_systems_services_have_a_home_of_their_own() -> None:
    assert made(scope="system", user="ddtree").replicas()[0].environment["HOME"] == "/var/cache/ddtree/chat"
    assert made(cache="/big").replicas()[0].environment["HOME"] == "/big"
    assert "HOME" not in made().replicas()[0].environment
    own = made(cache="/big", environment={"HOME": "/mine"}).replicas()[0].environment
    assert own["HOME"] == "/mine", "the file's environment goes over what follows from other fields"


def test_places() -> None:
    assert made().place == "~/.local/share/ddtree/chat"
    assert made().state_folder == Path.home() / ".local/share/ddtree/chat"
    assert made(scope="system", user="u").place == "/var/lib/ddtree/chat"
    assert made(folder="/srv/x").place == "/srv/x"


CARDS = {"gpus": ("0", "1", "2", "3")}
TOGETHER = {"router": RouterPart(reach="all")}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "Chat"}, "name is 'Chat'"),
        ({"name": "a.b"}, "name is 'a.b'"),
        ({"hosts": ()}, "hosts is []"),
        ({"hosts": ("a", "a")}, "once"),
        ({"hosts": ("localhost", "127.0.0.1")}, "of different machines"),
        ({"hosts": ("a/b",)}, "hosts is 'a/b'"),
        ({"hosts": ("..",)}, "hosts is '..'"),
        ({"scope": "root"}, "scope 'root' is unknown: choose one of system, user"),
        ({"scope": "system"}, "user is ''"),
        ({"user": "x"}, "user is 'x'"),
        ({"scope": "system", "user": "a b"}, "user is 'a b'"),
        ({"scope": "system", "user": "x", "folder": "~/x"}, "folder is '~/x'"),
        ({"scope": "system", "user": "x", "secrets": "~/x"}, "secrets is '~/x'"),
        ({"engine": "vllm"}, "engine 'vllm' is unknown: choose one of embedded, sglang"),
        ({"mode": "fast"}, "mode 'fast' is unknown"),
        ({"model": ""}, "model is ''"),
        ({"model": "./x"}, "model is './x'"),
        ({"drafter": "~/x"}, "drafter is '~/x'"),
        ({"host": "a b"}, "host is 'a b'"),
        ({"cpu_replicas": 0}, "cpu_replicas is 0: it must be at least 1"),
        ({"stop_seconds": -1}, "stop_seconds is -1"),
        ({"start_seconds": 0}, "start_seconds is 0"),
        ({"systemd": 200}, "systemd is 200: it must be from 247"),
        ({"gpus": ("0", "0")}, "names 0 once"),
        ({"gpus": ("00",)}, "gpus is '00'"),
        ({"gpus": ("x",)}, "gpus is 'x'"),
        ({"gpus": ("0", "GPU-1")}, "all indices, or all UUIDs"),
        (CARDS | {"cpu_replicas": 2}, "cpu_replicas is 2: it must be left out where gpus are named"),
        (CARDS | {"gpus_per_replica": 2}, "gpus_per_replica is 2: it must be 1: the embedded engine"),
        (CARDS | {"gpus_per_replica": 3, "engine": "sglang"}, "a divisor of the 4 GPUs"),
        (CARDS | {"gpus_per_replica": 2, "replicas_per_gpu": 2, "engine": "sglang"}, "replicas_per_gpu is 2"),
        ({"replicas_per_gpu": 2}, "replicas_per_gpu is 2: it must be left out where gpus is"),
        ({"engine": "sglang"}, "gpus is 'none'"),
        ({"port": 80}, "port is 80: it must be from 1024 to 65534"),
        ({"port": 65535}, "port is 65535: it must be from 1024 to 65534"),
        ({"router": RouterPart(port=30002)}, "router.port is 30002: it must be none of the replicas' ports 30001"),
        ({"router": RouterPart(port=80)}, "router.port is 80: it must be at least 1024 with scope"),
        ({"router": RouterPart(args=("--policy", "random"))}, "router.args means nothing to the router nginx"),
        ({"router": RouterPart("none", port=1)}, "router.port means nothing to the router none: leave it out"),
        (CARDS | {"engine": "sglang", "router": RouterPart(program="/x")}, "router.program means nothing to the"),
        (CARDS | {"engine": "sglang", "router": RouterPart(max_body_mib=1)}, "router.max_body_mib means nothing"),
        (TOGETHER | {"hosts": ("a", "b"), "host": "10.0.0.1"}, "host is '10.0.0.1': it must be one that means every"),
        (TOGETHER | {"hosts": ("a", "b")}, "host is '127.0.0.1'"),
        (TOGETHER | {"hosts": ("localhost", "b"), "host": "0.0.0.0"}, "without localhost"),
        ({"args": ("--port", "1")}, "args holds --port, which the field port says"),
        ({"args": ("--model=x",)}, "args holds --model, which the field model says"),
        ({"args": ("--api-key", "k")}, "DDTREE_API_KEY in the file that `secrets` names"),
        ({"args": ("--api-key=k",)}, "every list of processes would show it"),
        (CARDS | {"engine": "sglang", "args": ("--admin-api-key", "k")}, "SGLang's own --config FILE"),
        ({"args": ("",)}, "args is ''"),
        ({"args": ("a\nb",)}, "args is 'a\\nb'"),
        (CARDS | {"engine": "sglang", "args": ("--dp-size", "2")}, "--dp-size without --tp-size"),
        (CARDS | {"engine": "sglang", "args": ("--tp", "2")}, "gpus_per_replica is 1: it must be 2"),
        (CARDS | {"engine": "sglang", "args": ("--tp",)}, "a whole number each"),
        ({"environment": {"A B": "1"}}, "environment.A B is '1'"),
        ({"environment": {"1A": "1"}}, "environment.1A"),
        ({"environment": {"A": "\x01"}}, "control characters"),
        ({"environment": {"CUDA_VISIBLE_DEVICES": "0"}}, "gpus says which cards are seen"),
        ({"python": "python3"}, "python is 'python3': it must be a path that begins with /"),
        ({"python": "~/bin/python"}, "systemd takes no other here"),
        ({"folder": "x"}, "folder is 'x'"),
        ({"secrets": '/a"b'}, "without quotes"),
        ({"cache": "/a$b"}, "cache is '/a$b'"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidOption, match=re.escape(words)):
        made(**changes)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"kind": "haproxy"}, "router.kind 'haproxy' is unknown: choose one of auto, nginx, sglang-router, none"),
        ({"reach": "world"}, "router.reach 'world' is unknown"),
        ({"port": 0}, "router.port is 0"),
        ({"host": "a b"}, "router.host is 'a b'"),
        ({"program": "nginx"}, "router.program is 'nginx'"),
        ({"max_body_mib": 0}, "router.max_body_mib is 0"),
        ({"args": ("",)}, "router.args is ''"),
    ],
)
def test_the_routers_values_are_checked(part: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidOption, match=re.escape(words)):
        RouterPart(**part)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu = [0]", "gpu is unknown: the file has name, hosts"),
        ("[router]\nports = 1", "router.ports is unknown: router has kind, host"),
        ("router = 1", "router is 1: it must be a table"),
        ('gpus = "all"', "gpus is 'all': it must be a list of indices or UUIDs, as [0, 1], or \"none\""),
        ("gpus = []", "gpus is []"),
        ("gpus = [true]", "gpus is [True]"),
        ('port = "1"', "port is '1': it must be a whole number"),
        ("port = true", "port is True: it must be a whole number"),
        ('hosts = "a"', "hosts is 'a': it must be a list of text"),
        ("hosts = [1]", "hosts is [1]: it must be a list of text"),
        ("[environment]\nA = 1", "environment is {'A': 1}: it must be a table of names and text"),
        ('source = "x"', "source is unknown"),
    ],
)
def test_what_the_file_may_not_hold(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InvalidOption, match=re.escape(words)):
        written(tmp_path, text)


def test_files_that_are_no_deployment(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"docs/deploy\.md"):
        load(tmp_path / "none.toml")
    with pytest.raises(DamagedFile, match="not valid TOML"):
        written(tmp_path, "name = ")
    with pytest.raises(InvalidOption, match="write it as mode=linear"):
        written(tmp_path, "", "mode")
    for text in ("[" * 100_000, f"port = {'9' * 5000}"):
        with pytest.raises(DamagedFile, match="not valid TOML"):
            written(tmp_path, text)
    with pytest.raises(InvalidOption, match="name is '999"):
        written(tmp_path, "", f"name={'9' * 5000}")


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refused)
    (tmp_path / "x.toml").touch()
    with pytest.raises(DamagedFile, match=r"x\.toml cannot be read \(Permission denied\)"):
        load(tmp_path / "x.toml")


@pytest.mark.parametrize("name", ["x\nUser=root.toml", "x.toml\\"])
def test_a_file_s_name_adds_no_line_to_a_unit(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(InvalidOption, match="a name of printable signs"):
        load(tmp_path / name)


def test_cards_of_a_file(tmp_path: Path) -> None:
    assert written(tmp_path, "gpus = [1, 0]").gpus == ("1", "0")
    assert written(tmp_path, 'gpus = ["GPU-1a"]').gpus == ("GPU-1a",)
    assert written(tmp_path, 'gpus = "none"\ncpu_replicas = 3').per_host == 3


def test_which_host_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "b.example")
    assert made().here() == "localhost"
    assert made(hosts=("a", "b.example")).here() == "b.example"
    assert made(hosts=("a", "b")).here() == "b"
    assert made(hosts=("a", "c")).here("c") == "c"
    with pytest.raises(InvalidOption, match=r"this machine is called b\.example, which is none of a, c: .* --host"):
        made(hosts=("a", "c")).here()
    with pytest.raises(InvalidOption, match="host 'd' is unknown: choose one of a, c"):
        made(hosts=("a", "c")).here("d")


@given(
    cards=st.integers(0, 12), each=st.integers(1, 4), share=st.integers(1, 4), hosts=st.integers(1, 3),
    port=st.integers(1000, 65600), router=st.integers(1, 65535),
)  # fmt: skip
def test_nothing_collides(cards: int, each: int, share: int, hosts: int, port: int, router: int) -> None:
    """Whatever is accepted: no port of a host twice, and no card in more replicas than were asked for."""
    try:
        deployment = made(
            gpus=tuple(map(str, range(cards))), gpus_per_replica=each, replicas_per_gpu=share, port=port,
            engine="sglang" if cards else "embedded", hosts=tuple(f"h{i}" for i in range(hosts)),
            router=RouterPart(port=router),
        )  # fmt: skip
    except DDTreeError:
        return
    for host in deployment.hosts:
        replicas = deployment.on(host)
        ports = [replica.port for replica in replicas] + [router]
        assert len(set(ports)) == len(ports)
        assert all(1024 <= one.port <= 65535 for one in replicas)
        assert len({replica.name for replica in replicas} | {deployment.router_name}) == len(replicas) + 1
        for card in deployment.gpus:
            assert sum(card in replica.gpus for replica in replicas) == share
        assert {len(replica.gpus) for replica in replicas} <= {each if cards else 0}


def test_every_field_is_explained() -> None:
    text = DOCS.read_text(encoding="utf-8")
    names = {field.name for field in dataclasses.fields(Deployment)} - {*NO_FIELDS, "router", "environment"}
    names |= {f"router.{field.name}" for field in dataclasses.fields(RouterPart)} | {"[environment]"}
    assert {name for name in names if f"| `{name}` |" not in text} == set()
