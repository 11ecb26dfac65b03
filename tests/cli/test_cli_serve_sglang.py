"""`ddtree serve --engine sglang`: what is ours is translated, the rest goes through."""

import shlex
from itertools import pairwise

import pytest
from fake_engine import Command

from ddtree.cli import serve_sglang
from ddtree.sglang import launch


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang on a Hopper."""
    monkeypatch.setattr(launch, "check", lambda: None)
    monkeypatch.setattr(launch, "installed_grammars", lambda: ["xgrammar"])
    monkeypatch.setattr(serve_sglang, "_card", lambda: (9, 0))


@pytest.mark.parametrize("engine", [["--engine", "sglang"], ["--engine=sglang"]])
def test_command(ddtree: Command, engine: list[str]) -> None:
    ran = ddtree(
        "serve", "--model", "some/target", *engine, "--drafter", "/a/drafter", "--mode", "shadow-linear",
        "--tree-budget", "8", "--max-model-len", "512", "--print-command",
        "--tp-size", "2", "--host", "::1", "--trust-remote-code",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    words = shlex.split(ran.out)
    told = dict(pairwise(words))
    assert told["--model-path"] == "some/target"
    assert told["--speculative-draft-model-path"] == "/a/drafter"
    assert told["--speculative-ddtree-mode"] == "shadow-linear"
    assert told["--speculative-ddtree-budget"] == "8"
    assert told["--context-length"] == "512"
    assert words[-5:] == ["--tp-size", "2", "--host", "::1", "--trust-remote-code"]
    assert "--model" not in words


def test_it_runs_the_command(ddtree: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda path, words: ran.append([path, *words]))
    assert ddtree("serve", "--engine", "sglang", "--model", "m", "--mode", "ar", "--port", "9").code == 0
    assert ran[0][0] == ran[0][1]
    assert ran[0][-2:] == ["--port", "9"]
    assert "--speculative-algorithm" not in ran[0]


def test_an_unknown_engine(ddtree: Command) -> None:
    ran = ddtree("serve", "--engine", "tgi")
    assert ran.code == 1
    assert "engine 'tgi' is unknown: choose ddtree or sglang" in ran.err


def test_without_a_gpu(ddtree: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(launch, "check", lambda: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ran = ddtree("serve", "--engine", "sglang", "--model", "m", "--mode", "ar")
    assert ran.code == 1
    assert "needs a GPU" in ran.err
