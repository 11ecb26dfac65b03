"""Which rows a round verifies: the chain, the best-first tree, or their union. Plain Python over D x K scores."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from ddtree.tree.context import Guess, Guesses

Entry = tuple[float, int, tuple[int, ...], int, float, Guess | None]


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


def chain(depth: int) -> Nodes:
    """DFlash's own proposal: the top-1 token of each of `depth` depths."""
    nodes = Nodes.root()
    for row in range(depth):
        nodes.add(row, 0)
    return nodes


@np.errstate(over="ignore")
def likeliest(guesses: Guesses) -> Nodes:
    """The chain that takes the likelier of two at every depth: the drafter's best token, or what the text says."""
    nodes = Nodes.root()
    path: tuple[int, ...] = ()
    for row, (tokens, scores) in enumerate(zip(guesses.tokens, guesses.log_q, strict=True)):
        guess = guesses.behind(path)
        if guess is None or (guess.rank > 0 and np.float32(scores[0] + guess.rest) >= guess.hit):
            nodes.add(row, 0)
            path = (*path, tokens[0])
        else:
            nodes.add(row, guess.rank, guess.token if guess.rank == len(tokens) else None)
            path = (*path, guess.token)
    return nodes


@np.errstate(over="ignore")  # a drafter may mask with the lowest float; a sum below it is -inf, and skipped
def best_first(log_q: Sequence[Sequence[float]], budget: int, spine: int = 0, guesses: Guesses | None = None) -> Nodes:
    """The `budget` prefixes of highest probability under the draft, as a tree.

    Args:
        log_q: [D][K] log-probabilities, best first, at most 0; -inf marks a missing rank.
        budget: nodes without the root. The tree is smaller only when there are not so many prefixes.
        spine: rank-0 tokens that are placed first, whatever their score.
        guesses: what the text says, over the same log_q. Behind a node with a guess the guess has the score `hit`, and
            every other candidate float32(log q + rest); it stands at its own rank, or behind the last candidate.
    Order: score, then depth, then the path of ranks; a child's score is one float32 addition to its parent's, so that
    another implementation of the same order builds the same tree. No score is above its parent's, and a node's
    candidates are offered in order with its guess beside them: so the first of what is offered is the first of all.
    Source: DDTree (arXiv 2604.12989), Propositions 1 and 2.
    """
    nodes = Nodes.root()
    paths: list[tuple[int, ...]] = [()]  # every row's tokens, where there are guesses
    heap: list[Entry] = []

    def offer(parent: int, above: float, path: tuple[int, ...], edge: float, guess: Guess | None) -> None:
        score = float(np.float32(above + edge))
        if score > -inf:  # also false for NaN
            heapq.heappush(heap, (-score, len(path), path, parent, above, guess))

    def offer_candidate(parent: int, above: float, path: tuple[int, ...], guess: Guess | None) -> None:
        """The candidate of this rank, or of the next where this one is the guess, which is offered by itself."""
        depth, rank = len(path), path[-1]
        rank += guess is not None and guess.rank == rank
        if depth <= len(log_q) and rank < len(log_q[depth - 1]):
            edge = log_q[depth - 1][rank]
            if guess is not None:
                edge = float(np.float32(edge + guess.rest))
            offer(parent, above, (*path[:-1], rank), edge, guess)

    def offer_children(row: int, score: float, path: tuple[int, ...]) -> None:
        guess = guesses.behind(paths[row]) if guesses is not None else None
        if guess is not None:
            offer(row, score, (*path, guess.rank), guess.hit, guess)
        offer_candidate(row, score, (*path, 0), guess)

    def take(entry: Entry) -> None:
        cost, depth, path, parent, above, guess = entry
        rank, token = path[-1], None
        if guess is None or rank != guess.rank:
            offer_candidate(parent, above, (*path[:-1], rank + 1), guess)
        elif rank == len(log_q[depth - 1]):
            token = guess.token
        row = nodes.add(parent, rank, token)
        if guesses is not None:
            paths.append((*paths[parent], guesses.tokens[depth - 1][rank] if token is None else token))
        offer_children(row, -cost, path)

    offer_children(0, 0.0, ())
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
