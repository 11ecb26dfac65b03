"""`ddtree train pair` and what `eval` and `export` make of its head, on a tiny target."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ddtree.config import PAIRWISE
from ddtree.drafter import PairwiseHead, fingerprint
from ddtree.errors import DamagedFile, DrafterMismatch, InvalidOption, ModelNotFound
from ddtree.training import batches
from ddtree.training.config import TrainConfig
from ddtree.training.evaluate import evaluate, load_drafter
from ddtree.training.export import export
from ddtree.training.fit import Trainer, fit
from ddtree.training.measure import Drafts, Measures, draft, next_tokens, walk
from ddtree.training.pairwise import PairwiseTrainer, fit_pairwise, losses
from ddtree.training.shards import Chat
from ddtree.training.teacher import load_target

pytestmark = pytest.mark.usefixtures("one_thread")


def changed(config: TrainConfig, **parts: dict[str, Any]) -> TrainConfig:
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in parts.items()})


@pytest.fixture(scope="module")
def fitted(made: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run with a drafter, and a small head to be fitted. So poor a drafter needs many candidates."""
    folder = tmp_path_factory.mktemp("fitted") / "run"
    copytree(made.data_folder, folder / "data")
    pairwise = {"rank": 8, "candidates": (64, 200), "steps": 12, "batch": 4, "anchors": 6, "lr": 1e-2, "warmup": 2,
                "eval_every": 6, "eval_sequences": 4}  # fmt: skip
    config = changed(replace(made, folder=str(folder)), pairwise=pairwise)
    fit(config, quiet=True)
    return config


@pytest.fixture
def own(fitted: TrainConfig, tmp_path: Path) -> TrainConfig:
    """The same in a folder of the test's own."""
    copytree(fitted.folder, tmp_path / "run")
    return replace(fitted, folder=str(tmp_path / "run"))


def trainer(config: TrainConfig, drafter: str = "last") -> PairwiseTrainer:
    return PairwiseTrainer(config, drafter, load_target(config.target), quiet=True)


def test_a_resumed_fit_gives_the_same_head_bit_for_bit(own: TrainConfig, tmp_path: Path) -> None:
    whole = fit_pairwise(own, "last", tmp_path / "whole", quiet=True)
    assert whole["step"] == 12
    assert whole["heldout"] != whole["marginal"]
    (Path(own.folder) / "pairwise.pt").unlink()
    assert fit_pairwise(own, "last", quiet=True, max_minutes=1e-9)["step"] == 1
    assert fit_pairwise(own, "last", quiet=True)["step"] == 12
    ours, theirs = (load_file(Path(folder) / PAIRWISE) for folder in (own.folder, tmp_path / "whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    before = (tmp_path / "whole" / PAIRWISE).stat().st_mtime_ns
    assert fit_pairwise(own, "last", tmp_path / "whole", quiet=True)["step"] == 12, "a finished fit writes it again"
    assert (tmp_path / "whole" / PAIRWISE).stat().st_mtime_ns > before


@pytest.mark.parametrize("gate", ["state", "none"])
def test_it_learns_what_it_is_shown(own: TrainConfig, gate: str) -> None:
    made = trainer(changed(own, pairwise={"gate": gate, "steps": 60}))
    made.heldout = made.chats[:4]
    first = made._measure()
    assert first["heldout"] == pytest.approx(first["marginal"], rel=1e-6), "a new head changes nothing"
    made.run(Path(own.folder))
    last = made._measure()
    assert last["marginal"] == first["marginal"], "the drafter stays as it is"
    assert np.mean(last["heldout"]) < 0.9 * np.mean(last["marginal"])


def test_a_fit_ends_by_its_clock(own: TrainConfig) -> None:
    config = changed(own, pairwise={"steps": 100_000, "minutes": 1e-4})
    step = fit_pairwise(config, "last", quiet=True)["step"]
    assert step < 100
    assert fit_pairwise(config, "last", quiet=True)["step"] == step


def test_the_loss_is_that_of_the_scores_that_trees_are_built_from(own: TrainConfig) -> None:
    """Slot by slot, from `draft`: candidates' scores, and what they leave for the rest."""
    made = trainer(own)
    made.run(Path(own.folder))
    head, frozen, count = made.head(), made.frozen, 64
    chat = max(made.chats, key=lambda chat: chat.answer)
    batch = batches.make([chat], made.by_depth, 1000, 0, 0)
    drafts = draft(frozen.model, frozen.teacher, frozen.head, chat, count, 7, head)
    assert drafts is not None
    assert drafts.pair is not None
    whole = (batch.anchors[0] >= drafts.first) & (batch.anchors[0] < drafts.first + len(drafts.ranks))
    rows = frozen.rows(replace(batch, weights=batch.weights * whole[None, :, None]))
    total = weight = 0.0
    for root, ranks in enumerate(drafts.ranks.tolist()):
        for depth in range(1, len(ranks)):
            if all(rank < count for rank in ranks[:depth]):
                scores = drafts.pair[root, depth - 1, ranks[depth - 1]].double()
                left = torch.log1p(-scores.exp().sum())
                share = float(made.by_depth[depth])
                total -= share * float(scores[ranks[depth]] if ranks[depth] < count else left)
                weight += share
    assert weight > 5
    assert float(losses(head, rows, (count, 200))[0, 0].detach()) == pytest.approx(total / weight, rel=1e-3)


def test_eval_and_export_take_the_head_along(own: TrainConfig, tmp_path: Path) -> None:
    plain = evaluate(own, "last", quiet=True)
    assert plain["pairwise"] is False
    assert "tree@8+pairwise" not in plain["acceptance_length"]
    assert "pairwise" not in plain["next_token"]["spine"]
    fit_pairwise(own, "last", quiet=True)
    both = evaluate(own, "last", quiet=True)
    for name in ("chain", "tree@8"):
        assert both["acceptance_length"][name] == plain["acceptance_length"][name]
        assert both["acceptance_length"][f"{name}+pairwise"] >= 1
        assert all(f"{name}+pairwise" in found for found in both["categories"].values())
    assert both["next_token"]["spine"].keys() == {"contexts", "marginal", "pairwise"}
    assert evaluate(own, "last", quiet=True, pairwise="off")["pairwise"] is False
    told = export(own, tmp_path / "out", "last")
    assert told["pairwise"] is True
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors", "pairwise.st"]
    found = evaluate(own, str(tmp_path / "out"), quiet=True)
    assert found["acceptance_length"].keys() == both["acceptance_length"].keys()
    served = load_drafter(own, str(tmp_path / "out"))
    assert PairwiseHead.read(tmp_path / "out" / PAIRWISE).drafter == fingerprint(served.norm.weight)


def test_what_does_not_fit_is_refused(own: TrainConfig, tmp_path: Path) -> None:
    fit_pairwise(own, "last", quiet=True)
    with pytest.raises(InvalidOption, match=r"another pairwise\.rank"):
        trainer(changed(own, pairwise={"rank": 4}))
    state = torch.load(Path(own.folder) / "last.pt", weights_only=True)
    state["model"]["norm.weight"] *= 1.5
    torch.save(state, Path(own.folder) / "last.pt")
    with pytest.raises(InvalidOption, match="another drafter 'last'"):
        trainer(own)
    assert evaluate(own, "last", quiet=True)["pairwise"] is False, "the run's own head is another drafter's now"
    assert export(own, tmp_path / "out", "last")["pairwise"] is False
    with pytest.raises(DrafterMismatch, match="another drafter"):
        evaluate(own, "last", quiet=True, pairwise=own.folder)
    with pytest.raises(ModelNotFound, match="ddtree train pair"):
        evaluate(own, "last", quiet=True, pairwise=str(tmp_path))
    (Path(own.folder) / "pairwise.pt").write_bytes(b"x")
    with pytest.raises(DamagedFile, match="no whole checkpoint"):
        trainer(own)
    with pytest.raises(InvalidOption, match="names no drafter"):
        trainer(own, "none")
    facts = Path(own.folder) / "data" / "data.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"vocab_size": 9}))
    with pytest.raises(InvalidOption, match="a model of 9 tokens"):
        trainer(own)


def test_a_list_of_draft_tokens_is_the_heads_vocabulary(own: TrainConfig, tmp_path: Path) -> None:
    listed = tmp_path / "list.json"
    listed.write_text(json.dumps({"size": 30, "token_ids": list(range(100, 160))}))
    fit_pairwise(changed(own, pairwise={"vocabulary": str(listed)}), "last", quiet=True)
    found = PairwiseHead.read(Path(own.folder) / PAIRWISE)
    assert found.token_ids.tolist() == list(range(100, 130))


def test_walks_and_next_tokens_go_by_the_pair_scores() -> None:
    log_q = torch.tensor([0.6, 0.3]).log().expand(3, 2, 2)
    ranks = torch.tensor([[0, 1], [1, 1], [1, 0]])
    pair = torch.tensor([[[-2.0, -0.1], [-0.1, -2.0]]]).expand(3, 1, 2, 2)
    drafts = Drafts(3, log_q, ranks, torch.zeros(3, 2), pair)
    assert walk(drafts, None) == [2, 1]
    assert walk(drafts, None, pairwise=True) == [3]
    found = {name: (n.contexts, n.marginal, n.pairwise) for name, n in next_tokens(drafts).items()}
    assert found == {"spine": (1, 0, 1), "sibling": (2, 1, 1)}
    measures = Measures(2, (2,), pairwise=True)
    measures.add(Chat(np.arange(9, dtype=np.int32), 3, "x", True, False), drafts)
    lengths = measures.acceptance()
    assert lengths == {"chain": 1.5, "tree@2": 1.5, "chain+pairwise": 3.0, "tree@2+pairwise": 3.0}
    assert measures.report()["next_token"]["sibling"] == {"contexts": 2, "marginal": 0.5, "pairwise": 0.5}


def test_what_cannot_be_written_is_told_before_it_is_made(own: TrainConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidOption, match=r"file cannot hold the head \(.*\): name another --output"):
        fit_pairwise(own, "last", tmp_path / "file", quiet=True)
    assert not (Path(own.folder) / "pairwise.pt").exists()
    (Path(own.folder) / PAIRWISE).write_bytes(b"x")
    with pytest.raises(DamagedFile, match="no whole pairwise head"):
        export(own, tmp_path / "out", "last")
    assert not (tmp_path / "out").exists()


def test_a_resumed_fit_goes_by_the_decay_and_beta_that_are_asked_for(own: TrainConfig) -> None:
    fit_pairwise(own, "last", quiet=True, max_minutes=1e-9)
    made = trainer(changed(own, pairwise={"beta2": 0.9, "weight_decay": 0.5}))
    assert made.step == 1
    assert [(g["betas"], g["weight_decay"]) for g in made.optimizer.param_groups] == [((0.9, 0.9), 0.5)]
    own = changed(own, fit={"beta2": 0.8, "weight_decay": 0.25})
    groups = Trainer(own, load_target(own.target), quiet=True).optimizer.param_groups
    assert [(g["betas"], g["weight_decay"]) for g in groups] == [((0.9, 0.8), 0.25), ((0.9, 0.8), 0.0)]
