"""benchmarks/sglang_quantised.py without servers: how an answer is judged, and when the verdict is a bad one."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

PROMPT, ANSWER = [5, 6, 7], [8, 9]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return import_module("sglang_quantised")


def plain(token: list[Any], top: list[Any]) -> Any:
    """A server that judges as it is told, and remembers what it was asked."""
    meta = {"input_token_logprobs": [(None, 7, None), *token], "input_top_logprobs": [None, *top]}
    asked: list[Any] = []

    def post(path: str, body: dict[str, Any]) -> Any:
        asked.append((path, body))
        return {"meta_info": meta}

    return SimpleNamespace(post=post, asked=asked, problem=None)


def test_regret_is_the_distance_to_the_best(script: Any) -> None:
    server = plain([(-0.5, 8, None), (-2.0, 9, None)], [[(-0.5, 8, None)], [(-0.25, 4, None)]])
    assert script.regret(server, PROMPT, ANSWER) == [0.0, 1.75]
    (path, body) = server.asked[0]
    assert (path, body["input_ids"], body["logprob_start_len"]) == ("/generate", [5, 6, 7, 8, 9], 2)


def test_other_tokens_than_those_that_were_asked_for(script: Any) -> None:
    with pytest.raises(RuntimeError, match="judged other tokens"):
        script.regret(plain([(-0.5, 8, None), (-2.0, 3, None)], [[(0.0, 8, None)]] * 2), PROMPT, ANSWER)


@pytest.mark.parametrize(
    ("plain_s", "tree_s", "ok"),
    [(0.0, 0.1, True), (0.0, 0.11, False), (0.2, 0.4, True), (0.2, 0.41, False), (0.0, None, False)],
)
def test_the_verdict(script: Any, plain_s: float, tree_s: float | None, ok: bool) -> None:
    servers: dict[str, Any] = {"plain": {"largest_regret": plain_s, "problem": None}, "tree31": {"problem": None}}
    if tree_s is not None:
        servers["tree31"]["largest_regret"] = tree_s
    assert script.verdict(servers) == ok
    assert not script.verdict(servers | {"linear": {"largest_regret": 0.0, "problem": "not up"}})


def test_modifiers_are_flags_or_variables(script: Any, tmp_path: Path) -> None:
    servers = import_module("sglang_servers")
    words, gpus = servers.words_of("tree31@nopairwise@notails", servers.Settings("target", "drafter", tmp_path, []))
    assert words[words.index("--speculative-ddtree-pairwise") + 1] == "off"
    assert gpus == 1
    assert servers.parts("tree31@nopairwise@notails") == ("tree", 31, ["nopairwise", "notails"])


def test_an_unknown_name_is_told_before_any_server_starts(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    servers = import_module("sglang_servers")
    monkeypatch.setattr(servers.subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(ValueError, match="'bush': write plain, dflash"):
        servers.start(["plain", "bush"], servers.Settings("target", "drafter", tmp_path, []))
