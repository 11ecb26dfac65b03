"""Flags, their environment twins, and what a request may ask for."""

import argparse
import os

import pytest

from ddtree.errors import InvalidOption
from ddtree.sglang.options import Options, add_flags, variable


@pytest.fixture(autouse=True)
def no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddtree.sglang.options._before", {})
    for name in ("mode", "budget", "top_k", "pairwise"):
        monkeypatch.setenv(variable(name), "")  # so that what a test sets goes again


def test_defaults() -> None:
    assert Options.read({}) == Options("tree", 31, 8, "auto")


def test_flags_reach_processes_by_the_environment() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    parser.parse_args([])
    assert Options.read() == Options()
    parser.parse_args(
        [
            "--speculative-ddtree-mode",
            "shadow-linear",
            "--speculative-ddtree-budget=7",
            "--speculative-ddtree-top-k",
            "3",
            "--speculative-ddtree-pairwise=on",
        ]
    )
    assert os.environ["DDTREE_SGLANG_BUDGET"] == "7"
    assert Options.read() == Options("shadow-linear", 7, 3, "on")


def test_flags_of_one_server_are_not_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDTREE_SGLANG_TOP_K", "5")
    monkeypatch.delenv("DDTREE_SGLANG_MODE")
    first, second = argparse.ArgumentParser(), argparse.ArgumentParser()
    add_flags(first)
    named = ["--speculative-ddtree-mode", "shadow-linear", "--speculative-ddtree-mode", "linear"]
    first.parse_args([*named, "--speculative-ddtree-top-k", "3"])
    assert Options.read() == Options("linear", top_k=3)
    add_flags(second)
    assert "DDTREE_SGLANG_MODE" not in os.environ
    second.parse_args([])
    assert Options.read() == Options("tree", top_k=5)  # the user's own variable


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"DDTREE_SGLANG_MODE": "bush"}, "'bush' is unknown"),
        ({"DDTREE_SGLANG_BUDGET": "many"}, "--speculative-ddtree-budget .* whole number, not 'many'"),
        ({"DDTREE_SGLANG_BUDGET": "0"}, "from 1 to 255, not 0"),
        ({"DDTREE_SGLANG_TOP_K": "33"}, "from 1 to 32, not 33"),
        ({"DDTREE_SGLANG_PAIRWISE": "yes"}, r"PAIRWISE\): 'yes' is unknown, choose one of auto, on, off"),
        ({"DDTREE_SGLANG_PAIRWISE": "on", "DDTREE_SGLANG_MODE": "linear"}, "on is for trees, and mode linear has none"),
    ],
)
def test_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        Options.read(environment)


@pytest.mark.parametrize(
    ("mode", "budget", "rows"),
    [("linear", 31, 16), ("tree", 31, 32), ("shadow-linear", 31, 47), ("tree", 16, 17), ("tree", 15, 16)],
)
def test_rows(mode: str, budget: int, rows: int) -> None:
    assert Options(mode, budget).rows(16) == rows


@pytest.mark.parametrize("budget", [1, 8, 14])
def test_slots_of_a_small_tree_are_those_of_the_drafters_block(budget: int) -> None:
    """SGLang reserves two rounds of rows; with overlap one of them may be behind the lengths that it goes by."""
    rows, block = Options("tree", budget).rows(16), 16
    assert 2 * rows >= rows + block
    assert Options("tree", budget).plan({"ddtree_mode": "linear"}, block).rows <= rows


def test_rows_that_do_not_fit() -> None:
    with pytest.raises(InvalidOption, match="make 266 rows; at most 256 can be verified: lower --spec"):
        Options("shadow-linear", budget=250).rows(16)


@pytest.mark.parametrize("block", [1, 65])
@pytest.mark.parametrize("mode", ["tree", "shadow-linear"])
def test_blocks_that_no_tree_grows_from(mode: str, block: int) -> None:
    with pytest.raises(InvalidOption, match=f"of 2 to 64 tokens, not {block}: set --speculative-num-draft-tokens"):
        Options(mode, budget=3).rows(block)
    assert Options("linear").rows(block) == block  # stock's own


def test_a_request_narrows_the_plan() -> None:
    options = Options("tree", 31, 8)
    whole = options.plan(None, 16)
    assert (whole.tree, whole.chain, whole.budget, whole.ranks, whole.depth) == (True, False, 31, 8, 15)
    assert options.plan({"ddtree_budget": 5}, 16).budget == 5
    chain = options.plan({"ddtree_mode": "linear", "other": 1}, 16)
    assert (chain.tree, chain.chain, chain.rows) == (False, True, 16)


@pytest.mark.parametrize(
    ("options", "custom", "message"),
    [
        (Options("tree", 31), {"ddtree_mode": "bush"}, "unknown"),
        (Options("tree", 31), {"ddtree_budget": 32}, "from 1 to 31, not 32"),
        (Options("tree", 31), {"ddtree_budget": True}, "not True"),
        (Options("tree", 31), {"ddtree_budget": "5"}, "not '5'"),
        (Options("tree", 31), {"ddtree_mode": "shadow-linear"}, "needs 47 rows, but this server verifies 32"),
        (Options("tree", 8), {"ddtree_mode": "shadow-linear"}, "needs 24 rows, but this server verifies 16"),
        (Options("linear"), {"ddtree_mode": "tree"}, "started with"),
        (Options("linear"), {"ddtree_budget": 3}, "started with"),
    ],
)
def test_a_request_that_is_refused(options: Options, custom: dict[str, object], message: str) -> None:
    refused = options.refusal(custom, 16)
    assert refused is not None
    assert message in refused
    # With overlap SGLang gives a refused request one more round, in the company of others, which must not end by it.
    assert options.granted(custom, 16) == options.plan(None, 16)


def test_custom_params_that_are_no_object_are_refused() -> None:
    options = Options("tree", 31)
    assert "must be an object" in str(options.refusal(["ddtree_budget"], 16))
    assert options.granted(["ddtree_budget"], 16) == options.plan(None, 16)


def test_what_is_granted_is_the_plan() -> None:
    options = Options("tree", 31)
    for custom in (None, {"other": 1}, {"ddtree_budget": 5}, {"ddtree_mode": "linear"}):
        assert options.granted(custom, 16) == options.plan(custom, 16)


@pytest.mark.parametrize("mode", ["linear", "shadow-linear", "tree"])
def test_a_request_that_is_not(mode: str) -> None:
    options = Options(mode, 31)
    assert options.refusal(None, 16) is None
    assert options.refusal({"other": 1}, 16) is None
    assert options.refusal({"ddtree_mode": mode}, 16) is None
