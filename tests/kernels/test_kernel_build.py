"""build against the host's best_first, chain, union and RoundState.lay."""

from collections.abc import Sequence

import pytest
import torch

from ddtree.kernels import Plan, PlanRow, build
from ddtree.tree import Nodes, RoundState, best_first, chain, union, unpack

MINUS = float("-inf")

# The interpreter computes with numpy, which warns where a GPU gives an infinity or NaN in silence.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def by_host(log_q: torch.Tensor, candidates: torch.Tensor, rows: Sequence[PlanRow], width: int) -> RoundState:
    """What the engine lays, padded to `width` as lay pads a batch."""
    nodes, shown = [], []
    state = RoundState.allocate(len(rows), width, 63)
    state.member.fill_(True)
    for index, row in enumerate(rows):
        scores = [depth[: row.ranks] for depth in log_q[index, : row.depth].tolist()]
        tree = best_first(scores, row.budget, row.spine) if row.tree else Nodes.root()
        laid, on_chain = tree, [0]
        if row.chain:
            laid, on_chain = union(tree, chain(row.depth)) if row.tree else (chain(row.depth), [0])
        nodes.append(laid)
        state.tree[index, : len(tree)] = True
        if row.tree and row.chain:
            state.member[index] = False
            state.member[index, on_chain] = True
        shown.append(candidates[index].tolist())
    # One sequence more, of `width` rows, makes lay pad all others to it.
    filler = Nodes([-1] + [0] * (width - 1), [0] + [1] * (width - 1), [0] * width)
    padded = RoundState.allocate(len(rows) + 1, width, 63)
    padded.lay([*nodes, filler], [*shown, [[0]]])
    for name in ("tokens", "parents", "depths", "ancestors"):
        getattr(state, name).copy_(getattr(padded, name)[:-1])
    return state


def check(log_q: torch.Tensor, rows: Sequence[PlanRow], width: int, device: torch.device) -> RoundState:
    batch, depth, ranks = log_q.shape
    candidates = torch.arange(batch * depth * ranks).view(batch, depth, ranks) * 7 + 1
    wanted = by_host(log_q, candidates, rows, width)
    plan = Plan.allocate(batch, device)
    plan.write(rows, width)
    state = RoundState.allocate(batch, width + 3, depth, device)
    for name in ("tokens", "parents", "depths", "ancestors"):
        getattr(state, name).fill_(-77)
    state.tokens[:, 0] = 5
    build(log_q.to(device), candidates.to(device), plan, state, width)
    assert state.width == width
    assert (state.tokens[:, 0] == 5).all()
    wanted.tokens[:, 0] = 5
    words = -(-width // 64)
    for name in ("tokens", "parents", "depths", "member", "tree"):
        assert torch.equal(getattr(state, name)[:, :width].cpu(), getattr(wanted, name)), name
    assert torch.equal(state.ancestors[:, :width, :words].cpu(), wanted.ancestors)
    assert (state.parents[:, width:] == -77).all()
    return state


def scores(batch: int, depth: int, ranks: int, seed: int, *, ties: bool = False) -> torch.Tensor:
    """Log-probabilities, best first; with ties, of a few values only."""
    generator = torch.Generator().manual_seed(seed)
    drawn = -torch.rand(batch, depth, ranks, generator=generator) * 4
    if ties:
        drawn = drawn.round() / 2
    return drawn.sort(-1, descending=True).values


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("depth", "ranks", "budget", "spine", "width"),
    [(15, 16, 63, 0, 64), (15, 8, 15, 0, 16), (5, 3, 20, 2, 25), (1, 4, 9, 3, 10), (7, 32, 33, 7, 50)],
)
def test_tree(depth: int, ranks: int, budget: int, spine: int, width: int, ties: bool, device: torch.device) -> None:
    plan = PlanRow(tree=True, budget=budget, spine=spine, ranks=ranks, depth=depth)
    check(scores(2, depth, ranks, budget, ties=ties), [plan] * 2, width, device)


def test_every_mode_in_one_batch(device: torch.device) -> None:
    full = PlanRow(tree=True, chain=True, budget=15, spine=0, ranks=8, depth=9)
    rows = [
        PlanRow(),
        PlanRow(chain=True, depth=9),
        PlanRow(tree=True, budget=15, ranks=8, depth=9),
        full,
        PlanRow(tree=True, chain=True, budget=5, spine=3, ranks=2, depth=7),
        PlanRow(tree=True, chain=True, budget=1, ranks=1, depth=9),
    ]
    state = check(scores(6, 9, 8, 3, ties=True), rows, full.rows, device)
    assert state.tree[3].sum() == 16
    assert state.member[3].sum() == 10


@pytest.mark.parametrize("seed", range(4))
def test_all_equal_scores(seed: int, device: torch.device) -> None:
    """Order by depth and path alone, at -0.0, 0.0 and other values."""
    value = (-0.0, 0.0, -1.0, -0.5)[seed]
    log_q = torch.full((1, 6, 4), value)
    log_q[0, 1::2] *= -1 if value == 0 else 1
    plan = PlanRow(tree=True, chain=True, budget=40, spine=seed, ranks=4, depth=6)
    check(log_q, [plan], plan.rows, device)


def test_missing_ranks(device: torch.device) -> None:
    log_q = scores(4, 6, 4, 8)
    log_q[0, :, 2:] = MINUS
    log_q[1, 2, 1:] = float("nan")
    log_q[2, 1] = MINUS  # the spine ends here, and so does the tree
    log_q[3, 0] = float("nan")
    plan = PlanRow(tree=True, chain=True, budget=30, spine=4, ranks=4, depth=6)
    check(log_q, [plan] * 4, plan.rows, device)


def test_sums_that_overflow(device: torch.device) -> None:
    log_q = scores(1, 6, 3, 9)
    log_q[0, :, 1:] = torch.finfo(torch.float32).min
    plan = PlanRow(tree=True, budget=20, ranks=3, depth=6)
    check(log_q, [plan], 21, device)


@pytest.mark.parametrize(("budget", "width"), [(100, 128), (127, 128), (150, 256)])
def test_more_than_one_word(budget: int, width: int, device: torch.device) -> None:
    plan = PlanRow(tree=True, budget=budget, ranks=8, depth=63)
    log_q = scores(1, 63, 8, budget, ties=True) - 2.0
    log_q[..., 0] = -0.03125
    state = check(log_q, [plan], width, device)
    assert state.depths.max() > 40


@pytest.mark.parametrize(("budget", "spine"), [(15, 0), (40, 2), (90, 0)])
def test_the_chain_first(budget: int, spine: int, device: torch.device) -> None:
    """The same rows with the chain's in front, in every mode; what is not a chain keeps its order."""
    full = PlanRow(tree=True, chain=True, budget=budget, spine=spine, ranks=8, depth=9)
    plans = [full, PlanRow(chain=True, depth=9), PlanRow(tree=True, budget=budget, ranks=8, depth=9), PlanRow(), full]
    log_q, width = scores(len(plans), 9, 8, budget), full.rows
    candidates = torch.arange(log_q.numel()).view(log_q.shape).to(device)
    plan = Plan.allocate(len(plans), device)
    plan.write(plans, width)
    usual, moved = (RoundState.allocate(len(plans), width, 9, device) for _ in range(2))
    build(log_q.to(device), candidates, plan, usual, width)
    build(log_q.to(device), candidates, plan, moved, width, chain_first=True)
    for index, asked in enumerate(plans):
        rows, found = list(range(width)), moved.depths[index]
        if asked.tree and asked.chain:
            line = usual.member[index].nonzero().flatten().tolist()
            rows = line + [row for row in rows if row not in line]
            assert found[:10].tolist() == list(range(10))
            assert moved.member[index].tolist() == [True] * 10 + [False] * (width - 10)
            assert rows != sorted(rows)
        for name in ("tokens", "depths", "member", "tree"):
            assert torch.equal(getattr(moved, name)[index], getattr(usual, name)[index, rows]), name
        parents = [rows.index(above) if above >= 0 else -1 for above in usual.parents[index, rows].tolist()]
        assert moved.parents[index].tolist() == parents
        assert all(above < row for row, above in enumerate(parents))
        seen, before = (unpack(state.ancestors[index : index + 1], width)[0] for state in (moved, usual))
        assert torch.equal(seen, before[rows][:, rows])


def test_refuses(device: torch.device) -> None:
    plan = Plan.allocate(2, device)
    with pytest.raises(ValueError, match="sequence 1 may need 9 rows"):
        plan.write([PlanRow(), PlanRow(tree=True, chain=True, budget=4, depth=4)], 8)
    state = RoundState.allocate(2, 8, 4, device)
    log_q = torch.zeros(2, 4, 33, device=device)
    with pytest.raises(ValueError, match="33 ranks"):
        build(log_q, log_q.long(), plan, state, 8)
    with pytest.raises(ValueError, match="9 rows"):
        build(log_q[..., :4], log_q[..., :4].long(), plan, state, 9)
