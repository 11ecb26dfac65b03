"""rollout and rollback: replica by replica, compared, and all back at the first failure."""

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from ddtree.deploy import commands
from ddtree.deploy.compare import Limits
from ddtree.deploy.failures import DeployFailed
from ddtree.deploy.trial import Trial
from fakes import Deployed, make, running_command, wait_until

SLOWER = 'environment.FAKE_TOKENS_S="200"'  # so that a rollout lasts long enough to be killed in its middle


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Deployed]:
    """Two replicas that run in mode linear."""
    deployed = make(tmp_path)
    deployed.apply()
    yield deployed
    deployed.close()


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Deployed]:
    """One replica."""
    deployed = make(tmp_path, replicas=1)
    deployed.apply()
    yield deployed
    deployed.close()


def test_linear_to_tree_and_back(two: Deployed) -> None:
    outcome = two.rollout("mode=tree")
    assert outcome.generation == 2
    assert two.modes() == ["tree", "tree"]
    compared = outcome.figures["comparisons"]
    assert [(one["mode_before"], one["mode_after"], one["same"]) for one in compared] == [("linear", "tree", 2)] * 2
    assert compared[0]["acceptance_after"] > compared[0]["acceptance_before"]
    back = commands.rollback(two.asked())
    assert back.generation == 1
    assert two.modes() == ["linear", "linear"]
    assert two.folder.pointed("previous").number == 2
    assert commands.rollback(two.asked()).generation == 2  # and forth


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("dies", "died before it was healthy"),
        ("wrong", "answer 1 differs, which float32 does not allow"),
        ("slow", r"are less than 0\.3 of .* \(--min-speed\)"),
        ("poor", r"acceptance length 1\.00 is less than 0\.8 of 2\.00 \(--min-acceptance\)"),
        ("silent", "failed the smoke test: .* 500: the drafter gave NaN"),
    ],
)
def test_a_bad_generation_goes_back_by_itself(two: Deployed, fault: str, why: str) -> None:
    before = two.kept()
    with pytest.raises(DeployFailed, match=why) as caught:
        two.rollout("mode=tree", f"environment.FAKE={fault}", limits=Limits(0.3, 0.8, prompts=2, max_tokens=64))
    assert "what ran before is back" in str(caught.value)
    assert two.kept() == before
    assert two.state().drained == []
    assert two.state().operation is None


def test_the_second_replica_fails_and_both_go_back(two: Deployed) -> None:
    """The file's environment is for all replicas, so the second one's port is taken instead."""
    import socket

    from ddtree.deploy import converge, site

    pids, taken = two.pids(), []
    stop = site.Site.stop

    def stop_and_take(self: site.Site, service: str) -> None:
        stop(self, service)
        if service == "fake-1" and not taken:
            taken.append(socket.create_server(("127.0.0.1", two.port + 1)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site.Site, "stop", stop_and_take)
        patch.setattr(site, "FREE_S", 0.1)
        put_back = converge.put_back

        def freed(one: site.Site) -> list[str]:
            taken[0].close()
            return put_back(one)

        patch.setattr(converge, "put_back", freed)
        with pytest.raises(DeployFailed, match="is taken by something that is no service of this deployment"):
            two.rollout("mode=tree")
    assert two.modes() == ["linear", "linear"]
    assert not set(two.pids()) & set(pids)  # both were touched
    assert two.state().services == {"fake-0": 1, "fake-1": 1}


def test_other_numerics_are_reported_and_are_no_failure(two: Deployed) -> None:
    outcome = two.rollout("environment.FAKE=wrong", "environment.FAKE_DTYPE=bfloat16")
    assert outcome.figures["comparisons"][0]["same"] == 0
    assert outcome.figures["comparisons"][0]["promise"] == "not promised by these numerics"


def test_nothing_to_roll_out(two: Deployed) -> None:
    pids = two.pids()
    assert not two.rollout().changed
    assert two.pids() == pids


def test_a_rollout_needs_something_that_runs(tmp_path: Path) -> None:
    with pytest.raises(DeployFailed, match="ddtree deploy apply starts it"):
        make(tmp_path).rollout()


def test_no_way_back_from_the_first_generation(two: Deployed) -> None:
    with pytest.raises(DeployFailed, match="holds no previous generation"):
        commands.rollback(two.asked())


@pytest.mark.parametrize("then", ["goes on", "is undone"])
def test_killed_in_the_middle(two: Deployed, then: str) -> None:
    """After the first replica, before the second one's turn is over."""
    pids = two.pids()
    words = [str(two.path), "--set", "mode=tree", "--set", SLOWER, "--prompts", "2", "--min-speed", "0"]
    with running_command(two, "rollout", *words) as command:
        wait_until(lambda: len(two.state().operation.touched if two.state().operation else {}) == 2)
        command.send_signal(signal.SIGKILL)
    operation = two.state().operation
    assert operation is not None
    assert operation.kind == "rollout"
    assert two.folder.pointed("current").number == 1
    if then == "goes on":
        limits = Limits(0, prompts=2, max_tokens=8)
        assert two.rollout("mode=tree", SLOWER, limits=limits).generation == 2
        assert any("was interrupted: this goes on from there" in line for line in two.said)
        assert two.modes() == ["tree", "tree"]
    else:
        commands.rollback(two.asked())
        assert two.modes() == ["linear", "linear"]
        assert two.pids()[0] != pids[0]
    assert two.state().operation is None
    assert two.state().drained == []


def test_an_interrupted_rollout_that_fails_later_goes_back_behind_both(two: Deployed) -> None:
    words = [str(two.path), "--set", "mode=tree", "--set", SLOWER, "--prompts", "2", "--min-speed", "0"]
    with running_command(two, "rollout", *words) as command:
        wait_until(lambda: len(two.state().operation.touched if two.state().operation else {}) == 2)
        command.send_signal(signal.SIGKILL)
    with pytest.raises(DeployFailed, match="died before it was healthy"):
        two.rollout("mode=tree", "environment.FAKE=dies")
    assert two.modes() == ["linear", "linear"]
    assert two.state().services == {"fake-0": 1, "fake-1": 1}


def test_a_dead_replica_is_compared_with_the_other_one(two: Deployed) -> None:
    site = two.site()
    pid = two.pids()[0]
    os.kill(site.manager._told("fake-0")["supervisor"][0], signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not site.manager.state("fake-0").running)
    with pytest.raises(DeployFailed, match="answer 1 differs"):
        two.rollout("mode=tree", "environment.FAKE=wrong")
    assert any("fake-0 is compared with fake-1" in line for line in two.said)
    assert two.modes() == ["linear", "linear"]


# The shadow first.


def test_promoted_from_the_shadow(two: Deployed) -> None:
    outcome = two.rollout("mode=tree", trial=Trial(min_gain=1.2, prompts=2))
    shadow = outcome.figures["shadow"]
    assert shadow["gain"] == 1.25
    assert shadow["agree"] is True
    assert two.modes() == ["tree", "tree"]
    assert two.folder.pointed("previous").number == 1
    assert outcome.figures["comparisons"][-1]["mode_before"] == "linear"


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("gainless", "a gain of 1.000, and --min-gain is 1.1"),
        ("disagree", "the tree's tokens were not those that came"),
    ],
)
def test_not_promoted(two: Deployed, fault: str, why: str) -> None:
    before = two.kept()
    with pytest.raises(DeployFailed, match=re.escape(why)):
        two.rollout("mode=tree", f"environment.FAKE={fault}", trial=Trial(1.1, prompts=2))
    assert two.kept() == before


def test_a_shadow_that_nobody_sends_requests(two: Deployed) -> None:
    before = two.kept()
    with pytest.raises(DeployFailed, match="the shadow saw no round that drafted"):
        two.rollout("mode=tree", trial=Trial(1.1, seconds=0.2))
    assert two.kept() == before


@pytest.mark.parametrize("fault", ["", "disagree"])
def test_the_shadow_under_live_traffic(two: Deployed, fault: str) -> None:
    over = threading.Event()

    def send() -> None:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
        while not over.is_set():
            with suppress(httpx.HTTPError):  # while it starts anew: there is no router here
                httpx.post(f"http://127.0.0.1:{two.port}/v1/chat/completions", json=body, trust_env=False)

    client = threading.Thread(target=send)
    client.start()
    try:
        sets, trial = ("mode=tree", f"environment.FAKE={fault}"), Trial(1.2, seconds=0.5)
        if not fault:
            shadow = two.rollout(*sets, limits=Limits(0, prompts=1, max_tokens=4), trial=trial).figures["shadow"]
            assert shadow["gain"] == pytest.approx(1.25, abs=0.01)
            assert two.modes() == ["tree", "tree"]
        else:
            with pytest.raises(DeployFailed, match="the tree's tokens were not those that came"):
                two.rollout(*sets, limits=Limits(0, prompts=1, max_tokens=4), trial=trial)
    finally:
        over.set()
        client.join(20)


def test_the_shadow_is_for_trees(two: Deployed) -> None:
    with pytest.raises(DeployFailed, match="--shadow-first is for mode tree, and the file says linear"):
        two.rollout(trial=Trial())


# A lone replica.


def test_a_lone_replica_has_a_gap_that_is_told(one: Deployed) -> None:
    one.rollout("mode=tree")
    assert any(
        "fake-0 is the only replica: requests are refused while it starts, the last" in line for line in one.said
    )
    assert one.modes() == ["tree"]


def test_a_fault_of_our_own_puts_back_too(two: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    from ddtree.deploy import compare

    before = two.kept()
    monkeypatch.setattr(compare, "judge", lambda *_: 1 / 0)
    with pytest.raises(DeployFailed, match="ZeroDivisionError: division by zero; what ran before is back"):
        two.rollout("mode=tree")
    assert two.kept() == before


def test_a_server_that_does_not_tell_its_load(two: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    from ddtree.deploy import site
    from ddtree.deploy.live import Endpoint

    monkeypatch.setattr(site, "UNKNOWN_S", 0.1)
    monkeypatch.setattr(Endpoint, "load", lambda _self: None)
    two.site().wait_idle("fake-0", Endpoint(f"127.0.0.1:{two.port}"))
    assert "fake-0 does not tell how many requests it has" in two.said[-1]


def test_requests_that_do_not_end(two: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    from ddtree.deploy.live import Endpoint
    from ddtree.deploy.site import Waits

    monkeypatch.setattr(Endpoint, "load", lambda _self: (2, 1))
    one = two.site()
    one.waits = Waits(20.0, 0.3)
    with pytest.raises(DeployFailed, match=r"still has 2 running and 1 waiting requests after 0\.3 s"):
        one.wait_idle("fake-0", Endpoint(f"127.0.0.1:{two.port}"))
