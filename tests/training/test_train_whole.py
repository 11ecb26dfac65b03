"""A drafter made from nothing on a CPU: data, fit, resume, eval, export, load; the figures are the engine's own."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ddtree.config import EngineConfig, SamplingParams, Speculation
from ddtree.drafter import DFlashDrafter
from ddtree.engine import Engine
from ddtree.errors import InvalidOption, ModelNotFound
from ddtree.training.config import TrainConfig, read
from ddtree.training.data import generate_data
from ddtree.training.evaluate import evaluate, load_drafter
from ddtree.training.export import export
from ddtree.training.fit import Trainer, fit
from ddtree.training.measure import draft, walk
from ddtree.training.shards import Chat, read_all
from ddtree.training.teacher import Teacher, load_target
from llama_oracle import LLAMA3
from tiny_run import END, SPARE, VOCAB, run_file, save_target

pytestmark = pytest.mark.usefixtures("one_thread")


def losses(config: TrainConfig) -> list[tuple[int, float]]:
    lines = (Path(config.folder) / "log.jsonl").read_text().splitlines()
    return [(line["step"], line["loss"]) for line in map(json.loads, lines)]


def changed(config: TrainConfig, **parts: dict[str, Any]) -> TrainConfig:
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in parts.items()})


@pytest.fixture(scope="module")
def fitted(made: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run of six steps, never interrupted."""
    from shutil import copytree

    folder = tmp_path_factory.mktemp("fitted") / "run"
    copytree(made.data_folder, folder / "data")
    config = replace(made, folder=str(folder))
    fit(config, quiet=True)
    return config


def test_a_resumed_run_has_the_same_losses_and_weights_bit_for_bit(fitted: TrainConfig, fresh: TrainConfig) -> None:
    fit(fresh, stop_at=3, quiet=True)
    with (Path(fresh.folder) / "log.jsonl").open("a") as log:
        log.write('{"step": 4, "loss": 1.0}\n{"step": 5, "lo')  # what a kill behind the checkpoint leaves
    assert fit(fresh, quiet=True)["step"] == 6
    assert losses(fresh) == losses(fitted)
    assert [step for step, _ in losses(fresh)] == [1, 2, 3, 4, 5, 6]
    ours, theirs = (torch.load(Path(c.folder) / "last.pt", weights_only=True) for c in (fresh, fitted))
    assert all(torch.equal(ours["model"][name], theirs["model"][name]) for name in theirs["model"])


def test_a_finished_run_does_nothing_more(fitted: TrainConfig) -> None:
    before = losses(fitted)
    assert fit(fitted, quiet=True) == {"step": 6, "steps": 6}
    assert losses(fitted) == before


def test_micro_batches_give_the_same_step(fresh: TrainConfig, fitted: TrainConfig) -> None:
    fit(changed(fresh, fit={"micro_batch": 4, "loss_rows": 1000}), stop_at=2, quiet=True)
    assert [loss for _, loss in losses(fresh)] == pytest.approx([loss for _, loss in losses(fitted)[:2]], rel=1e-5)


@pytest.mark.parametrize("objective", ["cross_entropy", "kl"])
def test_the_loss_falls(fresh: TrainConfig, objective: str) -> None:
    config = changed(fresh, fit={"objective": objective, "steps": 40, "lr": 3e-3, "eval_every": 40})
    fit(config, quiet=True)
    found = [loss for _, loss in losses(config)]
    assert sum(found[-5:]) < 0.9 * sum(found[:5]), found


def test_eval_counts_what_the_engine_accepts(fitted: TrainConfig, tmp_path: Path) -> None:
    """Round by round, in float32: chain and tree, on an answer that the engine gives."""
    out = tmp_path / "drafter"
    export(fitted, out, "last", "float32")
    sizes = {"linear": None, "tree": 8}
    model = load_drafter(fitted, str(out))
    prompt = next(read_all(fitted.data_folder))
    ids = prompt.ids[: prompt.prompt].tolist()
    params = SamplingParams(60, ignore_eos=True)
    for mode, budget in sizes.items():
        speculation = Speculation(mode, tree_budget=8, tree_top_k=16, tree_context="off")
        engine = Engine.load(
            EngineConfig(fitted.target.model, str(out), speculation, "cpu", "float32", max_running_requests=1)
        )
        chunks = list(engine.stream(ids, params))
        rounds = [len(chunk.token_ids) for chunk in chunks[1:]]
        answer = [token for chunk in chunks for token in chunk.token_ids]
        chat = Chat(np.array(ids + answer, np.int32), len(ids), "x", True, True)
        teacher = Teacher(engine.target, model.config.target_layer_ids, len(chat.ids))
        drafts = draft(model, teacher, teacher.head(torch.float32), chat, 16, anchors=7)
        assert drafts is not None
        steps = walk(drafts, budget)
        assert len(steps) > 10
        assert steps == rounds[: len(steps)]


def test_the_exported_drafter_is_the_trained_one(fitted: TrainConfig, tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    told = export(fitted, out, "last", "float32")
    target = load_target(fitted.target)
    sizes = (target.spec.vocab_size, target.spec.hidden_size, target.spec.num_layers)
    served = DFlashDrafter.load(out, target.embed, target.head, sizes, torch.float32, target.spec.device)
    trainer = Trainer(fitted, target, quiet=True)
    chat = trainer.chats[0]
    ids = torch.from_numpy(chat.ids).long()
    features, _ = trainer.teacher.features([ids], len(ids))
    from ddtree.training.measure import hidden_states

    roots = torch.arange(chat.prompt, len(ids) - 1)
    with torch.no_grad():
        hidden = hidden_states(trainer.model, trainer.teacher, features, ids, roots)
        logits = trainer.model.logits(hidden.flatten(0, 1), trainer.head).unflatten(0, hidden.shape[:2])
    for at, root in enumerate(roots.tolist()):
        cache = served.allocate(1, len(ids) + 4)
        served.append(cache, features[:, :root], torch.tensor([0]), [root])
        inferred = served.propose(cache, ids[root : root + 1], torch.tensor([root]), 3)[0]
        assert torch.allclose(logits[at], inferred, atol=2e-5)
    assert told["step"] == 6
    assert told["parameters"] == sum(w.numel() for w in load_file(out / "model.safetensors").values())
    with pytest.raises(InvalidOption, match="is there already"):
        export(fitted, out)


def test_kept_features_change_nothing(fitted: TrainConfig, fresh: TrainConfig) -> None:
    """Steps 1 to 6 pass over the data more than once; the second run is so small that only some features fit."""
    for room in (1.0, 60_000 / 2**30):
        config = changed(fresh, fit={"feature_cache_gib": room})
        trainer = Trainer(config, load_target(config.target), quiet=True)
        trainer.run(stop_at=6)
        kept = trainer.teacher.kept
        assert 0 < len(kept) <= len(trainer.chats)
        assert (len(kept) == len(trainer.chats)) == (room == 1.0)
        assert losses(config) == losses(fitted)
        for name in ("last.pt", "best.pt", "log.jsonl"):
            (Path(fresh.folder) / name).unlink()


def test_averaged_weights_are_what_is_measured_and_exported(fresh: TrainConfig, tmp_path: Path) -> None:
    """decay is at most (1 + step) / (10 + step); the average goes on after a stop."""
    config = changed(fresh, fit={"ema": 0.5, "checkpoint_every": 1})
    weights = []
    for step in range(1, 4):
        fit(config, stop_at=step, quiet=True)
        last = torch.load(Path(config.folder) / "last.pt", weights_only=True)
        weights.append({name: w.double() for name, w in last["model"].items()})
        if step == 1:
            begun = Trainer(changed(config, fit={"seed": config.fit.seed}), load_target(config.target), quiet=True)
            assert begun.average is not None
    expected = {name: w.double() for name, w in begun.average.state_dict().items()}  # after the first step
    for step, now in enumerate(weights[1:], 2):
        decay = min(0.5, (1 + step) / (10 + step))
        expected = {name: decay * w + (1 - decay) * now[name] for name, w in expected.items()}
    export(config, tmp_path / "out", "last", "float32")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.allclose(saved[name].double(), w, atol=1e-6) for name, w in expected.items())
    assert not all(torch.equal(saved[name], last["model"][name]) for name in saved)
    served = load_drafter(config, "last").state_dict()
    assert all(torch.equal(served[name], saved[name]) for name in saved)


def test_a_fit_ends_by_its_clock(fresh: TrainConfig) -> None:
    config = changed(fresh, fit={"steps": 100_000, "minutes": 1e-4})
    found = fit(config, quiet=True)
    assert found["step"] < 1000
    assert fit(config, quiet=True)["step"] == found["step"]  # its time is up
    assert (
        fit(changed(config, fit={"minutes": 1e3}), stop_at=found["step"] + 1, quiet=True)["step"] == found["step"] + 1
    )


def test_mask_token_never_occurs_in_the_data(fitted: TrainConfig) -> None:
    mask = load_drafter(fitted, "best").config.mask_token_id
    assert mask == SPARE
    assert all(mask not in chat.ids for chat in read_all(fitted.data_folder))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_eval_reports_categories_ranks_and_calibration(fitted: TrainConfig, tmp_path: Path, temperature: float) -> None:
    lines = [{"prompt": f"Say {word}.", "category": kind} for kind in ("a", "b") for word in ("one", "two")]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = changed(fitted, eval={"temperature": temperature})
    found = evaluate(config, "best", str(tmp_path / "p.jsonl"), quiet=True)
    assert set(found["categories"]) == {"a", "b"}
    assert list(found["decoding"]) == ["sampled" if temperature else "greedy"]
    assert found["acceptance_length"]["tree@8"] >= found["acceptance_length"]["chain"] >= 1
    assert len(found["depths"]) == 3
    for depth in found["depths"]:
        assert sum(depth["rank"].values()) == pytest.approx(1)
    assert sum(b["count"] for b in found["calibration"]) == 3 * found["blocks"]


def test_eval_of_the_suite_and_of_held_out_chats(fitted: TrainConfig) -> None:
    heldout = evaluate(fitted, "last", quiet=True)
    assert heldout["answers"] > 0
    few = changed(fitted, eval={"sequences": 3})
    with pytest.raises(InvalidOption, match=r"eval\.max_length"):
        evaluate(changed(few, eval={"max_length": 20}), "last", "suite", quiet=True)


def test_a_drafter_to_begin_with(fitted: TrainConfig, fresh: TrainConfig, tmp_path: Path) -> None:
    export(fitted, tmp_path / "drafter", "last", "float32")
    config = changed(fresh, drafter={"init": str(tmp_path / "drafter"), "layers": 1})
    trainer = Trainer(config, load_target(config.target), quiet=True)
    saved = load_file(tmp_path / "drafter" / "model.safetensors")
    assert all(torch.equal(saved[name], weight) for name, weight in trainer.model.state_dict().items())


def test_another_drafter_in_the_same_folder_is_refused(fitted: TrainConfig) -> None:
    with pytest.raises(InvalidOption, match=r"drafter\.layers is 3, .* begun with 2"):
        fit(changed(fitted, drafter={"layers": 3}), quiet=True)


def test_flex_is_refused_where_it_does_not_run(fresh: TrainConfig) -> None:
    with pytest.raises(InvalidOption, match="flex does not work here"):
        fit(changed(fresh, fit={"attention": "flex"}), quiet=True)


def test_without_data_or_checkpoint(tmp_path: Path, tiny_target: Path) -> None:
    config = read(run_file(tmp_path / "run.toml", tiny_target))
    with pytest.raises(ModelNotFound, match="ddtree train data"):
        fit(config, quiet=True)
    with pytest.raises(ModelNotFound, match="ddtree train fit"):
        export(config, tmp_path / "out")


def test_a_second_architecture_from_data_to_engine(tmp_path: Path) -> None:
    """Tied embeddings, other sizes, bfloat16, a rotary scaling; sampled chats of two turns."""
    other = {"tie_word_embeddings": True, "rope_parameters": LLAMA3}
    target = save_target(tmp_path / "target", layers=4, hidden=48, seed=3, **other)
    data = {"chats": 8, "turns": 2, "own": 0.5, "max_length": 250, "heldout": 0.5}
    drafter = {"taps": 1, "block_size": 6, "heads": 6, "kv_heads": 3}
    changes = ["target.dtype=bfloat16", "fit.objective=kl", "fit.precision=bfloat16"]
    config = read(run_file(tmp_path / "run.toml", target, data=data, drafter=drafter), changes)
    generate_data(config, quiet=True)
    assert max(chat.prompt for chat in read_all(config.data_folder)) > 24
    assert fit(config, stop_at=4, quiet=True)["step"] == 4
    assert fit(config, quiet=True)["step"] == 6
    assert evaluate(config, quiet=True)["acceptance_length"]["chain"] >= 1
    export(config, tmp_path / "out", dtype="bfloat16")
    engine = Engine.load(EngineConfig(str(target), str(tmp_path / "out"), Speculation("tree"), "cpu", "float32"))
    (answer,) = engine.generate([[65, 66, END]], [SamplingParams(12, ignore_eos=True)])
    assert len(answer.token_ids) == 12
    assert engine.target.spec.vocab_size == VOCAB
