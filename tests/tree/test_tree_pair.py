"""best_first, chain, likeliest and union from pair scores, with and without a context, against brute force."""

from itertools import pairwise
from random import Random

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddtree.tree import Branch, Guesses, Match, Nodes, Pair, RoundState, best_first, chain, likeliest, union

Path = tuple[int, ...]
VOCAB = 9
INF = float("inf")
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
def proposals(draw: st.DrawFn) -> tuple[Guesses, torch.Tensor]:
    """Proposals of at most some 700 paths with pair scores in any order, with ties and missing ones."""
    depth, ranks = draw(st.sampled_from([(1, 6), (2, 8), (3, 6), (3, 3), (4, 3), (5, 2), (6, 1)]))
    value = st.one_of(st.floats(-8.0, 0.0, width=32), st.sampled_from([0.0, -0.5, -1.0, -1e-7, -1e-8, -INF, np.nan]))
    log_q = []
    for _ in range(depth):
        drops = draw(st.lists(value, min_size=ranks, max_size=ranks))
        log_q.append(sorted((v for v in drops if v > -INF), reverse=True) + [v for v in drops if not v > -INF])
    seed, often = draw(st.integers(0, 10**6)), draw(st.sampled_from([0, 0, 3, 7, 10]))
    rows = draw(st.lists(value, min_size=(depth - 1) * ranks**2, max_size=(depth - 1) * ranks**2))
    scores = torch.tensor(rows, dtype=torch.float32).view(depth - 1, ranks, ranks)
    tokens = [draw(st.permutations(range(VOCAB)))[:ranks] for _ in range(depth)]
    return Guesses(Told(seed, often), tokens, log_q, Pair.of(scores)), scores


def children(guesses: Guesses, scores: torch.Tensor, path: Path) -> list[tuple[int, int, int, float]]:
    """(place, rank, token, score of the edge) of every child of a node; path: tokens."""
    depth = len(path)
    if depth == len(guesses.tokens):
        return []
    row, edges = guesses.tokens[depth], np.array(guesses.log_q[depth], np.float32)
    if depth and path[-1] in guesses.tokens[depth - 1]:
        edges = scores[depth - 1, guesses.tokens[depth - 1].index(path[-1])].numpy()
    order = sorted(range(len(row)), key=lambda rank: (-edges[rank] if edges[rank] > -np.inf else np.inf, rank))
    told, found = guesses.context.behind(path), []
    for place, rank in enumerate(order):
        edge = float(edges[rank])
        if told is not None and row[rank] == told.token:
            q = np.exp(edge) if edge > -np.inf else 0.0
            edge = min(float(np.float32(np.log(told.confidence + (1 - told.confidence) * q))), 0.0)
        elif told is not None:
            edge = float(np.float32(edge + float(np.float32(np.log(1 - told.confidence)))))
        found.append((place, rank, row[rank], edge))
    if told is not None and told.token not in row:
        found.append((len(row), len(row), told.token, float(np.float32(np.log(told.confidence)))))
    return found


def every_path(guesses: Guesses, scores: torch.Tensor) -> list[tuple[float, int, Path, Path]]:
    """(cost, depth, places, tokens) of all paths with a score, in order."""
    found: list[tuple[float, int, Path, Path]] = []
    level: list[tuple[np.float32, Path, Path]] = [(np.float32(0), (), ())]
    while level:
        grown = []
        for score, places, tokens in level:
            for place, _, token, edge in children(guesses, scores, tokens):
                total = np.float32(float(score) + edge)
                if total > -np.inf:
                    grown.append((total, (*places, place), (*tokens, token)))
        found += [(-float(score), len(places), places, tokens) for score, places, tokens in grown]
        level = grown
    return sorted(found)


def token_paths(nodes: Nodes, guesses: Guesses) -> list[Path]:
    """As a round's state has them."""
    state = RoundState.allocate(1, len(nodes), len(guesses.tokens))
    state.lay([nodes], [guesses.tokens])
    return state.draft_tree(0).paths()


def best_child(guesses: Guesses, scores: torch.Tensor, path: Path, told: bool) -> int:
    """The token that a chain takes: by the drafter's scores alone, or with what the text says."""
    asked = guesses if told else Guesses(Told(0, 0), guesses.tokens, guesses.log_q, guesses.pair)
    found = children(asked, scores, path)
    known = [(-edge, place, token) for place, _, token, edge in found if edge > -np.inf]
    return min(known)[2] if known else found[0][2]


@quick
@given(proposals(), st.integers(1, 40), st.integers(0, 6))
def test_best_first_is_brute_force_in_order(proposal: tuple[Guesses, torch.Tensor], budget: int, spine: int) -> None:
    guesses, scores = proposal
    silent = guesses.context.often == 0  # type: ignore[attr-defined]
    nodes = best_first(guesses.log_q, budget, spine, None if silent else guesses, guesses.pair)
    ordered = every_path(guesses, scores)
    tokens_of = {places: tokens for _, _, places, tokens in ordered}
    first: list[Path] = []
    while len(first) < spine and (0,) * (len(first) + 1) in tokens_of:
        first.append((0,) * (len(first) + 1))
    wanted = (first + [places for _, _, places, _ in ordered if places not in first])[:budget]
    assert token_paths(nodes, guesses)[1:] == [tokens_of[places] for places in wanted]


@quick
@given(proposals())
def test_no_child_outscores_its_parent_and_siblings_differ(proposal: tuple[Guesses, torch.Tensor]) -> None:
    guesses, scores = proposal
    paths = token_paths(best_first(guesses.log_q, 60, guesses=guesses, pair=guesses.pair), guesses)
    assert len(set(paths)) == len(paths), "two siblings with one token: the accepted path would not be one"
    cost = {tokens: cost for cost, _, _, tokens in every_path(guesses, scores)} | {(): 0.0}
    assert all(cost[path] >= cost[path[:-1]] for path in paths[1:])
    assert all(cost[a] <= cost[b] for a, b in pairwise(paths))


@quick
@given(proposals(), st.integers(1, 30), st.integers(0, 4))
def test_pair_scores_that_say_what_the_marginals_say_change_nothing(
    proposal: tuple[Guesses, torch.Tensor], budget: int, spine: int
) -> None:
    guesses, _ = proposal
    log_q = torch.tensor(guesses.log_q)
    same = Pair.of(log_q[1:].unsqueeze(1).expand(-1, log_q.shape[1], -1))
    assert best_first(guesses.log_q, budget, spine, pair=same) == best_first(guesses.log_q, budget, spine)
    assert chain(len(log_q), same) == chain(len(log_q))
    plain, paired = (Guesses(guesses.context, guesses.tokens, guesses.log_q, pair) for pair in (None, same))
    assert best_first(guesses.log_q, budget, spine, paired, same) == best_first(guesses.log_q, budget, spine, plain)
    assert likeliest(paired) == likeliest(plain)


@quick
@given(proposals())
def test_chains_take_the_best_child_at_every_node(proposal: tuple[Guesses, torch.Tensor]) -> None:
    guesses, scores = proposal
    for told, nodes in ((False, chain(len(guesses.tokens), guesses.pair)), (True, likeliest(guesses))):
        path: Path = ()
        expected: list[Path] = [()]
        for depth in range(len(guesses.tokens)):
            # At the root the chain takes rank 0, also where it is missing; so it does where nothing has a score.
            plain = depth == 0 and not told
            path = (*path, guesses.tokens[0][0] if plain else best_child(guesses, scores, path, told))
            expected.append(path)
        assert token_paths(nodes, guesses) == expected


@quick
@given(proposals(), st.integers(1, 20))
def test_union_holds_the_tree_and_the_chain(proposal: tuple[Guesses, torch.Tensor], budget: int) -> None:
    guesses, _ = proposal
    tree = best_first(guesses.log_q, budget, guesses=guesses, pair=guesses.pair)
    line = likeliest(guesses)
    both, rows = union(tree, line)
    paths = token_paths(both, guesses)
    assert paths[: len(tree)] == token_paths(tree, guesses)
    assert [paths[row] for row in rows] == token_paths(line, guesses)
    assert len(set(paths)) == len(paths)


def test_a_sibling_has_a_continuation_of_its_own() -> None:
    log_q = [[-0.5, -1.0], [-0.1, -3.0]]
    pair = Pair.of(torch.tensor([[[-0.1, -3.0], [-4.0, -0.05]]]))
    assert pair.share(1, 1, 0) == -4.0
    assert best_first(log_q, 4, pair=pair).ranks[1:] == [0, 0, 1, 1], "behind the second, the second"
    assert best_first(log_q, 4).ranks[1:] == [0, 0, 1, 0]
    assert best_first(log_q, 4, pair=pair).parents[1:] == [0, 1, 0, 3]


def test_behind_a_token_of_the_text_that_is_no_candidate_the_marginals_hold() -> None:
    told = Branch((7,), (0.9,))
    pair = Pair.of(torch.tensor([[[-5.0, -0.01], [-5.0, -0.01]]]))
    guesses = Guesses(told, [[3, 4], [5, 6]], [[-0.1, -3.0], [-0.1, -3.0]], pair)
    nodes = best_first(guesses.log_q, 3, guesses=guesses, pair=pair)
    assert token_paths(nodes, guesses) == [(), (7,), (7, 5), (3,)]
    assert token_paths(best_first(guesses.log_q, 4, guesses=guesses, pair=pair), guesses)[-1] == (3, 6)


def test_scores_that_are_no_numbers_are_missing() -> None:
    pair = Pair.of(torch.tensor([[[np.nan, -1.0], [-INF, np.nan]]]))
    assert pair.ranks[0][0] == [1, 0]
    assert best_first([[-0.5, -0.5], [-0.5, -0.5]], 9, pair=pair).ranks[1:] == [0, 1, 1]
    assert len(best_first([[-0.5, -0.5], [-0.5, -0.5]], 9, pair=pair)) == 4
