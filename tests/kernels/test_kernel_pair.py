"""Pair scores, their order, and the rows laid by them, against PairwiseHead.pair, Pair.of and the host's builders."""

from collections.abc import Sequence

import pytest
import torch

from ddtree.drafter import PairwiseHead
from ddtree.kernels import Lines, PairFactors, Plan, PlanRow, build, lines_of, pair
from ddtree.tree import Nodes, Pair, Proposal, RoundState, best_first, chain, union

MINUS = float("-inf")
VOCAB, HIDDEN = 90, 48

# The interpreter computes with numpy, which warns where a GPU gives an infinity or NaN in silence.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def head(rank: int, gated: bool, seed: int, *, halves: bool = True) -> PairwiseHead:
    """Of every third token; halves: bfloat16 holds its factors."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.arange(1, VOCAB, 3)

    def draw(*shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator)
        return drawn.bfloat16().float() if halves else drawn

    gate = draw(rank, HIDDEN) * 0.125 if gated else None
    return PairwiseHead.of(ids, VOCAB, (draw(len(ids), rank), draw(len(ids), rank)), draw(rank), gate, "mark")


def factors_of(ours: PairwiseHead, states: torch.dtype, device: torch.device) -> PairFactors:
    return ours.to(device).factors(states)


def draft(batch: int, depth: int, ranks: int, seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, Proposal]:
    """hidden and candidates, of which two thirds have no place in the head."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.stack([torch.randperm(VOCAB, generator=generator)[:ranks] for _ in range(batch * depth)])
    logits = torch.randn(batch, depth, VOCAB, generator=generator) * 2
    log_q = logits.log_softmax(-1).sort(-1, descending=True).values[..., :ranks]
    hidden = torch.randn(batch, depth, HIDDEN, generator=generator).to(dtype)
    return hidden, Proposal(tokens.view(batch, depth, ranks), log_q)


def on(device: torch.device, proposal: Proposal) -> Proposal:
    return Proposal(proposal.tokens.to(device), proposal.log_q.to(device))


def plan_of(rows: Sequence[PlanRow], width: int, device: torch.device) -> Plan:
    plan = Plan.allocate(len(rows), device)
    plan.write(rows, width)
    return plan


def check_lines(found: Lines, log_q: torch.Tensor, scores: torch.Tensor) -> None:
    wanted = lines_of(log_q, scores)
    for name in ("edges", "places"):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        assert torch.equal(ours[:, 1:], theirs[:, 1:]), name
        assert torch.equal(ours[:, 0, 0], theirs[:, 0, 0]), name
    for b, sequence in enumerate(scores):
        known = Pair.of(sequence)
        assert wanted.edges[b, 1:].tolist() == known.log_q
        assert wanted.places[b, 1:].tolist() == known.ranks


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("depth", "ranks", "rank"), [(5, 6, 16), (1, 3, 5), (2, 1, 7), (3, 16, 33)])
def test_scores_are_the_heads(
    depth: int, ranks: int, rank: int, dtype: torch.dtype, gated: bool, device: torch.device
) -> None:
    ours = head(rank, gated, depth, halves=ranks != 6)
    hidden, proposal = draft(2, depth, ranks, rank, dtype)
    plan = plan_of([PlanRow(ranks=ranks, depth=depth), PlanRow(ranks=max(ranks - 2, 1), depth=depth)], 1, device)
    factors = factors_of(ours, dtype, device)
    found = pair(factors, hidden.to(device), on(device, proposal), plan)
    cut = proposal.log_q.clone()
    cut[1, :, max(ranks - 2, 1) :] = MINUS
    wanted = ours.pair(hidden, proposal.tokens, cut)
    if gated and dtype is torch.bfloat16 and ranks == 6:  # the gate is rounded with the states
        wanted = PairwiseHead(**{**vars(ours), "gate": ours.gate.bfloat16().float()}).pair(hidden, proposal.tokens, cut)
    assert found.pair is not None
    torch.testing.assert_close(found.pair.cpu(), wanted, rtol=1e-5, atol=1e-5)
    assert ((found.pair.cpu() == MINUS) == (wanted == MINUS)).all()
    check_lines(found.lines, cut.to(device), found.pair)


@pytest.mark.parametrize("moves", [0.0, 40.0])
def test_odd_marginals(moves: float, device: torch.device) -> None:
    """Missing ranks, a certain depth, a depth with nothing, equal scores; moves small and large."""
    ours = head(8, True, 3)
    ours = PairwiseHead(**{**vars(ours), "behind": ours.behind * moves, "rest": ours.rest * 0.25})
    hidden, proposal = draft(1, 7, 5, 4, torch.float32)
    log_q = proposal.log_q
    log_q[0, 1, 2:] = MINUS
    log_q[0, 2, 3:] = float("nan")
    log_q[0, 3] = torch.tensor([0.0, -30.0, -40.0, MINUS, MINUS])
    log_q[0, 4] = MINUS
    log_q[0, 5] = -2.0
    found = pair(
        factors_of(ours, torch.float32, device),
        hidden.to(device),
        on(device, proposal),
        plan_of([PlanRow(ranks=5, depth=7)], 1, device),
    )
    assert found.pair is not None
    atol = 2e-5 * (1 + moves)  # sums of numbers that large are rounded otherwise
    torch.testing.assert_close(found.pair.cpu(), ours.pair(hidden, proposal.tokens, log_q), rtol=1e-5, atol=atol)
    assert (found.pair <= 0).all()
    assert (found.pair[0, 3] == MINUS).all()
    check_lines(found.lines, log_q.to(device), found.pair)
    if not moves:
        assert (found.lines.places[0, 5] == torch.arange(5, device=device)).all()


def test_states_that_are_no_numbers_leave_no_candidates(device: torch.device) -> None:
    hidden, proposal = draft(1, 3, 4, 5, torch.float32)
    hidden[0, 1] = float("nan")
    plan = plan_of([PlanRow(ranks=4, depth=3)], 1, device)
    found = pair(factors_of(head(4, True, 1), torch.float32, device), hidden.to(device), on(device, proposal), plan)
    assert found.pair is not None
    assert found.pair[0, 0].isnan().all()
    assert (found.lines.edges[0, 1] == MINUS).all()
    check_lines(found.lines, proposal.log_q.to(device), found.pair)


def by_host(
    log_q: torch.Tensor,
    scores: torch.Tensor,
    candidates: torch.Tensor,
    rows: Sequence[PlanRow],
    width: int,
    chained: bool,
) -> RoundState:
    """What the engine lays, padded to `width` as lay pads a batch. chained: by the pair scores, as the engine's are."""
    nodes, shown = [], []
    state = RoundState.allocate(len(rows), width, 63)
    state.member.fill_(True)
    for index, row in enumerate(rows):
        known = Pair.of(scores[index, : max(row.depth - 1, 0), : row.ranks, : row.ranks])
        marginals = [depth[: row.ranks] for depth in log_q[index, : row.depth].tolist()]
        tree = best_first(marginals, row.budget, row.spine, pair=known) if row.tree else Nodes.root()
        line = chain(row.depth, known if chained else None) if row.chain else Nodes.root()
        laid, on_chain = union(tree, line) if row.tree else (line, [0])
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


def check(
    log_q: torch.Tensor,
    scores: torch.Tensor,
    rows: Sequence[PlanRow],
    width: int,
    device: torch.device,
    chained: bool = True,
) -> RoundState:
    """Candidates beyond a sequence's ranks are missing in the scores that its rows are laid by."""
    batch, depth, ranks = log_q.shape
    candidates = torch.arange(batch * depth * ranks).view(batch, depth, ranks) * 7 + 1
    for index, row in enumerate(rows):
        scores[index, ..., row.ranks :] = MINUS
    wanted = by_host(log_q, scores, candidates, rows, width, chained)
    state = RoundState.allocate(batch, width + 3, depth, device)
    for name in ("tokens", "parents", "depths", "ancestors"):
        getattr(state, name).fill_(-77)
    state.tokens[:, 0] = wanted.tokens[:, 0] = 5
    lines = lines_of(log_q.to(device), scores.to(device))
    lines.edges[:, 0, 1:] = float("nan")  # nobody reads these
    build(log_q.to(device), candidates.to(device), plan_of(rows, width, device), state, width, lines, chained)
    words = -(-width // 64)
    for name in ("tokens", "parents", "depths", "member", "tree"):
        assert torch.equal(getattr(state, name)[:, :width].cpu(), getattr(wanted, name)), name
    assert torch.equal(state.ancestors[:, :width, :words].cpu(), wanted.ancestors)
    assert (state.parents[:, width:] == -77).all()
    return state


def draw(batch: int, depth: int, ranks: int, seed: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """log_q, best first, and pair scores in any order; with ties, of a few values only; with holes, some missing."""
    generator = torch.Generator().manual_seed(seed)
    log_q = -torch.rand(batch, depth, ranks, generator=generator) * 4
    scores = -torch.rand(batch, depth - 1, ranks, ranks, generator=generator) * 4
    if kind != "spread":
        log_q, scores = log_q.round() / 2, scores.round() / 2
    log_q = log_q.sort(-1, descending=True).values
    if kind == "holes":
        missing = torch.rand(scores.shape, generator=generator)
        scores[missing < 0.4] = MINUS
        scores[missing < 0.1] = float("nan")
    return log_q, scores


@pytest.mark.parametrize("kind", ["spread", "ties", "holes"])
@pytest.mark.parametrize(
    ("depth", "ranks", "budget", "spine", "width"),
    [(9, 16, 15, 0, 16), (15, 16, 63, 0, 64), (5, 3, 20, 2, 25), (1, 4, 9, 3, 10), (4, 32, 33, 4, 50), (6, 1, 9, 0, 9)],
)
def test_tree(depth: int, ranks: int, budget: int, spine: int, width: int, kind: str, device: torch.device) -> None:
    row = PlanRow(tree=True, budget=min(budget, width - 1), spine=spine, ranks=ranks, depth=depth)
    check(*draw(2, depth, ranks, budget, kind), [row] * 2, width, device)


@pytest.mark.parametrize("seed", range(8))
def test_every_mode_in_one_batch(seed: int, device: torch.device) -> None:
    full = PlanRow(tree=True, chain=True, budget=15, spine=0, ranks=8, depth=9)
    rows = [
        PlanRow(),
        PlanRow(chain=True, ranks=8, depth=9),
        PlanRow(tree=True, budget=15, ranks=8, depth=9),
        full,
        PlanRow(tree=True, chain=True, budget=5, spine=3, ranks=2, depth=7),
        PlanRow(tree=True, chain=True, budget=1, ranks=1, depth=9),
        PlanRow(chain=True, ranks=3, depth=4),
    ]
    state = check(*draw(7, 9, 8, seed, ("spread", "ties", "holes")[seed % 3]), rows, full.rows, device)
    assert state.member[3].sum() == 10


@pytest.mark.parametrize("seed", range(3))
def test_a_chain_that_goes_by_the_marginals_beside_trees_that_do_not(seed: int, device: torch.device) -> None:
    full = PlanRow(tree=True, chain=True, budget=15, ranks=8, depth=9)
    rows = [full, PlanRow(chain=True, ranks=8, depth=9), PlanRow(tree=True, budget=24, ranks=8, depth=9)]
    log_q, scores = draw(3, 9, 8, seed, "spread")
    own = check(log_q, scores, rows, full.rows, device, chained=False)
    assert not torch.equal(own.tokens, check(log_q, scores, rows, full.rows, device).tokens)
    candidates = torch.arange(3 * 9 * 8, device=device).view(3, 9, 8) * 7 + 1
    assert torch.equal(own.tokens[1, 1:10], candidates[1, :, 0])


@pytest.mark.parametrize("value", [-0.0, 0.0, -0.5])
def test_all_equal_scores(value: float, device: torch.device) -> None:
    """Order by depth and path alone."""
    log_q, scores = torch.full((1, 6, 4), value), torch.full((1, 5, 4, 4), value)
    scores[..., 1] *= -1 if value == 0 else 1
    row = PlanRow(tree=True, chain=True, budget=40, spine=2, ranks=4, depth=6)
    check(log_q, scores, [row], row.rows, device)


def test_sums_that_overflow(device: torch.device) -> None:
    log_q, scores = draw(1, 6, 3, 9, "spread")
    scores[0, :, :, 1:] = torch.finfo(torch.float32).min
    row = PlanRow(tree=True, budget=20, ranks=3, depth=6)
    check(log_q, scores, [row], 21, device)


def test_more_than_one_word(device: torch.device) -> None:
    log_q, scores = draw(1, 40, 8, 3, "ties")
    scores -= 2.0
    log_q[..., 0] = scores[..., 5] = -0.03125
    row = PlanRow(tree=True, budget=150, ranks=8, depth=40)
    state = check(log_q, scores, [row], 256, device)
    assert state.depths.max() > 30


def test_scores_that_say_what_the_marginals_say_change_nothing(device: torch.device) -> None:
    log_q, _ = draw(1, 7, 6, 2, "ties")
    row = PlanRow(tree=True, chain=True, budget=30, spine=1, ranks=6, depth=7)
    same = check(log_q, log_q[:, 1:].unsqueeze(2).repeat(1, 1, 6, 1), [row], row.rows, device)
    plain = RoundState.allocate(1, row.rows, 7, device)
    candidates = torch.arange(42, device=device).view(1, 7, 6) * 7 + 1
    build(log_q.to(device), candidates, plan_of([row], row.rows, device), plain, row.rows)
    assert torch.equal(plain.parents, same.parents[:, : row.rows])
    assert torch.equal(plain.tokens[:, 1:], same.tokens[:, 1 : row.rows])
