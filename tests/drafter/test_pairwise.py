"""The pairwise head: its scores by the plain formula, its file, and what it refuses."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from ddtree.config import PAIRWISE
from ddtree.drafter import PairwiseHead, fingerprint
from ddtree.drafter.pairwise import normalised
from ddtree.errors import DamagedFile, DrafterMismatch, ModelNotFound

VOCAB, HIDDEN, RANK = 40, 12, 5
IDS = torch.tensor([1, 4, 5, 9, 17, 30, 39])


def head(gated: bool = True, seed: int = 0) -> PairwiseHead:
    generator = torch.Generator().manual_seed(seed)
    u, v = (torch.randn(len(IDS), RANK, generator=generator) for _ in range(2))
    gate = torch.randn(RANK, HIDDEN, generator=generator) * 0.3 if gated else None
    return PairwiseHead.of(IDS, VOCAB, (u, v), torch.randn(RANK, generator=generator), gate, "mark")


def proposal(depths: int, ranks: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden, tokens (some are not on the head's list) and log_q of two sequences."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.stack([torch.randperm(VOCAB, generator=generator)[:ranks] for _ in range(2 * depths)])
    logits = torch.randn(2, depths, VOCAB, generator=generator) * 2
    log_q = logits.log_softmax(-1).sort(-1, descending=True).values[..., :ranks]
    return torch.randn(2, depths, HIDDEN, generator=generator), tokens.view(2, depths, ranks), log_q


@pytest.mark.parametrize("gated", [True, False])
def test_scores_are_the_plain_formula(gated: bool) -> None:
    ours, (hidden, tokens, log_q) = head(gated), proposal(4, 6)
    pair = ours.pair(hidden, tokens, log_q)
    assert (pair.shape, pair.dtype) == ((2, 3, 6, 6), torch.float32)
    row = {int(token): place for place, token in enumerate(IDS)}
    known = 0
    for b, d, i in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(6)).tolist():
        before = int(tokens[b, d, i])
        z = ours.before[row[before]].double() if before in row else torch.zeros(RANK, dtype=torch.float64)
        if ours.gate is not None:
            z = z * (1 + ours.gate.double() @ hidden[b, d + 1].double())
        moved = [float(z @ ours.behind[row[t]].double()) if t in row else 0.0 for t in tokens[b, d + 1].tolist()]
        q = log_q[b, d + 1].double().exp()
        weights = q * torch.tensor(moved).double().exp()
        total = weights.sum() + (1 - q.sum()) * torch.exp(z @ ours.rest.double())
        assert torch.allclose(pair[b, d, i].double(), (weights / total).log(), atol=1e-4)
        known += before in row
    assert known > 3


def test_without_factors_the_marginals_stay() -> None:
    hidden, tokens, log_q = proposal(3, 5)
    silent = replace(head(), behind=torch.zeros(len(IDS) + 1, RANK), rest=torch.zeros(RANK))
    pair = silent.pair(hidden, tokens, log_q)
    assert torch.allclose(pair, log_q[:, 1:].unsqueeze(2).expand_as(pair), atol=1e-5)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 1.0, 30.0, 300.0]), st.booleans())
def test_scores_are_log_probabilities(seed: int, scale: float, certain: bool) -> None:
    """At most 0, and together at most 1, however large the moves and however certain the marginals."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 8, generator=generator) * (40.0 if certain else 1.0)
    log_q = logits.log_softmax(-1).sort(-1, descending=True).values[:, :5]
    log_q[0, -1], log_q[1, -1] = -torch.inf, torch.nan
    moved = torch.randn(3, 4, 5, generator=generator) * scale
    found = normalised(log_q, moved, torch.randn(3, 4, generator=generator) * scale)
    assert not found.isnan().any()
    assert (found <= 0).all()
    assert (found[:2, :, -1] == -torch.inf).all()
    assert (found.exp().sum(-1) <= 1 + 1e-5 + 3e-6 * scale).all()  # of scores up to 4 * scale in float32
    assert (normalised(torch.full((2, 3), -torch.inf), moved[:2, :, :3], moved[:2, :, 0]) == -torch.inf).all()


@pytest.mark.parametrize("gated", [True, False])
def test_a_file_is_the_head_again(gated: bool, tmp_path: Path) -> None:
    ours, path = head(gated), tmp_path / PAIRWISE
    ours.write(path, {"chats": 3}, torch.float32)
    found = PairwiseHead.read(path)
    hidden, tokens, log_q = proposal(3, 4)
    assert torch.equal(found.pair(hidden, tokens, log_q), ours.pair(hidden, tokens, log_q))
    assert (found.drafter, found.rank, found.gate is None) == ("mark", RANK, not gated)
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["about"]) == {"chats": 3}
    assert not list(tmp_path.glob("*.safetensors")), "loaders would take it for weights"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    moved = found.to(torch.device("cpu"))
    assert torch.equal(moved.pair(hidden, tokens, log_q), ours.pair(hidden, tokens, log_q))
    ours.write(path)  # over the one that is there, in half precision
    assert torch.allclose(PairwiseHead.read(path).before, ours.before, atol=0.02)


Changes = Callable[[dict[str, torch.Tensor], dict[str, str]], object]
DAMAGE: dict[str, tuple[Changes, str]] = {
    "another kind": (lambda t, m: m.update(kind="x"), "of kind 'x'"),
    "no factor": (lambda t, m: t.pop("behind"), "behind"),
    "no vocabulary": (lambda t, m: m.pop("vocab_size"), "vocab_size"),
    "another rank": (lambda t, m: t.update(rest=torch.zeros(RANK + 1)), "do not belong together"),
    "another gate": (lambda t, m: t.update(gate=torch.zeros(RANK + 1, HIDDEN)), "do not belong together"),
    "fewer rows": (lambda t, m: t.update(behind=t["behind"][1:].clone()), "do not belong together"),
    "a token twice": (lambda t, m: t.update(token_ids=torch.tensor([1, 4, 5, 9, 17, 30, 30])), "do not belong"),
    "an unknown token": (lambda t, m: m.update(vocab_size="39"), "do not belong together"),
    "no number": (lambda t, m: t["before"].fill_(float("nan")), "do not belong together"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_files_are_refused(what: str, tmp_path: Path) -> None:
    change, words = DAMAGE[what]
    path = tmp_path / "pairwise.st"
    head().write(path)
    with safe_open(path, framework="pt") as file:
        facts = dict(file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(tensors, facts)
    save_file(tensors, path, metadata=facts)
    with pytest.raises(DamagedFile, match=words):
        PairwiseHead.read(path)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DamagedFile, match="no whole pairwise head"):
        PairwiseHead.read(path)
    path.unlink()
    with pytest.raises(ModelNotFound, match="ddtree train pair"):
        PairwiseHead.read(path)


def test_a_head_of_another_drafter_or_target_is_refused() -> None:
    norm = torch.rand(HIDDEN)
    mark = fingerprint(norm)
    ours = replace(head(), drafter=mark)
    ours.check_fits(VOCAB, HIDDEN, fingerprint(norm.bfloat16()))  # an export in half precision is the same drafter
    for sizes, words in (((41, HIDDEN, mark), "vocabulary"), ((VOCAB, 13, mark), "hidden_size"),
                         ((VOCAB, HIDDEN, fingerprint(norm + 0.1)), "another drafter")):  # fmt: skip
        with pytest.raises(DrafterMismatch, match=words):
            ours.check_fits(*sizes)
