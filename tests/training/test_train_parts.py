"""Loss, schedule, batches, masks, shapes and options, each by itself."""

import itertools
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.drafter import DrafterConfig
from ddtree.errors import DamagedFile, DrafterMismatch, InvalidOption, ModelNotFound
from ddtree.target.base import TargetSpec
from ddtree.training import batches, shape
from ddtree.training.attention import Blocks
from ddtree.training.config import DataPart, DrafterPart, EvalPart, FitPart, PairwisePart, TargetPart, TrainConfig, read
from ddtree.training.loss import depth_weights, weighted_loss
from ddtree.training.measure import Drafts, Measures, walk
from ddtree.training.model import DraftModel
from ddtree.training.schedule import learning_rate
from ddtree.training.shards import Chat
from ddtree.training.teacher import Teacher, load_target
from ddtree.tree import best_first
from dflash_reference import BASE, change
from tiny_run import run_file

pytestmark = pytest.mark.usefixtures("one_thread")


def spec(layers: int = 30, hidden: int = 576) -> TargetSpec:
    return TargetSpec(49152, hidden, layers, 2048, (2,), torch.float32, torch.device("cpu"))


def chat(prompt: int, answer: int, kind: str = "x", greedy: bool = True) -> Chat:
    return Chat(np.arange(100, 100 + prompt + answer, dtype=np.int32), prompt, kind, greedy, False)


@pytest.mark.parametrize(("cap", "times"), [(None, 1.0), (None, 1.5), (2.0, 1.5)])
def test_loss_is_the_plain_formula_whatever_the_chunks(cap: float | None, times: float) -> None:
    """Value and gradient."""
    raw = change(BASE, {"final_logit_softcapping": cap, "output_multiplier": times})
    model = DraftModel(DrafterConfig.read(raw))
    hidden, teacher, head = torch.randn(11, 32), torch.randn(11, 32), torch.randn(61, 32)
    labels, weights = torch.randint(61, (11,)), torch.rand(11) * (torch.arange(11) % 3 > 0)
    hidden.requires_grad_()
    logits = hidden @ head.T * times
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    entropy = (F.cross_entropy(logits, labels, reduction="none") * weights).sum()
    p = (teacher @ head.T).softmax(-1)
    kl = (F.kl_div(logits.log_softmax(-1), p, reduction="none").sum(-1) * weights).sum()
    for rows, (said, wanted) in itertools.product((1, 4, 100), ((None, entropy), (teacher, kl))):
        found = hidden.detach().clone().requires_grad_()
        loss = weighted_loss(model, found, labels, weights, head, said, rows)
        assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
        (3 * loss).backward()
        assert found.grad is not None
        (plain,) = torch.autograd.grad(3 * wanted, hidden, retain_graph=True)
        assert torch.allclose(found.grad, plain, atol=1e-5)
        assert ((found.grad.abs().sum(1) > 0) == (weights > 0)).all()


def test_depth_weights() -> None:
    assert depth_weights(3, 7.0).tolist() == pytest.approx([1.0, 0.866878, 0.751477], rel=1e-5)


def test_schedule() -> None:
    part = FitPart(steps=100, warmup=10, lr=1.0, final_lr=0.1)
    rates = [learning_rate(part, step) for step in range(101)]
    assert rates[0] == 0.1
    assert rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    timed = FitPart(steps=100, warmup=10, lr=1.0, final_lr=0.1, minutes=2.0)
    assert learning_rate(timed, 55, 30.0) == pytest.approx(0.55)  # by steps, which are further
    assert learning_rate(timed, 11, 60.0) == pytest.approx(0.55)  # by the clock
    assert learning_rate(timed, 11, 1e9) == pytest.approx(0.1)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(2, 30)), min_size=1, max_size=4), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_anchors_are_roots_of_the_answer_and_labels_follow_them(sizes: list[tuple[int, int]], anchors: int) -> None:
    chats = [chat(*size) for size in sizes]
    batch = batches.make(chats, depth_weights(3, 2.0), anchors, seed=5, number=8)
    assert batch.length % 128 == 0
    for row, one in enumerate(chats):
        used = batch.weights[row, :, 0] > 0
        found = batch.anchors[row][used].tolist()
        assert len(found) == len(set(found)) == min(anchors, one.answer - 1)
        for column, at in enumerate(found):
            assert one.prompt <= at < len(one.ids) - 1
            assert batch.roots[row, column] == one.ids[at]
            behind = one.ids[at + 1 : at + 4].tolist()
            assert batch.labels[row, column, : len(behind)].tolist() == behind
            assert (batch.weights[row, column] > 0).tolist() == [k < len(behind) for k in range(3)]
    alone = batches.make(chats[-1:], depth_weights(3, 2.0), anchors, seed=5, number=8 + len(chats) - 1)
    assert torch.equal(alone.anchors[0], batch.anchors[-1])


def test_every_pass_sees_every_sequence_once() -> None:
    seen = [i for step in range(6) for i in batches.order(9, step, 3, seed=2)]
    assert sorted(seen[:9]) == sorted(seen[9:]) == list(range(9))
    assert seen[:9] != seen[9:]


def test_dense_mask_row_by_row() -> None:
    config = DrafterConfig.read(
        change(BASE, {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 3})
    )
    anchors = torch.tensor([[2, 7]])
    blocks = Blocks(config, anchors, 10)
    for window, causal in blocks.kinds:
        mask = blocks.dense_mask((window, causal))[0]
        for row, key in itertools.product(range(12), range(22)):
            start, at = anchors[0, row // 6].item(), anchors[0, row // 6].item() + row % 6
            same = key >= 10 and (key - 10) // 6 == row // 6
            where = start + (key - 10) % 6 if key >= 10 else key
            sees = same if key >= 10 else key < start
            if window is not None:
                sees = sees and abs(at - where) < window
            if causal:
                sees = sees and where <= at
            assert bool(mask[row, key]) == sees, (row, key)


def test_the_head_is_found_exactly(tiny_target: Path) -> None:
    target: Any = load_target(TargetPart(str(tiny_target), "cpu", "float32"))
    teacher = Teacher(target, (1, 3), 50)
    hidden = torch.randn(5, 32)
    assert torch.allclose(hidden @ teacher.head(torch.float32).T, target.head(hidden), atol=1e-5)


def test_the_teachers_distribution_is_the_targets(tiny_target: Path) -> None:
    target = load_target(TargetPart(str(tiny_target), "cpu", "float32"))
    ids = torch.randint(256, (9,))
    for taps in ((1, 3), (5, 1)):
        teacher = Teacher(target, taps, 50, distribution=True)
        features, hidden = teacher.features([ids, ids[:4]], 12)
        assert features.shape == (2, 12, 64)
        assert hidden is not None
        for n in (4, 9):
            _, logits = target.prefill(target.allocate(1, 50), ids[None, :n], torch.tensor([0]))
            assert torch.allclose(hidden[0, n - 1] @ teacher.head(torch.float32).T, logits[0], atol=1e-4)
        assert torch.allclose(features[1, :4], features[0, :4], atol=1e-5)
        assert not features[1, 4:].any()


def test_a_batch_at_once_has_the_features_of_each_alone(tiny_target: Path) -> None:
    """The GPU's way, on the CPU: with and without the distribution, some of it kept."""
    target = load_target(TargetPart(str(tiny_target), "cpu", "float32"))
    sequences = [torch.randint(256, (n,)) for n in (9, 30, 1, 17)]
    for distribution in (False, True):
        teacher = Teacher(target, (3, 1), 40, distribution, cache_gib=1.0)
        wanted = teacher.features(sequences, 32)
        teacher.batched = True
        for names in (None, [4, 5, 6, 7], [6, 9, 5, 4]):
            chosen = [sequences[name % 4] if name < 8 else sequences[3] for name in names or range(4)]
            order = [name % 4 if name < 8 else 3 for name in names or range(4)]
            found = teacher.features(chosen, 32, names)
            for ours, theirs in zip(found, wanted, strict=True):
                assert (ours is None) == (theirs is None)
                assert ours is None or torch.allclose(ours, theirs[order], atol=1e-4)  # type: ignore[index]
        assert sorted(teacher.kept) == [4, 5, 6, 7, 9]


def test_new_drafters() -> None:
    raw = shape.new(DrafterPart(mask_token_id=4), spec())
    assert raw["dflash_config"] == {"mask_token_id": 4, "target_layer_ids": [1, 7, 14, 21, 27]}
    assert (raw["num_attention_heads"], raw["num_key_value_heads"], raw["intermediate_size"]) == (9, 3, 1536)
    DrafterConfig.read(raw).check_fits(49152, 576, 30)
    assert shape.taps(DrafterPart(taps=1), 30) == [27]
    assert shape.taps(DrafterPart(tap_layers=(3, 2)), 30) == [3, 2]
    with pytest.raises(InvalidOption, match="only 3 layers"):
        shape.taps(DrafterPart(), 6)
    with pytest.raises(InvalidOption, match="divide the 9 heads"):
        shape.new(DrafterPart(kv_heads=2), spec())
    with pytest.raises(DrafterMismatch, match="target_layer_ids"):
        shape.build(shape.new(DrafterPart(tap_layers=(30,), mask_token_id=4), spec()), None, spec(), 0)


def test_a_new_drafter_begins_with_small_logits() -> None:
    model, head = DraftModel(DrafterConfig.read(BASE)), torch.randn(61, 32) * 5
    shape.calm(model, head)
    logits = model.logits(model.norm(torch.randn(40, 32)), head)
    assert 0.5 < float(logits.detach().std()) < 2


def test_mask_tokens() -> None:
    small = TargetSpec(6, 576, 30, 2048, (5,), torch.float32, torch.device("cpu"))

    def choose(used: list[int], special: list[int]) -> int:
        raw = shape.new(DrafterPart(), small)
        shape.choose_mask(raw, [Chat(np.array(used, np.int32), 1, "x", True, False)], special, small)
        return raw["dflash_config"]["mask_token_id"]

    assert choose([0, 1], [1, 3]) == 3
    assert choose([0, 1, 3], [1, 3]) == 4
    with pytest.raises(InvalidOption, match="mask_token_id"):
        choose([0, 1, 2, 3, 4], [])


def test_acceptance_walks_as_decoding_does() -> None:
    log_q = torch.tensor([0.6, 0.4]).log().expand(6, 2, 2)
    ranks = torch.tensor([[0, 1], [0, 0], [0, 0], [1, 0], [5, 0], [0, 0]])
    drafts = Drafts(3, log_q, ranks, torch.zeros(6, 2))
    assert walk(drafts, None) == [2, 3, 3]
    # a tree of 3 nodes holds 0, 1 and 00; one of 4 also 01 or 10, by the shorter path of ranks
    assert best_first(log_q[0].tolist(), 3).ranks[1:] == [0, 1, 0]
    assert walk(drafts, 3) == [2, 3, 3]
    assert walk(drafts, 6) == [3, 3]
    found = Measures(2, (6,))
    found.add(chat(3, 8, "code"), drafts)
    found.add(chat(3, 8, "json", greedy=False), drafts)
    report = found.report()
    assert report["acceptance_length"] == {"chain": pytest.approx(8 / 3), "tree@6": 3.0}
    assert report["rounds"] == {"chain": 6, "tree@6": 4}
    assert set(report["decoding"]) == {"greedy", "sampled"}
    rank = report["depths"][0]["rank"]
    assert list(rank) == ["0", "1", "2", "3", "4-7", "8-15", "16-63", "64+"]
    assert {name: share for name, share in rank.items() if share} == {"0": 4 / 6, "1": 1 / 6, "4-7": 1 / 6}
    assert report["calibration"] == [{"from": 0.6, "count": 24, "said": pytest.approx(0.6), "right": 18 / 24}]
    assert report["depths"][0]["calibration_error"] == pytest.approx(4 / 6 - 0.6)


def test_every_field_of_the_file_is_checked() -> None:
    """One value that cannot be, for every field that has a range; a wrong type for all."""
    for part in (TargetPart, DataPart, DrafterPart, FitPart, PairwisePart, EvalPart):
        for field in fields(part):
            default = getattr(part(), field.name)
            assert not is_dataclass(default)
            if isinstance(default, int | float) and field.name not in ("seed",):
                with pytest.raises(InvalidOption, match=field.name):
                    part(**{field.name: -2})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("fit.stepz=3", "fit.stepz is unknown: fit has steps"),
        ("fit.steps=x", "fit.steps is 'x': it must be a whole number"),
        ("fit.steps=true", "fit.steps is True"),
        ("fit.steps", "has no value"),
        ("fit=3", "fit is 3: it must be a table"),
        ("folder.x=3", "folder is no table"),
        ("fit.micro_batch=3", "fit.micro_batch is 3: it must be a divisor of fit.batch 4"),
        ("fit.objective=mse", "fit.objective 'mse' is unknown"),
        ("fit.attention=eager", "fit.attention 'eager' is unknown"),
        ("fit.precision=float16", "fit.precision 'float16' is unknown"),
        ("target.dtype=int4", "target.dtype 'int4' is unknown"),
        ("drafter.head_dim=7", "drafter.head_dim is 7: it must be even"),
        ("drafter.tap_layers=3", "drafter.tap_layers is 3: it must be a list of whole numbers"),
        ("drafter.block_size=1", "drafter.block_size is 1"),
        ("data.files=0.5", "data.paths is []: it must be given together with data.files"),
        ('data.paths=["x.jsonl"]', "data.paths is ['x.jsonl']: it must be given together"),
        ("pairwise.candidates=[0]", "pairwise.candidates is [0]"),
        ("pairwise.candidates=[]", "pairwise.candidates is []"),
        ("eval.budgets=[0]", "eval.budgets is 0"),
        ("fit.lr=nan", "fit.lr is nan"),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, tiny_target: Path, change: str, words: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        read(run_file(tmp_path / "run.toml", tiny_target), [change])
    assert words in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="does not exist"):
        read(tmp_path / "none.toml")
    (tmp_path / "x.toml").write_text("a = = 3")
    with pytest.raises(DamagedFile, match="not valid TOML"):
        read(tmp_path / "x.toml")
    (tmp_path / "x.toml").write_text("")
    assert read(tmp_path / "x.toml") == TrainConfig()
