"""Fixtures: an engine that answers from a script, and the command line run in this process."""

import io

import pytest
from fake_engine import Command, FakeEngine, Ran

from ddtree.cli import app
from ddtree.config import EngineConfig
from ddtree.engine import Engine


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """Makes `Engine.load` give a fake; the list holds every one that was loaded."""
    loaded: list[FakeEngine] = []

    def load(config: EngineConfig) -> FakeEngine:
        loaded.append(FakeEngine(config))
        return loaded[-1]

    monkeypatch.setattr(Engine, "load", load)
    return loaded


@pytest.fixture
def ddtree(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs the command line in this process."""

    def command(*args: str, stdin: bytes = b"") -> Ran:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            app(list(args), prog_name="ddtree")
        seen = capsys.readouterr()
        return Ran(int(ended.value.code or 0), seen.out, seen.err)

    return command
