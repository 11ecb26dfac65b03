"""The launches that turn a round into what SGLang's caches, masks and grammars read, against plain Python."""

from itertools import pairwise

import pytest
import torch

from ddtree import kernels
from ddtree.kernels import Plan, PlanRow
from ddtree.sglang import rows as lay
from ddtree.tree import RoundState, unpack

LENGTHS = [3, 140, 0]
BLOCK, MASK_TOKEN = 8, 9


def grown(plans: list[PlanRow], width: int, device: torch.device) -> RoundState:
    """Rows of a seeded proposal."""
    generator = torch.Generator().manual_seed(width)
    log_q = (-torch.rand(len(plans), BLOCK - 1, 4, generator=generator) * 3).sort(-1, descending=True).values
    tokens = torch.arange(log_q.numel()).view(log_q.shape) + 100
    state = RoundState.allocate(len(plans), width, BLOCK - 1, device)
    plan = Plan.allocate(len(plans), device)
    plan.write(plans, width)
    kernels.build(log_q.to(device), tokens.to(device), plan, state, width)
    return state


@pytest.mark.parametrize("width", [8, 33])
def test_stage(width: int, device: torch.device) -> None:
    table = torch.randperm(4 * 300).view(4, 300).to(torch.int32)
    lengths, pool, bonus = torch.tensor(LENGTHS), torch.tensor([2, 0, 3]), torch.tensor([71, 72, 73])
    state = RoundState.allocate(5, width, BLOCK - 1, device)
    whole, commits = lay.Block.allocate(5, BLOCK, width, device), torch.zeros(1, dtype=torch.int64, device=device)
    found = whole.first(3)
    given = [x.to(device) for x in (bonus, lengths, pool, table)]
    lay.stage(*given, state, found, MASK_TOKEN, commits, 2)
    for b, length in enumerate(LENGTHS):
        slots = table[pool[b], length:].long()
        assert found.ids[b].tolist() == [71 + b] + [MASK_TOKEN] * (BLOCK - 1)
        assert found.positions[b].tolist() == list(range(length, length + BLOCK))
        assert torch.equal(found.slots[b].cpu(), slots[:BLOCK])
        assert torch.equal(found.row_slots[b].cpu(), slots[:width])
    assert found.lengths.tolist() == LENGTHS
    assert state.tokens[:, 0].tolist() == [71, 72, 73, 0, 0]
    assert commits.tolist() == [2]
    assert not any(part[3:].any() for part in vars(whole).values())


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize(("budget", "width"), [(15, 16), (20, 40), (70, 80)])
def test_lay(budget: int, width: int, prefix: bool, device: torch.device) -> None:
    full = PlanRow(tree=True, budget=budget, ranks=4, depth=BLOCK - 1)
    small = PlanRow(tree=True, chain=True, budget=3, ranks=4, depth=BLOCK - 1)
    state = grown([full, small, PlanRow()], width, device)
    lengths = torch.tensor(LENGTHS, device=device)
    mask = torch.full((sum(width * (n + width) for n in LENGTHS) + 5,), 7, dtype=torch.uint8, device=device)
    links = lay.Links.allocate(5, width, device).first(3)
    lay.lay(state.rows, lengths, mask, links, prefix=prefix)

    seen, start = unpack(state.rows.ancestors, width).cpu(), 0
    for b, length in enumerate(LENGTHS):
        lines = mask[start : start + width * (length + width)].view(width, length + width).cpu()
        start += lines.numel()
        assert torch.equal(lines[:, length:].bool(), seen[b])
        assert (lines[:, :length] == (1 if prefix else 7)).all()
        assert torch.equal(links.positions[b].cpu(), state.depths[b].cpu() + length)
        parents = state.parents[b].tolist()
        parents = [-1, *(max(parent, 0) for parent in parents[1:])]  # padding hangs at the root
        followed: dict[int, list[int]] = {}
        for row in range(width):
            child = int(links.first_child[b, row])
            while child >= 0:
                followed.setdefault(row, []).append(child)
                child = int(links.next_sibling[b, child])
        wanted = {row: [i for i, parent in enumerate(parents) if parent == row] for row in range(width)}
        assert followed == {row: children for row, children in wanted.items() if children}
    assert (mask[start:] == 7).all()


def accepted_paths(width: int, device: torch.device) -> tuple[RoundState, torch.Tensor, list[list[int]]]:
    """Rows of three requests, the target's own tokens, and what they accept: a deep path, and twice the root alone."""
    plans = [PlanRow(tree=True, budget=15, ranks=4, depth=BLOCK - 1)] * 3
    state = grown(plans, width, device)
    own = torch.full((3, width), 5, dtype=torch.int64, device=device)
    path = [int(state.depths[0].argmax())]
    while path[0]:
        path.insert(0, int(state.parents[0, path[0]]))
    for above, row in pairwise(path):
        own[0, above] = state.tokens[0, row]
    assert len(path) > 2
    return state, own, [path, [0], [0]]


@pytest.mark.parametrize("running", [None, 3, 2, 0])
def test_commit(running: int | None, device: torch.device) -> None:
    """running: how many of the requests a graph may commit; None: it is no graph's."""
    width = 16
    state, own, paths = accepted_paths(width, device)
    lengths = torch.tensor(LENGTHS, device=device)
    accepted = kernels.accept(state.rows, own, BLOCK - 1)
    row_slots = torch.arange(3 * width, device=device).view(3, width) + 2000
    kept = lay.Kept.allocate(3, BLOCK, device)
    commits = None if running is None else torch.tensor([running], device=device)
    lay.commit(accepted, lengths, row_slots, kept, commits=commits)

    for b, path in enumerate(paths):
        rows = path if running is None or b < running else []
        n = len(rows)
        assert kept.counts[b] == kept.tree_counts[b] == n
        assert kept.lengths[b] == LENGTHS[b] + n
        assert kept.bonus[b] == (5 if n else 0)
        tokens = kept.tokens.view(3, BLOCK)[b]
        assert tokens.tolist() == [int(own[b, row]) for row in rows] + [0] * (BLOCK - n)
        assert kept.from_slots[b].tolist() == [int(row_slots[b, row]) for row in rows] + [0] * (BLOCK - n)
        assert kept.to_slots[b].tolist() == row_slots[b, :n].tolist() + [0] * (BLOCK - n)
        assert kept.features[b].tolist() == [b * width + row for row in rows] + [b * width] * (BLOCK - n)
        assert kept.index[b].tolist() == [b * width + row for row in rows] + [-1] * (BLOCK - n)


def test_commit_tells_what_a_shadowed_tree_would_have_kept(device: torch.device) -> None:
    state, own, _ = accepted_paths(16, device)
    lengths = torch.tensor(LENGTHS, device=device)
    accepted = kernels.accept(state.rows, own, BLOCK - 1)
    kept = lay.Kept.allocate(3, BLOCK, device)
    tree = torch.tensor([6, 4, 3], device=device), torch.tensor([True, True, False], device=device)
    lay.commit(accepted, lengths, torch.zeros(3, 16, dtype=torch.int64, device=device), kept, tree)
    assert kept.tree_counts.tolist() == [7, 5, 1]
    assert kept.counts.tolist() == [int(accepted.count[0]) + 1, 1, 1]


@pytest.mark.parametrize("size", [5, 3])
def test_what_is_taken_stays_when_the_next_round_writes(size: int, device: torch.device) -> None:
    whole = lay.Kept.allocate(5, BLOCK, device)
    for at, part in enumerate((whole.tokens, whole.lengths, whole.bonus, whole.counts, whole.tree_counts)):
        part.copy_(torch.arange(part.numel()) + 100 * at)
    mine = whole.taken(size)
    whole.report.fill_(-1)
    assert mine.tokens.tolist() == list(range(size * BLOCK))
    for at, part in enumerate((mine.lengths, mine.bonus, mine.counts, mine.tree_counts)):
        assert part.tolist() == [100 * (at + 1) + i for i in range(size)]
    assert mine.counts.dtype == mine.tree_counts.dtype == torch.int32
    assert mine.to_slots.shape == mine.index.shape == (size, BLOCK)
    assert mine.to_slots.data_ptr() == whole.to_slots.data_ptr()
