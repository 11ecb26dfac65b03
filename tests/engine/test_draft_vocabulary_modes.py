"""Drafts of a part of the vocabulary: no token of an answer changes, in any mode, and nothing else is drafted."""

from pathlib import Path
from typing import Any

import pytest

from ddtree.config import DRAFT_VOCABULARY, MODES, EngineConfig, SamplingParams, Speculation
from ddtree.drafter import write_vocabulary
from ddtree.engine import Engine, loading
from ddtree.engine.loading import load_pair
from ddtree.engine.memory import tensor_bytes
from dflash_reference import BASE, change, random_tensors, save_checkpoint
from llama_oracle import random_llama
from scripted import CharText

PROMPTS = [[5, 9, 2], [7, 1, 1, 30, 4, 12], [3] * 9]
PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.8, seed=2, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=1.3, seed=3, ignore_eos=True, top_p=0.9),
]
# By frequency; half of what these prompts' answers hold.
LIST = [4, 60, 17, 33, 8, 21, 50, 2, 41, 28, 12, 55, 37, 0, 19, 45, 9, 30, 26, 58]
OPTIONS = {"tree_budget": 9, "tree_top_k": 4, "tree_context": "off"}


@pytest.fixture
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names lead to small random models; the drafter has a list."""
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    drafter.mkdir()
    random_llama(
        vocab_size=61, hidden_size=32, num_hidden_layers=6, head_dim=16, max_position_embeddings=128
    ).save_pretrained(target)
    raw = change(BASE, {"intermediate_size": 48})
    save_checkpoint(drafter, raw, random_tensors(raw))
    write_vocabulary(drafter / DRAFT_VOCABULARY, LIST, 16)
    monkeypatch.setattr(loading.models, "resolve_model", lambda name: target)
    monkeypatch.setattr(loading.models, "resolve_drafter", lambda name, model: drafter)


def load(mode: str, setting: str = "auto", **options: Any) -> Engine:
    speculation = Speculation(mode, **(OPTIONS | options))
    config = EngineConfig(device="cpu", dtype="float32", draft_vocab=setting, speculation=speculation)
    found = load_pair(config)
    return Engine(found.target, found.drafter, CharText([]), config, found.names)  # type: ignore[arg-type]


def answers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[int]], set[int], int]:
    """What is answered alone and in a batch, the tokens that were drafted, and how many of them were accepted."""
    drafted: set[int] = set()
    verify = engine.target.verify

    def watched(cache, rows, position):
        drafted.update(rows.tokens[rows.parents >= 0].tolist())
        return verify(cache, rows, position)

    monkeypatch.setattr(engine.target, "verify", watched)
    alone = [engine.generate([p], [s])[0] for p, s in zip(PROMPTS, PARAMS, strict=True)]
    batch = engine.generate(PROMPTS, PARAMS)
    assert [g.token_ids for g in batch] == [g.token_ids for g in alone]
    assert all(g.shadow is None or g.shadow.agree for g in alone)
    return [g.token_ids for g in alone], drafted, sum(len(g.token_ids) - g.rounds for g in alone)


@pytest.mark.usefixtures("_folders")
def test_every_mode_gives_the_same_tokens_and_drafts_those_of_the_list(monkeypatch) -> None:
    expected, _, _ = answers(load("ar"), monkeypatch)
    for mode in MODES[1:]:
        for setting, allowed in (("auto", LIST[:16]), ("5", LIST[:5]), ("2", LIST[:2]), ("full", range(61))):
            engine = load(mode, setting)
            found, drafted, _ = answers(engine, monkeypatch)
            assert found == expected, (mode, setting)
            assert drafted <= set(allowed), (mode, setting)
            assert len(drafted) > 1
            assert engine.info()["draft_vocab"] == ("full" if setting == "full" else len(allowed))
    assert len(drafted) > 20, "the whole vocabulary is drafted of"


@pytest.mark.usefixtures("_folders")
def test_some_of_the_list_is_accepted(monkeypatch) -> None:
    assert answers(load("tree", tree_budget=20, tree_top_k=8), monkeypatch)[2] > 0


@pytest.mark.usefixtures("_folders")
@pytest.mark.parametrize("context", ["branch", "mix"])
def test_what_the_text_says_may_lie_outside_of_the_list(monkeypatch, context: str) -> None:
    expected, _, _ = answers(load("ar"), monkeypatch)
    for mode in MODES[1:]:
        found, drafted, _ = answers(load(mode, "5", tree_context=context), monkeypatch)
        assert found == expected, mode
        outside = drafted - set(LIST[:5])
        said = {token for tokens in (*PROMPTS, *expected) for token in tokens}
        assert outside, mode
        assert outside <= said, mode


@pytest.mark.usefixtures("_folders")
def test_one_token_is_enough_for_a_list(monkeypatch) -> None:
    expected, _, _ = answers(load("ar"), monkeypatch)
    found, drafted, _ = answers(load("tree", "1"), monkeypatch)
    assert found == expected
    assert drafted == {LIST[0]}


@pytest.mark.usefixtures("_folders")
def test_memory_counts_the_copy_of_the_rows_and_fewer_logits() -> None:
    full, cut = load("tree", "full"), load("tree")
    rows = 16 * 32 * 4 + 16 * 8  # of the head in float32, and their ids
    assert tensor_bytes(cut.drafter) - tensor_bytes(full.drafter) == rows
    memory = [engine.info()["memory"] for engine in (full, cut)]
    assert memory[1]["drafter_weights"] - memory[0]["drafter_weights"] == rows
    depths = cut.drafter.config.depths  # type: ignore[union-attr]
    assert memory[0]["logits"] - memory[1]["logits"] == 8 * depths * (61 - 16) * (4 + 4)
    assert load("ar").info()["draft_vocab"] is None
