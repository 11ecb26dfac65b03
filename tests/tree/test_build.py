"""best_first, chain and union against brute force over every prefix."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddtree.tree import Nodes, RoundState, accept, best_first, chain, union

Path = tuple[int, ...]
LogQ = list[list[float]]
MISSING = (float("-inf"), float("nan"))
quick = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def paths(nodes: Nodes) -> list[Path]:
    """Every row's path of ranks, the root's first; parents are looked up, so they must come first."""
    found: list[Path] = [()]
    for row in range(1, len(nodes)):
        assert 0 <= nodes.parents[row] < row
        found.append((*found[nodes.parents[row]], nodes.ranks[row]))
        assert nodes.depths[row] == len(found[row])
    return found


def spine_of(nodes: Nodes) -> list[int]:
    """Rows of the top-1 chain that are here, the root first."""
    rows = [0]
    for row in range(1, len(nodes)):
        if nodes.parents[row] == rows[-1] and nodes.ranks[row] == 0:
            rows.append(row)
    return rows


def score(log_q: LogQ, path: Path) -> np.float32:
    """float32 additions from left to right."""
    total = np.float32(0.0)
    for scores, rank in zip(log_q, path, strict=False):
        total = total + np.float32(scores[rank])
    return total


def key(log_q: LogQ, path: Path) -> tuple[float, int, Path]:
    return -float(score(log_q, path)), len(path), path


def brute_force(log_q: LogQ, budget: int, spine: int = 0) -> list[Path]:
    """All prefixes in order, the spine before the rest; cut to the budget."""
    every = [p for d in range(1, len(log_q) + 1) for p in product(*(range(len(scores)) for scores in log_q[:d]))]
    usable = [p for p in every if score(log_q, p) > -np.inf]
    first = [(0,) * d for d in range(1, spine + 1) if (0,) * d in set(usable)]
    rest = sorted((p for p in usable if p not in set(first)), key=lambda p: key(log_q, p))
    return (first + rest)[:budget]


def by_depth(log_q: LogQ, budget: int) -> list[Path]:
    """The same tree by the fixed-shape algorithm: the budget's best of every depth, then the best of them all."""
    kept: list[tuple[float, Path]] = [(0.0, ())]
    every: list[tuple[float, int, Path]] = []
    for depth, scores in enumerate(log_q, start=1):
        grown = [
            (-float(np.float32(-cost) + np.float32(value)), (*path, rank))
            for cost, path in kept
            for rank, value in enumerate(scores)
        ]
        kept = sorted(grown)[:budget]
        every += [(cost, depth, path) for cost, path in kept]
    return [path for _, _, path in sorted(every)[:budget]]


def descending(values: list[float]) -> list[float]:
    """As float32, best first, with what is missing (-inf, NaN) at the end."""
    present = sorted((float(np.float32(v)) for v in values if v > -np.inf), reverse=True)
    return present + [v for v in values if not v > -np.inf]


def scores(element: st.SearchStrategy[float], ranks: int) -> st.SearchStrategy[list[float]]:
    return st.lists(element, min_size=ranks, max_size=ranks).map(descending)


@st.composite
def log_qs(draw: st.DrawFn, element: st.SearchStrategy[float], most: int = 400) -> LogQ:
    """[D][K] with at most `most` prefixes."""
    shapes = [(d, k) for d in range(1, 7) for k in range(1, 12) if sum(k**i for i in range(1, d + 1)) <= most]
    depth, ranks = draw(st.sampled_from(shapes))
    return draw(st.lists(scores(element, ranks), min_size=depth, max_size=depth))


spread = st.floats(min_value=-20.0, max_value=0.0, width=32)
tied = st.sampled_from([0.0, -0.0, -0.5, -1.0, -1.5])
near = st.sampled_from([-0.1, -0.2, -0.3, -1e-8, -0.1000001, -1e-9])  # whose sums round to each other
holed = st.one_of(tied, st.sampled_from(MISSING), spread)
budgets = st.one_of(st.integers(1, 30), st.integers(1, 1024))


@quick
@given(log_qs(st.one_of(spread, tied, near)), budgets)
def test_best_first_is_brute_force_in_order(log_q: LogQ, budget: int) -> None:
    assert paths(best_first(log_q, budget))[1:] == brute_force(log_q, budget)


@quick
@given(log_qs(tied), budgets)
def test_ties_are_broken_by_depth_then_ranks(log_q: LogQ, budget: int) -> None:
    first = best_first(log_q, budget)
    assert paths(first)[1:] == brute_force(log_q, budget)
    assert best_first(log_q, budget) == first


@quick
@given(log_qs(holed), budgets, st.integers(0, 7))
def test_missing_ranks_are_skipped(log_q: LogQ, budget: int, spine: int) -> None:
    built = paths(best_first(log_q, budget, spine))[1:]
    assert built == brute_force(log_q, budget, spine)
    assert all(np.isfinite(log_q[depth][rank]) for path in built for depth, rank in enumerate(path))


@pytest.mark.parametrize("missing", MISSING)
def test_nothing_but_missing_ranks_is_the_root_alone(missing: float) -> None:
    assert best_first([[missing] * 3] * 4, 15).parents == [-1]
    assert best_first([[missing] * 3] * 4, 15, spine=4).parents == [-1]
    assert best_first([], 15).parents == [-1]
    assert paths(best_first([[-0.1, missing], [missing, missing], [-0.1, -0.2]], 15)) == [(), (0,)]


def test_a_score_below_the_smallest_float_is_missing() -> None:
    """A drafter may mask tokens with the smallest float: two of them on one path add up to -inf, without a warning."""
    lowest = float(np.finfo(np.float32).min)
    built = paths(best_first([[-0.5, lowest], [-0.5, lowest]], 15))[1:]
    assert built == [(0,), (0, 0), (1,), (0, 1), (1, 0)]


@quick
@given(log_qs(st.one_of(spread, tied)), budgets)
def test_the_budget_is_used_up_unless_prefixes_run_out(log_q: LogQ, budget: int) -> None:
    depth, ranks = len(log_q), len(log_q[0])
    nodes = best_first(log_q, budget)
    assert len(nodes) - 1 == min(budget, sum(ranks**d for d in range(1, depth + 1)))
    assert len(set(paths(nodes))) == len(nodes)
    assert (nodes.parents[0], nodes.depths[0], nodes.ranks[0]) == (-1, 0, 0)


@pytest.mark.parametrize(
    ("depth", "ranks", "budget"),
    [(15, 8, 15), (15, 8, 1024), (15, 1, 1024), (7, 64, 100), (1, 1024, 1024), (3, 100, 333), (15, 2, 511), (4, 15, 1)],
)
@pytest.mark.parametrize("step", [0.0, 0.25])
def test_large_trees_equal_the_fixed_shape_algorithm(depth: int, ranks: int, budget: int, step: float) -> None:
    rng = np.random.default_rng(depth * ranks + budget)
    raw = -rng.exponential(2.0, (depth, ranks)).astype(np.float32)
    if step:
        raw = np.round(raw / step) * step + np.float32(0.0)  # many ties
    log_q = [descending(row) for row in raw.tolist()]
    assert paths(best_first(log_q, budget))[1:] == by_depth(log_q, budget)


@quick
@given(log_qs(st.one_of(spread, tied)), budgets, st.integers(0, 9))
def test_the_spine_comes_first_and_the_rest_stays_best_first(log_q: LogQ, budget: int, spine: int) -> None:
    nodes = best_first(log_q, budget, spine)
    built = paths(nodes)[1:]
    placed = min(spine, budget, len(log_q))
    assert built[:placed] == [(0,) * d for d in range(1, placed + 1)]
    assert built == brute_force(log_q, budget, spine)
    assert len(spine_of(nodes)) > placed


@quick
@given(log_qs(spread), budgets)
def test_expected_acceptance_is_at_least_the_chains(log_q: LogQ, budget: int) -> None:
    def expected(nodes: Nodes) -> float:
        return float(sum(np.exp(np.float64(score(log_q, path))) for path in paths(nodes)[1:]))

    assert expected(best_first(log_q, budget)) >= expected(chain(min(budget, len(log_q)))) * (1 - 1e-5)


def accepted(nodes: Nodes, ranks: int, answers: dict[Path, int], depth: int) -> int:
    """How many nodes are kept when the target answers a path with the token answers[path] (absent: no candidate)."""
    state = RoundState.allocate(1, len(nodes), depth)
    state.lay([nodes], [[list(range(ranks))] * depth])  # a token is its rank
    own = torch.tensor([[answers.get(path, ranks) for path in paths(nodes)]])
    return int(accept(state.rows, own, depth).count[0])


@quick
@given(log_qs(st.one_of(spread, tied)), st.integers(0, 20), st.data())
def test_a_full_spine_never_accepts_less_than_the_chain(log_q: LogQ, more: int, data: st.DataObject) -> None:
    depth, ranks = len(log_q), len(log_q[0])
    tree = best_first(log_q, depth + more, spine=depth)
    token = st.one_of(st.just(0), st.integers(0, ranks))
    answers = {path: data.draw(token) for path in paths(tree)}
    chain_accepts = accepted(chain(depth), ranks, answers, depth)
    assert accepted(tree, ranks, answers, depth) >= chain_accepts
    along = next((d for d in range(depth) if answers[(0,) * d] != 0), depth)
    assert chain_accepts == along


@pytest.mark.parametrize("depth", [0, 1, 15])
def test_chain_is_the_top_1_path(depth: int) -> None:
    nodes = chain(depth)
    assert paths(nodes) == [(0,) * d for d in range(depth + 1)]
    assert spine_of(nodes) == list(range(depth + 1))


@quick
@given(log_qs(holed), budgets, st.integers(0, 7))
def test_union_is_the_tree_with_the_whole_chain(log_q: LogQ, budget: int, spine: int) -> None:
    depth = len(log_q)
    tree = best_first(log_q, budget, spine)
    before = Nodes(list(tree.parents), list(tree.depths), list(tree.ranks))
    both, rows = union(tree, chain(depth))
    assert tree == before  # the tree itself is left alone
    assert paths(both)[: len(tree)] == paths(tree)
    assert [paths(both)[row] for row in rows] == [(0,) * d for d in range(depth + 1)]
    assert spine_of(both) == rows
    assert set(paths(both)) == set(paths(tree)) | {(0,) * d for d in range(depth + 1)}
    assert len(set(paths(both))) == len(both) <= 1 + depth + budget
