"""The drafter's head: the best few of every depth, alone and with the vocabulary on several ranks."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddtree.errors import UnsupportedModel
from ddtree.sglang.head import TopKHead
from ddtree.tree import top_k

BLOCK, RANKS, BATCH, HIDDEN, VOCABULARY = 4, 5, 2, 8, 300


class Ranks:
    """A tensor-parallel group in one process: what every rank would send is known before."""

    def __init__(self, world: int) -> None:
        self.world_size = world
        self.sent: list[list[torch.Tensor]] = []  # by rank
        self.told = 0

    def all_gather_into_tensor(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        if self.told < 0:  # this run finds out what its rank sends
            self.sent[-1].append(part.clone())
            whole.copy_(part.repeat(self.world_size, *[1] * (part.dim() - 1)))
        else:
            whole.copy_(torch.cat([rank[self.told] for rank in self.sent]))
            self.told += 1


def shard(weight: torch.Tensor, first: int, last: int, padding: int = 0) -> Any:
    """Rows first .. last - 1 of a head, as SGLang pads and describes them."""
    rows = torch.cat([weight[first:last], torch.full((padding, weight.shape[1]), 99.0, device=weight.device)])
    indices = SimpleNamespace(num_added_elements=0, num_org_elements=last - first, org_vocab_start_index=first)
    return SimpleNamespace(weight=rows, shard_indices=indices)


@pytest.fixture
def drawn(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    return weight.to(device), torch.randn(BATCH * BLOCK, HIDDEN, generator=generator).to(device)


def wanted(weight: torch.Tensor, hidden: torch.Tensor) -> Any:
    return top_k(hidden.view(BATCH, BLOCK, HIDDEN)[:, 1:] @ weight.T, RANKS)


def test_one_rank(drawn: tuple[torch.Tensor, torch.Tensor]) -> None:
    weight, hidden = drawn
    head = TopKHead(shard(weight, 0, VOCABULARY, padding=20), Ranks(1), BLOCK, RANKS, batch=3)
    assert head.batch == 3
    head(hidden)
    found = head.read(BATCH)
    assert torch.equal(found.tokens, wanted(weight, hidden).tokens)
    assert torch.allclose(found.log_q, wanted(weight, hidden).log_q, atol=1e-5)
    assert torch.equal(found.states, hidden.view(BATCH, BLOCK, HIDDEN)[:, 1:])


def test_every_rank_sees_the_same(drawn: tuple[torch.Tensor, torch.Tensor]) -> None:
    weight, hidden = drawn
    group = Ranks(3)
    cuts = [0, 100, 180, VOCABULARY]
    heads = [TopKHead(shard(weight, a, b, padding=4), group, BLOCK, RANKS, BATCH) for a, b in pairwise(cuts)]
    for head in heads:
        group.sent.append([])
        group.told = -1
        head(hidden)
    for head in heads:
        group.told = 0
        head(hidden)
        found = head.read(BATCH)
        assert torch.equal(found.tokens, wanted(weight, hidden).tokens)
        assert torch.allclose(found.log_q, wanted(weight, hidden).log_q, atol=1e-5)


@pytest.mark.parametrize(
    ("head", "world", "message"),
    [
        (SimpleNamespace(quant_method=Ranks(1)), 1, r"this one has no weight \(Ranks\): take a checkpoint"),
        (SimpleNamespace(weight=torch.ones(4, 4, dtype=torch.int8)), 1, "is in int8"),
        (SimpleNamespace(weight=torch.ones(4, 4).to(torch.float8_e4m3fn)), 1, "is in float8_e4m3fn"),
        (SimpleNamespace(weight=torch.ones(4, 4)), 2, "which tokens a rank has"),
        (
            SimpleNamespace(weight=torch.ones(4, 4), shard_indices=SimpleNamespace(num_added_elements=1)),
            1,
            "added vocabulary",
        ),
    ],
)
def test_heads_that_are_refused(head: Any, world: int, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        TopKHead(head, Ranks(world), BLOCK, RANKS, BATCH)
