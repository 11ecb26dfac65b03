"""benchmarks/context_corpus.py by replay: earlier requests say what comes, and are believed as they are right."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ddtree.config import Speculation
from ddtree.tree import TextIndex

PROMPT, ANSWER, DEPTH = list(range(10, 20)), list(range(100, 130)), 6
WAY = Speculation("tree", 6, 2, tree_context="mix")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return import_module("context_corpus")


def record(script: Any, answer: list[int]) -> Any:
    """A drafter that has the true token in second place, far behind one that never comes."""
    ahead = [(answer[place:] + [0] * DEPTH)[:DEPTH] for place in range(1, len(answer))]
    tokens = [[[7, token] for token in row] for row in ahead]
    return script.Record("a", "chat", False, PROMPT, answer, tokens, [[[-0.1, -3.0]] * DEPTH] * len(ahead))


def test_the_same_request_before_saves_rounds(script: Any) -> None:
    asked = record(script, ANSWER)
    before, other = script.texts([asked]), TextIndex(list(range(200, 260)))
    plain = script.rounds(asked, WAY)
    told = script.WithCorpus(PROMPT, before, 1)
    assert script.rounds(asked, WAY, told) < plain / 2
    assert script.rounds(asked, WAY, script.WithCorpus(PROMPT, other, 1)) == plain
    hits, seen, levels = told._trust.state
    assert sum(seen) > len(levels) * 8, "it learned"
    assert max(levels) > 0.9
    assert sum(hits) > 0.7 * sum(seen)


def test_shorter_matches_than_are_asked_for_say_nothing(script: Any) -> None:
    asked = record(script, ANSWER)
    rounds = [
        script.rounds(asked, WAY, script.WithCorpus(PROMPT, script.texts([asked]), least)) for least in (1, 20, 100)
    ]
    assert rounds[0] < rounds[1] < rounds[2] == script.rounds(asked, WAY)
