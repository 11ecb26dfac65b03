"""`ddtree serve --engine sglang`: what is ours is translated, the rest goes through."""

import shlex
from dataclasses import replace
from itertools import pairwise

import pytest
from fake_engine import Command

from ddtree.cli import serve_sglang
from ddtree.doctor.facts import Asked, Facts, Port
from ddtree.sglang import launch
from machines import sglang


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
        "--tree-budget", "8", "--draft-pairwise", "on", "--max-model-len", "512", "--print-command",
        "--tp-size", "2", "--host", "::1", "--trust-remote-code",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    words = shlex.split(ran.out)
    told = dict(pairwise(words))
    assert told["--model-path"] == "some/target"
    assert told["--speculative-draft-model-path"] == "/a/drafter"
    assert told["--speculative-ddtree-mode"] == "shadow-linear"
    assert told["--speculative-ddtree-budget"] == "8"
    assert told["--speculative-ddtree-pairwise"] == "on"
    assert told["--context-length"] == "512"
    assert words[-5:] == ["--tp-size", "2", "--host", "::1", "--trust-remote-code"]
    assert "--model" not in words


def test_it_runs_the_command(ddtree: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda path, words: ran.append([path, *words]))
    asked = ("serve", "--engine", "sglang", "--model", "m", "--mode", "ar", "--port", "9", "--no-doctor")
    assert ddtree(*asked).code == 0
    assert ran[0][0] == ran[0][1]
    assert ran[0][-2:] == ["--port", "9"]
    assert "--speculative-algorithm" not in ran[0]


@pytest.mark.parametrize(("port", "code", "said"), [("9", 1, "would fail"), ("11", 0, ""), ("many", 1, "--port must")])
def test_doctor_looks_first(ddtree: Command, monkeypatch: pytest.MonkeyPatch, port: str, code: int, said: str) -> None:
    """A port in use is a finding that would fail."""
    seen: list[Asked] = []
    ran: list[str] = []

    def probe(asked: Asked, libraries: list[str]) -> Facts:
        seen.append(asked)
        return replace(sglang(), asked=asked, port=Port(asked.port, asked.port != 9, "in use"))

    monkeypatch.setattr("ddtree.doctor.probe.probe", probe)
    monkeypatch.setattr("os.execv", lambda path, words: ran.append(path))
    found = ddtree("serve", "--engine", "sglang", "--model", "m", "--drafter", "/d", f"--port={port}")
    assert found.code == code, found.err
    assert said in found.err
    assert len(ran) == (code == 0)
    if port != "many":
        assert (seen[0].engine, seen[0].attention_backend, seen[0].drafter) == ("sglang", "triton", "/d")


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
