"""accept against a walk down the tree, and cut against a loop."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddtree.tree import Accepted, Nodes, RoundState, Rows, accept, best_first, chain, cut, union

TOKENS = 3  # small, so that answers often match
quick = settings(deadline=None)


def random_nodes(rows: int, rng: random.Random) -> Nodes:
    """At most `rows` rows; at most TOKENS children a row, mostly growing deep."""
    nodes, children = Nodes.root(), [0]
    for _ in range(rows - 1):
        parent = len(nodes) - 1 if rng.random() < 0.6 else rng.randrange(len(nodes))
        if children[parent] < TOKENS:
            nodes.add(parent, children[parent])
            children[parent] += 1
            children.append(0)
    return nodes


def lay(batch: list[Nodes], rng: random.Random) -> tuple[Rows, int]:
    """Rows whose candidates are a shuffle of the vocabulary at every depth, and D."""
    depth, width = max(max(nodes.depths) for nodes in batch) + rng.randrange(3), max(map(len, batch))
    state = RoundState.allocate(len(batch), width + 3, depth)
    state.tokens.random_(TOKENS, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
    state.lay(batch, [[rng.sample(range(TOKENS), TOKENS) for _ in range(depth)] for _ in batch])
    return state.rows, depth


def walk(rows: Rows, own: Tensor, index: int, member: Tensor | None) -> tuple[list[int], list[int]]:
    """Path and tokens of one sequence, by following the answers from the root."""
    path, tokens = [0], [int(own[index, 0])]
    while True:
        found = [
            row
            for row in range(rows.tokens.shape[1])
            if int(rows.parents[index, row]) == path[-1]
            and int(rows.tokens[index, row]) == tokens[-1]
            and (member is None or bool(member[index, row]))
        ]
        if not found:
            return path, tokens
        (row,) = found
        path.append(row)
        tokens.append(int(own[index, row]))


def check(got: Accepted, rows: Rows, own: Tensor, depth: int, member: Tensor | None = None) -> None:
    batch = rows.tokens.shape[0]
    assert got.path.shape == got.tokens.shape == (batch, depth + 1)
    assert got.count.shape == (batch,)
    for index in range(batch):
        path, tokens = walk(rows, own, index, member)
        behind = [-1] * (depth + 1 - len(path))
        assert got.path[index].tolist() == path + behind
        assert got.tokens[index].tolist() == tokens + behind
        assert int(got.count[index]) == len(path) - 1


def answers(rows: Rows, rng: random.Random) -> Tensor:
    return torch.tensor([[rng.randrange(TOKENS) for _ in range(rows.tokens.shape[1])] for _ in rows.tokens])


@quick
@given(st.lists(st.integers(1, 140), min_size=1, max_size=4), st.integers(0, 2**32))
def test_accept_is_a_walk_down_the_tree(sizes: list[int], seed: int) -> None:
    rng = random.Random(seed)
    rows, depth = lay([random_nodes(size, rng) for size in sizes], rng)
    own = answers(rows, rng)
    check(accept(rows, own, depth), rows, own, depth)


@quick
@given(st.integers(0, 2**32))
def test_accept_within_a_closed_set_of_rows(seed: int) -> None:
    rng = random.Random(seed)
    batch = [random_nodes(rng.randint(1, 80), rng) for _ in range(3)]
    rows, depth = lay(batch, rng)
    own, member = answers(rows, rng), torch.zeros_like(rows.tokens, dtype=torch.bool)
    for index, nodes in enumerate(batch):
        for row in range(len(nodes)):
            above = row == 0 or bool(member[index, nodes.parents[row]])
            member[index, row] = above and rng.random() < 0.8
        member[index, 0] = True
    check(accept(rows, own, depth, member), rows, own, depth, member)


@quick
@given(st.integers(0, 2**32), st.integers(1, 12))
def test_chain_and_tree_within_their_union(seed: int, budget: int) -> None:
    """Accepting the members of a union gives what the chain and the tree give when they are verified alone."""
    rng = random.Random(seed)
    log_q = [sorted((-rng.random() * 2 for _ in range(TOKENS)), reverse=True) for _ in range(5)]
    tree = best_first(log_q, budget)
    both, chain_rows = union(tree, chain(5))
    state, ids = RoundState.allocate(1, len(both), 5), [rng.sample(range(TOKENS), TOKENS) for _ in range(5)]
    state.lay([both], [ids])
    own = answers(state.rows, rng)
    members = torch.zeros(2, 1, len(both), dtype=torch.bool)
    members[0, 0, chain_rows] = True
    members[1, 0, : len(tree)] = True
    for member, nodes, where in ((members[0], chain(5), chain_rows), (members[1], tree, list(range(len(tree))))):
        got = accept(state.rows, own, 5, member)
        check(got, state.rows, own, 5, member)
        alone = RoundState.allocate(1, len(nodes), 5)
        alone.lay([nodes], [ids])
        expected = accept(alone.rows, own[:, where], 5)
        assert got.tokens.tolist() == expected.tokens.tolist()
        assert got.count.tolist() == expected.count.tolist()


def test_accepts_the_whole_chain_and_none_of_it() -> None:
    state = RoundState.allocate(2, 4, 3)
    state.lay([chain(3), chain(3)], [[[5], [6], [7]]] * 2)
    got = accept(state.rows, torch.tensor([[5, 6, 7, 8], [4, 6, 7, 8]]), 3)
    assert got.path.tolist() == [[0, 1, 2, 3], [0, -1, -1, -1]]
    assert got.count.tolist() == [3, 0]
    assert got.tokens.tolist() == [[5, 6, 7, 8], [4, -1, -1, -1]]


def test_a_root_alone_gives_its_own_token() -> None:
    state = RoundState.allocate(1, 1, 0)
    state.lay([Nodes.root()], [[]])
    got = accept(state.rows, torch.tensor([[9]]), 0)
    assert (got.path.tolist(), got.count.tolist(), got.tokens.tolist()) == ([[0]], [0], [[9]])


def test_padding_is_never_accepted() -> None:
    """Padding has token 0 and no parent; a root that answers 0 must not take it for a child."""
    state = RoundState.allocate(2, 6, 2)
    state.lay([Nodes.root(), best_first([[-0.1, -0.2], [-0.1, -0.2]], 5)], [[], [[0, 1], [0, 1]]])
    got = accept(state.rows, torch.zeros(2, 6, dtype=torch.int64), 2)
    assert got.count.tolist() == [0, 2]
    assert got.path[0].tolist() == [0, -1, -1]
    assert got.tokens[0].tolist() == [0, -1, -1]


def naive_cut(tokens: list[int], count: int, remaining: int, ends: list[int]) -> tuple[int, bool]:
    kept = 0
    for token in tokens[:count]:
        if kept == remaining:
            break
        kept += 1
        if token in ends:
            return kept, True
    return kept, False


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[int], list[list[int]]]:
    batch, most, end_count = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(0, 3))

    def column(element: st.SearchStrategy[int], size: int) -> list[int]:
        return draw(st.lists(element, min_size=size, max_size=size))

    counts = column(st.integers(0, most), batch)
    tokens = [[*column(st.integers(0, 5), count), *[-1] * (most - count)] for count in counts]
    ends = [column(st.sampled_from([-2, 0, 1, 2, 9]), end_count) for _ in range(batch)]
    return tokens, counts, column(st.integers(0, 8), batch), ends


@quick
@given(rounds())
def test_cut_is_a_loop_over_the_tokens(case: tuple[list[list[int]], list[int], list[int], list[list[int]]]) -> None:
    tokens, counts, remaining, ends = case
    ids = torch.tensor(ends, dtype=torch.int64).reshape(len(tokens), -1)
    kept, ended = cut(torch.tensor(tokens), torch.tensor(counts), torch.tensor(remaining), ids)
    expected = [naive_cut(*row) for row in zip(tokens, counts, remaining, ends, strict=True)]
    assert list(zip(kept.tolist(), ended.tolist(), strict=True)) == expected


@pytest.mark.parametrize(
    ("tokens", "count", "remaining", "ends", "expected"),
    [
        ([4, 5, 6], 3, 9, [2], (3, False)),
        ([4, 2, 6], 3, 9, [2], (2, True)),  # the end token is kept, what follows is not
        ([4, 2, 2], 3, 9, [2], (2, True)),
        ([4, 5, 2], 3, 9, [7, 2], (3, True)),
        ([4, 5, 2], 3, 2, [2], (2, False)),  # the end lies behind the length limit
        ([4, 2, 6], 3, 2, [2], (2, True)),
        ([2, -1, -1], 1, 0, [2], (0, False)),
        ([4, -1, -1], 1, 9, [-2, -2], (1, False)),  # -2 is no token, and neither is the padding
    ],
)
def test_cut(tokens: list[int], count: int, remaining: int, ends: list[int], expected: tuple[int, bool]) -> None:
    kept, ended = cut(torch.tensor([tokens]), torch.tensor([count]), torch.tensor([remaining]), torch.tensor([ends]))
    assert (int(kept), bool(ended)) == expected
