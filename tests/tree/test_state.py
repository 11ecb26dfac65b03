"""Laying rows into a RoundState: ancestor bits, padding, and nothing left over from the round before."""

import random
from collections.abc import Sequence
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddtree.tree import DraftTree, Nodes, RoundState, best_first, chain, unpack

MOST = 300


def random_nodes(rows: int, rng: random.Random, deep: bool = False) -> Nodes:
    """A tree of `rows` rows. Siblings have ranks of their own; `deep` grows mostly at the newest row."""
    nodes = Nodes.root()
    children = [0]
    while len(nodes) < rows:
        parent = len(nodes) - 1 if deep and rng.random() < 0.9 else rng.randrange(len(nodes))
        nodes.add(parent, children[parent])
        children[parent] += 1
        children.append(0)
    return nodes


def candidates(nodes: Nodes) -> list[list[int]]:
    """[D][K] token ids, all different."""
    depths, ranks = max(nodes.depths), max(nodes.ranks) + 1
    return [[1000 * (d + 1) + r for r in range(ranks)] for d in range(depths)]


def laid(batch: Sequence[Nodes], rows: int = MOST) -> RoundState:
    state = RoundState.allocate(len(batch), rows, rows)
    state.tokens[:, 0] = torch.arange(len(batch)) + 7
    state.lay(batch, [candidates(nodes) for nodes in batch])
    return state


def naive_ancestors(nodes: Nodes, width: int) -> list[list[bool]]:
    mask = [[False] * width for _ in range(width)]
    for row in range(width):
        mask[row][row] = True
        at = row
        while row < len(nodes) and (at := nodes.parents[at]) >= 0:
            mask[row][at] = True
    return mask


def check(state: RoundState, batch: Sequence[Nodes]) -> None:
    rows, width = state.rows, max(map(len, batch))
    assert state.width == width
    assert rows.tokens.shape == rows.parents.shape == rows.depths.shape == (len(batch), width)
    assert rows.ancestors.shape == (len(batch), width, -(-width // 64))
    assert all(t.dtype == torch.int64 for t in (rows.tokens, rows.parents, rows.depths, rows.ancestors))
    visible = unpack(rows.ancestors, width)
    assert (visible.dtype, visible.shape) == (torch.bool, (len(batch), width, width))
    for index, nodes in enumerate(batch):
        pad, ids = width - len(nodes), candidates(nodes)
        tokens = [ids[d - 1][r] for d, r in zip(nodes.depths[1:], nodes.ranks[1:], strict=True)]
        assert rows.tokens[index].tolist() == [index + 7, *tokens, *[0] * pad]
        assert rows.parents[index].tolist() == nodes.parents + [-1] * pad
        assert rows.depths[index].tolist() == nodes.depths + [0] * pad
        assert visible[index].tolist() == naive_ancestors(nodes, width)
    # No bit stands behind the last row.
    assert not bool(unpack(rows.ancestors, 64 * rows.ancestors.shape[-1])[..., width:].any())


@pytest.mark.parametrize("rows", [1, 2, 16, 63, 64, 65, 127, 128, 129, 193, MOST])
@pytest.mark.parametrize("deep", [False, True])
def test_rows_and_ancestor_bits(rows: int, deep: bool) -> None:
    rng = random.Random(rows)
    batch = [random_nodes(rows, rng, deep), random_nodes(rng.randint(1, rows), rng, deep), Nodes.root()]
    check(laid(batch), batch)


@pytest.mark.parametrize("depth", [63, 64, 150])
def test_a_long_chain_sees_all_before_it(depth: int) -> None:
    state = laid([chain(depth)])
    assert torch.equal(unpack(state.rows.ancestors, depth + 1)[0], torch.ones(depth + 1, depth + 1).tril().bool())


@given(st.lists(st.integers(1, 150), min_size=1, max_size=4), st.integers(0, 2**32), st.booleans())
@settings(deadline=None, max_examples=50)
def test_rows_of_any_batch(sizes: list[int], seed: int, deep: bool) -> None:
    rng = random.Random(seed)
    batch = [random_nodes(size, rng, deep) for size in sizes]
    check(laid(batch), batch)


def test_padding_sees_itself_alone() -> None:
    state = laid([chain(1), random_nodes(130, random.Random(1))])
    padding = unpack(state.rows.ancestors, 130)[0, 2:]
    assert torch.equal(padding, torch.eye(130).bool()[2:])
    assert state.rows.parents[0, 2:].eq(-1).all()
    assert state.rows.depths[0, 2:].eq(0).all()


def views(state: RoundState) -> list[Tensor]:
    return [getattr(state.rows, field.name).clone() for field in fields(state.rows)]


@given(st.lists(st.integers(1, 70), min_size=2, max_size=3), st.integers(0, 2**32))
@settings(deadline=None, max_examples=50)
def test_a_smaller_round_shows_nothing_of_a_larger_one(sizes: list[int], seed: int) -> None:
    rng = random.Random(seed)
    small = [random_nodes(size, rng) for size in sizes]
    state = laid([random_nodes(rng.randint(71, 200), rng, True) for _ in sizes])
    for poisoned in (state.tokens[:, 1:], state.parents, state.depths, state.ancestors):
        poisoned.fill_(rng.choice([-1, -2, 2**63 - 1, 12345]))
    state.lay(small, [candidates(nodes) for nodes in small])
    for got, fresh in zip(views(state), views(laid(small)), strict=True):
        assert torch.equal(got, fresh)


def test_a_round_of_roots_after_a_tree() -> None:
    state = laid([random_nodes(100, random.Random(2)), random_nodes(80, random.Random(3))])
    state.lay([Nodes.root(), Nodes.root()], [[], []])
    assert state.rows.tokens.tolist() == [[7], [8]]
    assert state.rows.parents.tolist() == [[-1], [-1]]
    assert state.rows.depths.tolist() == [[0], [0]]
    assert unpack(state.rows.ancestors, 1).tolist() == [[[True]], [[True]]]


def test_only_roots_and_trees_with_the_right_batch_are_laid() -> None:
    state = RoundState.allocate(2, 4, 4)
    with pytest.raises(ValueError, match="argument"):
        state.lay([Nodes.root(), Nodes.root()], [[]])


def test_allocate_has_the_documented_shapes_and_values() -> None:
    state = RoundState.allocate(3, 65, 4)
    assert state.tokens.shape == state.parents.shape == state.depths.shape == state.member.shape == (3, 65)
    assert state.ancestors.shape == (3, 65, 2)
    assert state.path.shape == state.committed.shape == (3, 5)
    assert state.position.shape == state.remaining.shape == state.n_accepted.shape == state.n_committed.shape == (3,)
    assert state.tree.dtype == state.member.dtype == state.done.dtype == torch.bool
    assert state.path.eq(-1).all()
    assert state.committed.eq(-1).all()
    assert not state.done.any()
    assert state.width == 1


def test_draft_tree_is_one_sequence_without_padding() -> None:
    small, large = best_first([[-0.5, -1.0], [-0.25, -3.0]], 4), random_nodes(40, random.Random(4))
    state = laid([small, large])
    tree = state.draft_tree(0)
    assert tree == DraftTree((7, 1000, 2000, 1001, 2000), (-1, 0, 1, 0, 3), (0, 1, 2, 1, 2))
    assert tree.paths() == [(), (1000,), (1000, 2000), (1001,), (1001, 2000)]
    other = state.draft_tree(1)
    assert (list(other.parents), list(other.depths)) == (large.parents, large.depths)
    assert [len(path) for path in other.paths()] == large.depths
    assert all(path[-1] == token for path, token in zip(other.paths()[1:], other.tokens[1:], strict=True))


def test_draft_tree_is_a_copy() -> None:
    state = laid([chain(3)])
    tree = state.draft_tree(0)
    state.lay([chain(1)], [[[5], [6]]])
    assert tree.tokens == (7, 1000, 2000, 3000)
    assert state.draft_tree(0) == DraftTree((7, 5), (-1, 0), (0, 1))
