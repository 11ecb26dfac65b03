"""best_first, likeliest and union with a context, against brute force over every path."""

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddtree.tree import Branch, Guesses, Match, Nodes, RoundState, best_first, chain, likeliest, union

Path = tuple[int, ...]
VOCAB = 9
quick = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Told:
    """A context that says something or nothing behind every path, by its seed; `often` of 10 paths have a guess."""

    def __init__(self, seed: int, often: int) -> None:
        self.seed, self.often = seed, often

    def behind(self, path: Path) -> Match | None:
        rng = Random(f"{self.seed} {path}")
        if rng.randrange(10) >= self.often:
            return None
        return Match(rng.randrange(VOCAB), rng.choice([0.01, 0.2, 0.5, 0.5, 0.85, 0.99]), 1)


@st.composite
def guesses_of(draw: st.DrawFn) -> Guesses:
    """Proposals of at most some 700 paths, with ties and missing ranks; the tokens of a depth differ."""
    depth, ranks = draw(st.sampled_from([(1, 6), (2, 8), (3, 6), (3, 3), (4, 3), (5, 2), (6, 1)]))
    steps = st.one_of(st.floats(0.0, 8.0, width=32), st.sampled_from([0.0, 0.5, 1.0, 1e-7, float("inf")]))
    log_q = []
    for _ in range(depth):
        drops = draw(st.lists(steps, min_size=ranks, max_size=ranks))
        log_q.append([float(np.float32(-total)) for total in np.cumsum(drops)])
    if draw(st.booleans()):
        log_q[-1][-1] = float("nan")
    tokens = [draw(st.permutations(range(VOCAB)))[:ranks] for _ in range(depth)]
    return Guesses(Told(draw(st.integers(0, 10**6)), draw(st.sampled_from([0, 3, 7, 10]))), tokens, log_q)


def children(guesses: Guesses, path: Path) -> list[tuple[int, int, float]]:
    """(rank, token, score of the edge) of every child of a node, by the formula p = (1 - c) q + c [t = guess]."""
    depth = len(path)
    if depth == len(guesses.tokens):
        return []
    told = guesses.context.behind(path)
    found = []
    for rank, (token, log_q) in enumerate(zip(guesses.tokens[depth], guesses.log_q[depth], strict=True)):
        if told is None:
            found.append((rank, token, log_q))
        elif token == told[0]:
            q = 0.0 if np.isnan(log_q) else np.exp(log_q)
            found.append((rank, token, min(float(np.float32(np.log(told[1] + (1 - told[1]) * q))), 0.0)))
        else:
            found.append((rank, token, float(np.float32(log_q + float(np.float32(np.log1p(-told[1])))))))
    if told is not None and told[0] not in guesses.tokens[depth]:
        found.append((len(guesses.tokens[depth]), told[0], float(np.float32(np.log(told[1])))))
    return found


def every_path(guesses: Guesses) -> list[tuple[float, int, Path, Path]]:
    """(cost, depth, ranks, tokens) of all paths with a score, in order."""
    found, level = [], [(np.float32(0), (), ())]
    while level:
        grown = []
        for score, ranks, tokens in level:
            for rank, token, edge in children(guesses, tokens):
                total = np.float32(float(score) + edge)
                if total > -np.inf:
                    grown.append((total, (*ranks, rank), (*tokens, token)))
        found += [(-float(score), len(ranks), ranks, tokens) for score, ranks, tokens in grown]
        level = grown
    return sorted(found)


def token_paths(nodes: Nodes, guesses: Guesses) -> list[Path]:
    """As a round's state has them: so `lay` is tested too."""
    state = RoundState.allocate(1, len(nodes), len(guesses.tokens))
    state.lay([nodes], [guesses.tokens])
    return state.draft_tree(0).paths()


def rank_paths(nodes: Nodes) -> list[Path]:
    found: list[Path] = [()]
    for row in range(1, len(nodes)):
        found.append((*found[nodes.parents[row]], nodes.ranks[row]))
    return found


@quick
@given(guesses_of(), st.integers(1, 40), st.integers(0, 6))
def test_best_first_with_guesses_is_brute_force_in_order(guesses: Guesses, budget: int, spine: int) -> None:
    nodes = best_first(guesses.log_q, budget, spine, guesses)
    ordered = every_path(guesses)
    usable = {ranks for _, _, ranks, _ in ordered}
    first = []
    while len(first) < spine and (0,) * (len(first) + 1) in usable:
        first.append((0,) * (len(first) + 1))
    by_ranks = {ranks: tokens for _, _, ranks, tokens in ordered}
    expected = (first + [ranks for _, _, ranks, _ in ordered if ranks not in first])[:budget]
    assert rank_paths(nodes)[1:] == expected
    assert token_paths(nodes, guesses)[1:] == [by_ranks[ranks] for ranks in expected]


@quick
@given(guesses_of())
def test_no_child_outscores_its_parent_and_siblings_differ(guesses: Guesses) -> None:
    nodes = best_first(guesses.log_q, 60, guesses=guesses)
    paths = token_paths(nodes, guesses)
    assert len(set(paths)) == len(paths), "two siblings with one token: the accepted path would not be one"
    cost = {tokens: cost for cost, _, _, tokens in every_path(guesses)} | {(): 0.0}
    assert all(cost[path] >= cost[path[:-1]] for path in paths[1:])
    assert all(cost[a] <= cost[b] for a, b in pairwise(paths))
    for path in paths:
        guess = guesses.behind(path)
        assert guess is None or (guess.hit <= 0 and guess.rest < 0)


@quick
@given(guesses_of())
def test_a_context_that_says_nothing_changes_nothing(guesses: Guesses) -> None:
    silent = Guesses(Told(0, 0), guesses.tokens, guesses.log_q)
    assert best_first(guesses.log_q, 20, 2, silent) == best_first(guesses.log_q, 20, 2)
    assert likeliest(silent) == chain(len(guesses.log_q))


@quick
@given(guesses_of())
def test_the_likeliest_chain_takes_the_best_child_at_every_node(guesses: Guesses) -> None:
    path: Path = ()
    expected: list[Path] = [()]
    for tokens in guesses.tokens:
        known = [(-edge, rank, token) for rank, token, edge in children(guesses, path) if edge > -np.inf]
        # Where nothing has a score, the chain lays the drafter's first candidate all the same.
        path = (*path, min(known)[2] if known else tokens[0])
        expected.append(path)
    if all(row[0] > -np.inf for row in guesses.log_q):
        assert token_paths(likeliest(guesses), guesses) == expected
    assert len(likeliest(guesses)) == 1 + len(guesses.tokens)


@quick
@given(guesses_of(), st.integers(1, 20))
def test_union_holds_the_tree_and_the_chain(guesses: Guesses, budget: int) -> None:
    tree, line = best_first(guesses.log_q, budget, guesses=guesses), likeliest(guesses)
    before = token_paths(tree, guesses)
    both, rows = union(tree, line)
    assert token_paths(tree, guesses) == before, "the tree itself is left alone"
    paths = token_paths(both, guesses)
    assert paths[: len(tree)] == before
    assert [paths[row] for row in rows] == token_paths(line, guesses)
    assert len(set(paths)) == len(paths)
    assert set(paths) == set(before) | set(token_paths(line, guesses))


def test_a_guess_among_the_candidates_stays_one_of_them() -> None:
    told = Branch((4, 7), (0.5, 0.5))
    guesses = Guesses(told, [[3, 4], [5, 6]], [[-0.1, -3.0], [-0.1, -3.0]])
    first, second = guesses.behind(()), guesses.behind((4,))
    assert first is not None
    assert second is not None
    assert (first.token, first.rank) == (4, 1)
    assert first.hit == pytest.approx(np.log(0.5 + 0.5 * np.exp(-3.0)))
    assert (second.token, second.rank, second.hit) == (7, 2, pytest.approx(np.log(0.5)))
    assert guesses.behind((3,)) is None
    assert guesses.behind((4, 7)) is None, "no depth is left"
    nodes = best_first(guesses.log_q, 3, guesses=guesses)
    # 4: 0.525; 3: 0.5 * 0.905 = 0.452; 3 5: 0.905 of it.
    assert token_paths(nodes, guesses) == [(), (4,), (3,), (3, 5)]
    assert nodes.foreign == {}
    assert best_first(guesses.log_q, 4, guesses=guesses).foreign == {4: 7}


def test_a_branch_says_something_along_itself_alone() -> None:
    told = Branch((1, 2, 1), (0.2, 0.4, 0.55), length=3)
    assert [told.behind(path) for path in ((), (1,), (1, 2))] == [(1, 0.2, 3), (2, 0.4, 4), (1, 0.55, 5)]
    assert [told.behind(path) for path in ((2,), (1, 1), (2, 1), (1, 2, 1))] == [None] * 4
