"""Drafts by a pairwise head: no token of an answer changes, in any mode, and rows are laid by its scores."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddtree.config import MODES, PAIRWISE, EngineConfig, SamplingParams, Speculation
from ddtree.drafter import PairwiseHead, fingerprint
from ddtree.engine import Engine, loading, ops
from ddtree.engine.loading import load_pair
from ddtree.engine.memory import tensor_bytes
from ddtree.engine.modes import lay_out
from ddtree.errors import DamagedFile, DrafterMismatch, InvalidOption
from ddtree.kernels import backend
from ddtree.tree import Pair, best_first, chain
from dflash_reference import BASE, change, random_tensors, save_checkpoint
from llama_oracle import random_llama
from scripted import CharText

PROMPTS = [[5, 9, 2], [7, 1, 1, 30, 4, 12], [3] * 9]
PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.8, seed=2, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=1.3, seed=3, ignore_eos=True, top_p=0.9),
]
OPTIONS = {"tree_budget": 9, "tree_top_k": 4}
VOCAB, HIDDEN = 61, 32


@pytest.fixture(autouse=True)
def drafter_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The names lead to small random models; the drafter has a head that moves much, of most tokens."""
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    drafter.mkdir()
    random_llama(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=6, head_dim=16, max_position_embeddings=128
    ).save_pretrained(target)
    raw = change(BASE, {"intermediate_size": 48})
    tensors = random_tensors(raw)
    save_checkpoint(drafter, raw, tensors)
    write_head(drafter, fingerprint(tensors["norm.weight"]))
    monkeypatch.setattr(loading.models, "resolve_model", lambda name: target)
    monkeypatch.setattr(loading.models, "resolve_drafter", lambda name, model: drafter)
    return drafter


def write_head(folder: Path, mark: str, vocab: int = VOCAB) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.arange(0, vocab, 1)[torch.arange(vocab) % 7 != 3]
    factors = (torch.randn(len(ids), 6, generator=generator), torch.randn(len(ids), 6, generator=generator))
    gate = torch.randn(6, HIDDEN, generator=generator) * 0.2
    PairwiseHead.of(ids, vocab, factors, torch.zeros(6), gate, mark).write(folder / PAIRWISE)


def load(mode: str, setting: str = "auto", **options: Any) -> Engine:
    speculation = Speculation(mode, **(OPTIONS | options))
    config = EngineConfig(device="cpu", dtype="float32", draft_pairwise=setting, speculation=speculation)
    found = load_pair(config)
    return Engine(found.target, found.drafter, CharText([]), config, found.names)  # type: ignore[arg-type]


def answers(engine: Engine) -> list[list[int]]:
    """Alone and in a batch."""
    alone = [engine.generate([p], [s])[0] for p, s in zip(PROMPTS, PARAMS, strict=True)]
    batch = engine.generate(PROMPTS, PARAMS)
    assert [g.token_ids for g in batch] == [g.token_ids for g in alone]
    assert all(g.shadow is None or g.shadow.agree for g in alone)
    return [g.token_ids for g in alone]


@pytest.mark.parametrize("context", ["off", "branch", "mix"])
def test_every_mode_gives_the_same_tokens(context: str) -> None:
    expected = answers(load("ar"))
    for mode in MODES[1:]:
        for spine in (0, 3):
            options = {"tree_context": context, "tree_spine": spine if mode != "linear" else 0}
            engine = load(mode, **options)
            assert engine.info()["draft_pairwise"] == "on"
            assert answers(engine) == expected, (mode, spine)


def test_modes_of_one_batch_may_differ() -> None:
    engine = load("tree")
    expected = answers(load("ar"))
    asked = [Speculation(mode, **OPTIONS | {"tree_top_k": k}) for mode, k in (("linear", 3), ("tree", 2), ("ar", 1))]
    requests = [engine.scheduler.add(p, s, spec) for p, s, spec in zip(PROMPTS, PARAMS, asked, strict=True)]
    found = [engine._finish(request, None) for request in requests]
    assert [g.token_ids for g in found] == expected


def test_no_request_makes_pair_scores_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number grows with the square of the candidates', which a request may choose up to 1,024."""
    engine, asked = load("tree"), []
    pair = PairwiseHead.pair
    monkeypatch.setattr(
        PairwiseHead, "pair", lambda self, hidden, tokens, q: asked.append(q.shape[-1]) or pair(self, hidden, tokens, q)
    )
    for mode in MODES[1:]:
        wide = Speculation(mode, tree_budget=engine.config.largest_budget, tree_top_k=1024)
        request = engine.scheduler.add(PROMPTS[0], PARAMS[0], wide)
        engine._finish(request, None)
        assert set(asked) == {32}, mode
        asked.clear()


@pytest.mark.parametrize("mode", ["linear", "tree", "shadow-linear"])
def test_rows_are_laid_by_the_scores_of_the_head(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round's scores again, from the drafter's states; and other rows than the marginals would give."""
    engine, proposals, laid = load(mode, tree_context="off"), [], []
    drafter = engine.drafter
    assert drafter is not None
    assert drafter.pairwise is not None
    score, scored = drafter.score, []

    def watch_states(states: torch.Tensor) -> torch.Tensor:
        scored.append(states.clone())
        return score(states)

    def watch_rows(*args: Any) -> Any:
        laid.append((args, lay_out(*args)))
        return laid[-1][1]

    def watch_drafts(self: Any, batch: Any) -> Any:
        proposals.append(draft(self, batch))
        return proposals[-1]

    draft = ops.HostOps.draft
    monkeypatch.setattr(drafter, "score", watch_states)
    monkeypatch.setattr(ops, "lay_out", watch_rows)
    monkeypatch.setattr(ops.HostOps, "draft", watch_drafts)
    engine.generate([PROMPTS[1]], [PARAMS[0]])
    others = 0
    assert len(laid) == len(scored) == len(proposals) > 5
    for states, proposal, (args, layout) in zip(scored, proposals, laid, strict=True):
        pair = Pair.of(drafter.pairwise.pair(states, proposal.tokens, proposal.log_q)[0])
        assert len(args[2][0]) == 4, "a chain looks at as many candidates as a tree"
        assert args[4] == pair
        line = chain(len(args[2]), pair)
        tree = best_first(args[2], 9, pair=pair)
        wanted = {"linear": line, "tree": tree}.get(mode)
        assert wanted is None or layout.nodes == wanted
        if mode == "shadow-linear":
            assert layout.tree_size == len(tree)
            assert [layout.nodes.ranks[row] for row in layout.chain] == line.ranks
        others += layout.nodes != lay_out(*args[:4]).nodes
    assert others > 3


def test_off_is_without(drafter_folder: Path) -> None:
    engine = load("tree", "off")
    assert engine.info()["draft_pairwise"] == "off"
    with_head = load("tree")
    assert tensor_bytes(with_head.drafter) > tensor_bytes(engine.drafter)
    assert load("ar").info()["draft_pairwise"] is None
    (drafter_folder / PAIRWISE).unlink()
    assert load("tree").info()["draft_pairwise"] == "off"


def test_a_head_that_does_not_fit_is_refused(drafter_folder: Path) -> None:
    good = PairwiseHead.read(drafter_folder / PAIRWISE)
    replace(good, drafter="another").write(drafter_folder / PAIRWISE)
    with pytest.raises(DrafterMismatch, match="another drafter"):
        load("tree")
    write_head(drafter_folder, good.drafter, VOCAB - 1)
    with pytest.raises(DrafterMismatch, match="vocabulary of 60 tokens, the target has 61"):
        load("tree")
    (drafter_folder / PAIRWISE).write_bytes(b"x" * 40)
    with pytest.raises(DamagedFile, match="no whole pairwise head"):
        load("tree")
    assert load("tree", "off").info()["draft_pairwise"] == "off"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_drafter_is_known_again_in_half_precision(dtype: str) -> None:
    found = load_pair(EngineConfig(device="cpu", dtype=dtype, speculation=Speculation("tree")))
    assert found.drafter is not None
    assert found.drafter.pairwise is not None


def test_the_head_has_a_say_where_the_device_lays_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "KINDS", {"cpu"})
    for setting in ("auto", "off", "on"):
        found = load_pair(EngineConfig(device="cpu", dtype="float32", draft_pairwise=setting))
        assert found.drafter is not None
        assert (found.drafter.pairwise is not None) == (setting != "off")


def test_a_head_that_is_asked_for_must_be_there(drafter_folder: Path) -> None:
    assert load("tree", "on").info()["draft_pairwise"] == "on"
    (drafter_folder / PAIRWISE).unlink()
    with pytest.raises(InvalidOption, match="draft_pairwise on needs a pairwise head"):
        load("tree", "on")
