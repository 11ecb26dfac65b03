"""accept, cut, settle and advance against ddtree.tree and the engine's commit."""

import random

import pytest
import torch

from ddtree.kernels import accept, advance, settle
from ddtree.tree import Nodes, RoundState, cut
from ddtree.tree import accept as reference


def random_state(batch: int, width: int, depth: int, vocab: int, seed: int) -> tuple[RoundState, torch.Tensor]:
    """Random trees with distinct siblings, and answers that often follow one of their paths."""
    rng = random.Random(seed)
    state = RoundState.allocate(batch, width + 2, depth)
    nodes, candidates = [], []
    for _ in range(batch):
        tree = Nodes.root()
        used: dict[int, int] = {}
        for _ in range(rng.randint(1, width - 1)):
            parent = rng.choice([row for row in range(len(tree)) if tree.depths[row] < depth])
            if used.get(parent, 0) < vocab:
                tree.add(parent, used.get(parent, 0))
                used[parent] = used.get(parent, 0) + 1
        nodes.append(tree)
        candidates.append([rng.sample(range(vocab), vocab) for _ in range(depth)])
    state.lay(nodes, candidates)
    own = torch.tensor([[rng.randrange(-1, vocab) for _ in range(state.width)] for _ in range(batch)])
    for index, tree in enumerate(nodes):
        row = rng.randrange(len(tree))
        while row > 0:  # most of the way the target agrees
            if rng.random() < 0.9:
                own[index, tree.parents[row]] = state.tokens[index, row]
            row = tree.parents[row]
    return state, own


def equal(found, wanted) -> None:
    for name in ("path", "count", "tokens"):
        assert torch.equal(getattr(found, name).cpu(), getattr(wanted, name).cpu()), name


def move(state: RoundState, device: torch.device) -> RoundState:
    values = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in vars(state).items()}
    return RoundState(**values)


@pytest.mark.parametrize("seed", range(12))
def test_accept(seed: int, device: torch.device) -> None:
    width, depth = (7, 3) if seed % 3 == 0 else (70, 15) if seed % 3 == 1 else (150, 20)
    state, own = random_state(3, width, depth, 6, seed)
    state = move(state, device)
    n = state.width
    equal(accept(state.rows, own.to(device), depth), reference(state.rows, own.to(device), depth))
    member = torch.rand(3, state.tokens.shape[1]) < 0.9
    member[:, 0] = True
    for row in range(1, n):  # closed under parents
        member[:, row] &= member.gather(1, state.parents[:, row : row + 1].clamp(min=0).cpu()).squeeze(1)
    state.member.copy_(member)
    member = state.member[:, :n]
    equal(accept(state.rows, own.to(device), depth, member), reference(state.rows, own.to(device), depth, member))


def test_no_end_tokens(device: torch.device) -> None:
    state, own = random_state(2, 9, 4, 5, 1)
    state, own = move(state, device), own.to(device)
    state.done.fill_(False)
    state.remaining.copy_(torch.tensor([9, 1]))
    count = reference(state.rows, own, state.path.shape[1] - 1).count
    ended = torch.ones(2, dtype=torch.bool, device=device)
    settle(state, own, torch.empty((2, 0), dtype=torch.int64, device=device), ended, members=False)
    assert state.n_committed.tolist() == [int(count[0]) + 1, 1]
    assert not ended.any()


def commit_by_torch(state: RoundState, own: torch.Tensor, ends: torch.Tensor) -> None:
    """The engine's own lines."""
    accepted = reference(state.rows, own, state.path.shape[1] - 1, state.member[:, : state.width])
    kept, ended = cut(accepted.tokens, accepted.count + 1, state.remaining, ends)
    kept = kept.masked_fill(state.done, 0)
    state.path.copy_(accepted.path.masked_fill(state.done.unsqueeze(1), -1))
    state.n_accepted.copy_(accepted.count)
    state.committed.copy_(accepted.tokens)
    state.n_committed.copy_(kept)
    bonus = accepted.tokens.gather(1, accepted.count.unsqueeze(1)).squeeze(1)
    state.tokens[:, 0] = torch.where(state.done, state.tokens[:, 0], bonus)
    state.position += (accepted.count + 1).masked_fill(state.done, 0)
    state.remaining -= kept
    state.done |= ended | (state.remaining <= 0)


@pytest.mark.parametrize("seed", range(8))
def test_settle_and_advance(seed: int, device: torch.device) -> None:
    batch = 1 if seed == 0 else 5
    ours, own = random_state(batch, 24, 9, 5, 200 + seed)
    ours.member.fill_(True)
    ours.position.copy_(torch.randint(0, 1 << 40, (batch,)))
    ours.remaining.copy_(torch.randint(1, 7, (batch,)))
    ours.done.copy_(torch.rand(batch) < 0.3)
    ours.tokens[:, 0] = torch.arange(batch) + 50
    ends = torch.randint(-2, 5, (batch, 2))
    theirs = move(
        RoundState(**{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in vars(ours).items()}), device
    )
    ours, own, ends = move(ours, device), own.to(device), ends.to(device)
    ended = torch.zeros(batch, dtype=torch.bool, device=device)
    settle(ours, own, ends, ended)
    assert torch.equal(ours.position, theirs.position)  # the caches commit here
    advance(ours, ended)
    commit_by_torch(theirs, own, ends)
    for name, value in vars(theirs).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(ours, name), value), name


def test_refuses_other_pitches(device: torch.device) -> None:
    state, own = random_state(2, 9, 4, 5, 3)
    state, own = move(state, device), own.to(device)
    member = torch.ones(2, state.width, dtype=torch.bool, device=device)
    with pytest.raises(ValueError, match="one pitch"):
        accept(state.rows, own, 4, member)
