"""The command that starts SGLang: what it holds on which card, and what it leaves to the user."""

import sys

import pytest

from ddtree.errors import InvalidOption
from ddtree.sglang import compat, launch
from ddtree.sglang.launch import Launch, command

BOTH = ["xgrammar", "llguidance"]


def value(words: list[str], flag: str) -> str | None:
    return words[words.index(flag) + 1] if flag in words else None


@pytest.mark.parametrize("card", [(9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("mode", ["tree", "shadow-linear"])
def test_trees_need_a_backend_with_masks(mode: str, card: tuple[int, int]) -> None:
    words = command(Launch("target", "drafter", mode, 15, 4, 2048, "off"), card, ["--port", "7"], BOTH)
    assert words[:3] == [sys.executable, "-m", "sglang.launch_server"]
    flags = {
        "--model-path": "target",
        "--context-length": "2048",
        "--speculative-algorithm": "DDTREE",
        "--speculative-draft-model-path": "drafter",
        "--speculative-ddtree-mode": mode,
        "--speculative-ddtree-budget": "15",
        "--speculative-ddtree-top-k": "4",
        "--speculative-ddtree-pairwise": "off",
        "--attention-backend": "triton",
        "--port": "7",
    }
    assert {flag: value(words, flag) for flag in flags} == flags
    assert "--grammar-backend" not in words


@pytest.mark.parametrize(("card", "backend"), [((9, 0), None), ((10, 0), None), ((12, 0), "triton")])
@pytest.mark.parametrize("mode", ["linear", "ar"])
def test_chains_keep_what_sglang_chooses(mode: str, card: tuple[int, int], backend: str | None) -> None:
    words = command(Launch("target", "drafter", mode), card, [], BOTH)
    assert value(words, "--attention-backend") == backend
    assert ("--speculative-algorithm" in words) == (mode == "linear")


@pytest.mark.parametrize("named", [["--attention-backend", "flashinfer"], ["--attention-backend=flashinfer"]])
def test_what_the_user_names_is_left(named: list[str]) -> None:
    words = command(Launch("target", "drafter"), (12, 0), [*named, "--grammar-backend", "none"], [])
    assert words.count("--attention-backend") + words.count("--attention-backend=flashinfer") == 1
    assert words.count("--grammar-backend") == 1


@pytest.mark.parametrize(
    ("grammars", "chosen"), [(BOTH, None), (["xgrammar"], None), (["llguidance"], "llguidance"), ([], "none")]
)
def test_grammars(grammars: list[str], chosen: str | None) -> None:
    assert value(command(Launch("target", "drafter"), (9, 0), [], grammars), "--grammar-backend") == chosen


def test_what_a_flag_is_set_to() -> None:
    words = ["--port", "1", "--host=h", "--port=2", "--last"]
    assert [launch.value(words, flag) for flag in ("--port", "--host", "--last", "--other")] == ["2", "h", None, None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": None}, "needs a drafter"),
        ({"drafter": "drafter", "mode": "bush"}, "unknown"),
        ({"drafter": "drafter", "budget": 300}, "from 1 to 255"),
        ({"drafter": "drafter", "pairwise": "perhaps"}, "'perhaps' is unknown"),
        ({"drafter": "drafter", "mode": "linear", "pairwise": "on"}, "mode linear has none"),
        ({"drafter": None, "mode": "ar", "pairwise": "on"}, "draft_pairwise on needs a drafter, and mode ar has none"),
    ],
)
def test_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        Launch("target", **options)  # type: ignore[arg-type]


def test_no_sglang_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    with pytest.raises(InvalidOption, match=r"pip install 'ddtree\[sglang\]'"):
        launch.check()


def test_an_sglang_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: object())
    monkeypatch.setattr(compat, "installed", lambda: lambda module: None)
    with pytest.raises(InvalidOption, match=r"Known releases: 0\.5\.17"):
        launch.check()
