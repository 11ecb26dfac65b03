"""Which rows a round verifies: the chain, the best-first tree, or their union. Plain Python over D x K scores."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np

from ddtree.tree.context import Guess, Guesses
from ddtree.tree.pair import Pair

Entry = tuple[float, int, tuple[int, ...], int]  # cost, depth, places from the root on, row of the parent


class _Behind(NamedTuple):
    """What may follow a row."""

    score: float  # of the row itself
    edges: Sequence[float]  # of the candidates, best first
    ranks: Sequence[int] | None  # of the candidates; None: their places
    guess: Guess | None
    place: int  # of the guess among the edges; their number where it is none of them, -1 where there is no guess


@dataclass
class Nodes:
    """Rows of one sequence; row 0 is the root (parent -1, depth 0, rank 0), and parents come before children."""

    parents: list[int]
    depths: list[int]
    ranks: list[int]  # which of its depth's candidates a row is; their number where it is none of them
    foreign: dict[int, int] = field(default_factory=dict)  # row -> token, of rows that are no candidates

    @classmethod
    def root(cls) -> "Nodes":
        return cls([-1], [0], [0])

    def __len__(self) -> int:
        return len(self.parents)

    def add(self, parent: int, rank: int, foreign: int | None = None) -> int:
        """Append a child of row `parent` and return its row. foreign: the token of one that is no candidate."""
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.ranks.append(rank)
        row = len(self.parents) - 1
        if foreign is not None:
            self.foreign[row] = foreign
        return row


def chain(depth: int, pair: Pair | None = None) -> Nodes:
    """DFlash's own proposal: the top-1 token of each of `depth` depths; with `pair`, the best behind the one before."""
    nodes = Nodes.root()
    for row in range(depth):
        nodes.add(row, 0 if pair is None or row == 0 else pair.ranks[row - 1][nodes.ranks[row]][0])
    return nodes


@np.errstate(over="ignore")
def likeliest(guesses: Guesses) -> Nodes:
    """The chain that takes the likelier of two at every depth: the drafter's best token, or what the text says."""
    nodes = Nodes.root()
    path: tuple[int, ...] = ()
    for row, (tokens, log_q) in enumerate(zip(guesses.tokens, guesses.log_q, strict=True)):
        guess = guesses.behind(path)
        edges, ranks = _candidates(log_q, guesses.pair, row, nodes.ranks[row])
        best = 0 if ranks is None else ranks[0]
        if guess is None or (guess.rank != best and np.float32(edges[0] + guess.rest) >= guess.hit):
            nodes.add(row, best)
            path = (*path, tokens[best])
        else:
            nodes.add(row, guess.rank, guess.token if guess.rank == len(tokens) else None)
            path = (*path, guess.token)
    return nodes


@np.errstate(over="ignore")  # a drafter may mask with the lowest float; a sum below it is -inf, and skipped
def best_first(
    log_q: Sequence[Sequence[float]],
    budget: int,
    spine: int = 0,
    guesses: Guesses | None = None,
    pair: Pair | None = None,
) -> Nodes:
    """The `budget` prefixes of highest probability under the draft, as a tree.

    Args:
        log_q: [D][K] log-probabilities, best first, at most 0; -inf marks a missing rank.
        budget: nodes without the root. The tree is smaller only when there are not so many prefixes.
        spine: tokens of the chain (each the best behind the one before) that are placed first, whatever their score.
        guesses: what the text says, over the same log_q and pair. Behind a node with a guess the guess has the score
            `hit`, and every other candidate float32(edge + rest); it stands at its own place, or behind the last one.
        pair: scores behind each candidate, in the stead of log_q from the second depth on; behind a token that is no
            candidate, log_q holds.
    Order: score, then depth, then the path of places (a place is a candidate's number among its siblings, best first:
    without `pair` its rank); a child's score is one float32 addition to its parent's, so that another implementation of
    the same order builds the same tree. No score is above its parent's, and a node's candidates are offered in order
    with its guess beside them: so the first of what is offered is the first of all.
    Source: DDTree (arXiv 2604.12989), Propositions 1 and 2.
    """
    nodes = Nodes.root()
    paths: list[tuple[int, ...]] = [()]  # every row's tokens, where there are guesses
    behind: list[_Behind] = []  # every row
    heap: list[Entry] = []

    def offer(parent: int, path: tuple[int, ...], edge: float) -> None:
        score = float(np.float32(behind[parent].score + edge))
        if score > -inf:  # also false for NaN
            heapq.heappush(heap, (-score, len(path), path, parent))

    def offer_candidate(parent: int, path: tuple[int, ...]) -> None:
        """The candidate of this place, or of the next where this one is the guess, which is offered by itself."""
        _, edges, _, guess, guessed = behind[parent]
        place = path[-1]
        place += place == guessed
        if place < len(edges):
            edge = edges[place]
            offer(parent, (*path[:-1], place), edge if guess is None else float(np.float32(edge + guess.rest)))

    def open_row(row: int, score: float, path: tuple[int, ...]) -> None:
        """Offer what may follow a row that was laid."""
        depth = len(path)
        edges, ranks = _candidates(log_q[depth], pair, depth, nodes.ranks[row]) if depth < len(log_q) else ((), None)
        guess = guesses.behind(paths[row]) if guesses is not None else None
        place = -1
        if guess is not None:
            place = guess.rank if ranks is None or guess.rank == len(edges) else ranks.index(guess.rank)
        behind.append(_Behind(score, edges, ranks, guess, place))
        if guess is not None:
            offer(row, (*path, place), guess.hit)
        offer_candidate(row, (*path, 0))

    def take(entry: Entry) -> None:
        cost, depth, path, parent = entry
        _, edges, ranks, guess, guessed = behind[parent]
        place, token = path[-1], None
        if place != guessed:
            offer_candidate(parent, (*path[:-1], place + 1))
        elif guess is not None and place == len(edges):
            token = guess.token
        rank = place if ranks is None or token is not None else ranks[place]
        row = nodes.add(parent, rank, token)
        if guesses is not None:
            paths.append((*paths[parent], guesses.tokens[depth - 1][rank] if token is None else token))
        open_row(row, -cost, path)

    open_row(0, 0.0, ())
    for length in range(1, min(spine, budget) + 1):
        at = next((i for i, entry in enumerate(heap) if entry[2] == (0,) * length), None)
        if at is None:
            break
        entry = heap.pop(at)
        heapq.heapify(heap)
        take(entry)
    while heap and len(nodes) <= budget:
        take(heapq.heappop(heap))
    return nodes


def _candidates(
    log_q: Sequence[float], pair: Pair | None, depth: int, rank: int
) -> tuple[Sequence[float], Sequence[int] | None]:
    """Scores of a depth's candidates (from 0) behind the one of this rank, best first, and their ranks.

    None: in the order of log_q.
    """
    if pair is None or depth == 0 or rank >= len(pair.ranks[depth - 1]):
        return log_q, None
    return pair.log_q[depth - 1][rank], pair.ranks[depth - 1][rank]


def union(tree: Nodes, line: Nodes) -> tuple[Nodes, list[int]]:
    """The tree with the rest of a chain behind it, and the chain's rows, the root first.

    Rows up to len(tree) - 1 are the tree's own, so both can be verified in one forward.
    """
    nodes = Nodes(list(tree.parents), list(tree.depths), list(tree.ranks), dict(tree.foreign))
    laid = {(tree.parents[row], tree.ranks[row], tree.foreign.get(row)): row for row in range(1, len(tree))}
    rows = [0]
    for at in range(1, len(line)):
        rank, token = line.ranks[at], line.foreign.get(at)
        row = laid.get((rows[-1], rank, token))
        rows.append(nodes.add(rows[-1], rank, token) if row is None else row)
    return nodes, rows
