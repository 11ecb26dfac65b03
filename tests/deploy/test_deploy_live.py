"""What replicas say, what is concluded from it, `status`, and the command line."""

import errno
import json
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fake_server
from ddtree.cli.app import app
from ddtree.deploy import commands, status
from ddtree.deploy.compare import Limits, Measured, judge
from ddtree.deploy.failures import DeployFailed
from ddtree.deploy.generation import Member
from ddtree.deploy.live import Answer, Endpoint, acceptance_of, mode_of, same_tokens_promised
from ddtree.deploy.site import endpoint
from ddtree.deploy.trial import Seen, Trial, of_answers, of_counters
from ddtree.deploy.unit_file import parse
from fakes import Deployed, make

FLOAT32 = {"model": "m", "dtype": "float32", "numerics": "plain", "device": "cpu"}
HALF = FLOAT32 | {"dtype": "bfloat16", "numerics": "invariant", "device": "cuda:0"}
RUN = CliRunner()


@pytest.fixture
def at() -> Iterator[Endpoint]:
    """A fake server within this process."""
    with ThreadingHTTPServer(("127.0.0.1", 0), fake_server.Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield Endpoint(f"127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Deployed]:
    """Two replicas that run."""
    deployed = make(tmp_path)
    deployed.apply()
    yield deployed
    deployed.close()


def test_what_a_server_says(at: Endpoint) -> None:
    assert at.healthy() == (True, "/health answers 200")
    assert mode_of(at.info()) == "tree"
    assert at.load() == (0, 0)
    answer = at.ask("Hi", 8, 5)
    assert answer.tokens == len(answer.token_ids) == 8
    assert acceptance_of(at.counters()) == pytest.approx(7 / 3)


def test_nobody_there() -> None:
    nobody = Endpoint("127.0.0.1:1")
    assert nobody.healthy() == (False, "ConnectError")
    assert nobody.info() == {}
    assert nobody.load() is None
    with pytest.raises(DeployFailed, match=r"http://127\.0\.0\.1:1/v1/models: ConnectError"):
        nobody.ask("Hi", 8, 5)


def test_a_key_that_is_no_ascii_is_the_server_s_to_refuse(at: Endpoint) -> None:
    assert Endpoint(at.address, "schlüssel").healthy() == (True, "/health answers 200")


def test_an_endpoint_never_shows_its_key() -> None:
    assert "secret" not in repr(Endpoint("127.0.0.1:1", "secret"))


@pytest.mark.parametrize(
    ("old", "new", "promised"),
    [
        (FLOAT32, FLOAT32, True),
        (HALF, HALF | {"device": "cuda:3"}, True),
        (FLOAT32 | {"dtype": "bfloat16"}, FLOAT32 | {"dtype": "bfloat16"}, False),  # plain numerics
        (HALF, HALF | {"numerics": "fast"}, False),
        (FLOAT32, FLOAT32 | {"device": "cuda:0"}, False),
        (FLOAT32, FLOAT32 | {"model": "other"}, False),
        ({}, {}, False),  # SGLang says nothing of the kind
    ],
)
def test_when_tokens_must_be_the_same(old: dict[str, Any], new: dict[str, Any], promised: bool) -> None:
    assert same_tokens_promised(old, new) is promised


def measured(mode: str, acceptance: float | None, seconds: float, ids: tuple[int, ...] = (1, 2)) -> Measured:
    """One answer of two tokens."""
    answer = Answer("a", ids, 2, seconds, acceptance, 1 if acceptance else 0)
    return Measured(FLOAT32 | {"speculation": {"mode": mode}}, (answer,))


def test_plain_decoding_need_not_keep_an_acceptance() -> None:
    assert judge(measured("tree", 3.0, 1.0), measured("ar", None, 1.0), Limits()).failure is None
    lost = judge(measured("tree", 3.0, 1.0), measured("tree", None, 1.0), Limits()).failure
    assert lost is not None
    assert "acceptance length 1.00 is less than 0.8 of 3.00" in lost
    assert judge(measured("tree", 3.0, 1.0), measured("tree", None, 1.0), Limits(min_acceptance=0)).failure is None


def test_text_is_compared_where_there_are_no_tokens() -> None:
    one, other = Answer("a", None, 2, 1.0), Answer("b", None, 2, 1.0)
    verdict = judge(Measured(HALF, (one,)), Measured(HALF, (other,)), Limits())
    assert verdict.failure == "answer 1 differs, which bfloat16 does not allow"
    assert judge(Measured({}, (one,)), Measured({}, (other,)), Limits()).failure is None


def test_limits_are_checked() -> None:
    with pytest.raises(DeployFailed, match="--min-speed must be from 0"):
        Limits(min_speed=-1)
    with pytest.raises(DeployFailed, match="--min-gain must be above 0"):
        Trial(min_gain=0)
    with pytest.raises(DeployFailed, match="--shadow-seconds must be"):
        Trial(seconds=-1)


def test_the_key_is_the_services_own(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    secrets.write_text('DDTREE_API_KEY="one two"\n', encoding="utf-8")
    member = Member("it", 0, "localhost", "127.0.0.1:1", (), "tree", "embedded")
    text = f"[Service]\nExecStart=/bin/serve --port 1\nEnvironmentFile={secrets}\n"
    assert endpoint(member, parse("it", text)).api_key == "one"
    assert endpoint(member, parse("it", text.replace("--port 1", "--api-key three"))).api_key == "three"
    secrets.unlink()
    assert endpoint(member, parse("it", text)).api_key is None


# The shadow's figures.


def shadow(rounds: int, linear: float, tree: float, agree: bool | None) -> Answer:
    """An answer in the shadow mode."""
    told = {"linear_acceptance_length": linear, "tree_acceptance_length": tree, "agree": agree}
    return Answer("a", None, 1, 1.0, linear, rounds, told)


def test_the_shadow_by_its_answers() -> None:
    seen = of_answers([shadow(10, 2.0, 3.0, True), shadow(30, 3.0, 3.0, True), Answer("a", None, 1, 1.0)])
    assert seen == Seen(40, 2.75, 3.0, True)
    assert of_answers([shadow(1, 2.0, 3.0, True), shadow(1, 2.0, 3.0, False)]).agree is False
    assert of_answers([shadow(1, 2.0, 3.0, None)]).agree is None
    assert of_answers([]).gain is None


def test_the_shadow_by_its_counters() -> None:
    ours = {
        "ddtree_shadow_rounds_total": 10.0, "ddtree_shadow_chain_tokens_total": 10.0,
        "ddtree_shadow_accepted_tokens_total": 20.0, "ddtree_shadow_disagreements_total": 1.0,
    }  # fmt: skip
    assert of_counters({}, ours) == Seen(10, 2.0, 3.0, False)
    before = ours | {"ddtree_shadow_rounds_total": 5.0}
    assert of_counters(before, ours) == Seen(5, 1.0, 1.0, True)  # the disagreement was before
    sglang = {
        "ddtree_mode_rounds_total": 4.0, "ddtree_mode_accepted_tokens_total": 4.0,
        "ddtree_shadow_accepted_tokens_total": 8.0,
    }  # fmt: skip
    assert of_counters({}, sglang) == Seen(4, 2.0, 3.0, None)
    assert of_counters(ours, ours).gain is None


# status, and the command line.


def test_status(two: Deployed) -> None:
    found = status.look(two.site())
    assert found["well"] is True
    assert [(row["replica"], row["mode"], row["health"]) for row in found["replicas"]] == [
        ("fake-0", "linear", "ok"), ("fake-1", "linear", "ok"),
    ]  # fmt: skip
    two.site().manager.stop("fake-1")
    found = status.look(two.site())
    assert found["well"] is False
    assert found["replicas"][1]["health"] == "ConnectError"
    lines = status.as_text(found).splitlines()
    assert lines[0].split()[:6] == ["replica", "port", "gpus", "manager", "health", "mode"]
    assert lines[2].split()[:5] == ["fake-1", str(two.port + 1), "-", "stopped", "ConnectError"]


def test_status_on_the_command_line(two: Deployed) -> None:
    done = RUN.invoke(app, ["deploy", "status", str(two.path), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["current"] == 1
    two.site().manager.stop("fake-0")
    assert RUN.invoke(app, ["deploy", "status", str(two.path)]).exit_code == 1


def test_nothing_is_done_without_a_terminal_or_yes(two: Deployed) -> None:
    done = RUN.invoke(app, ["deploy", "apply", str(two.path), "--set", "mode=tree"])
    assert done.exit_code == 1
    assert "There is no terminal to ask on: add --yes" in done.output
    assert two.modes() == ["linear", "linear"]


def test_a_failed_rollout_on_the_command_line(two: Deployed) -> None:
    words = ["deploy", "rollout", str(two.path), "--yes", "--set", "environment.FAKE=dies", "--json"]
    done = RUN.invoke(app, words)
    assert done.exit_code == 1
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert "error: the drafter cannot be read: model.safetensors is truncated" in lines  # a line of its own
    assert lines[-1] == "what ran before is back"


def test_another_manager_would_start_them_twice(two: Deployed) -> None:
    done = RUN.invoke(app, ["deploy", "apply", str(two.path), "--manager", "systemd", "--yes"])
    assert done.exit_code == 1
    assert "--manager systemd would start them twice" in done.output


@pytest.mark.parametrize("command", ["apply", "rollback", "remove"])
def test_a_disk_that_refuses_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/place/state.json")

    monkeypatch.setattr(commands, command, refused)
    done = RUN.invoke(app, ["deploy", command, str(tmp_path / "x.toml"), "--yes"])
    assert done.exit_code == 1
    assert done.stderr == "error: /place/state.json: No space left on device; run this as who may, or make room\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--min-gain", "2"], "go with --shadow-first"),
        (["--beside-port", "0"], "--beside-port must be from 1 to 65535, not 0"),
        (["--drain-seconds", "0"], "--drain-seconds must be above 0"),
        (["--min-speed", "-1"], "--min-speed must be from 0"),
        (["--prompts", "0"], "--prompts must be from 1 to 28, those of the suite, not 0"),
        (["--max-tokens", "0"], "--max-tokens must be from 1 to 1024, not 0"),
        (["--beside-port", "9"], "--beside-port is for one replica behind a router"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, words: list[str], said: str) -> None:
    done = RUN.invoke(app, ["deploy", "rollout", str(make(tmp_path).path), "--yes", *words])
    assert done.exit_code == 1
    assert said in done.output
