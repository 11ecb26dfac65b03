"""Which rows a round verifies: the chain, the best-first tree, or their union. Plain Python over D x K scores."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np


@dataclass
class Nodes:
    """Rows of one sequence; row 0 is the root (parent -1, depth 0, rank 0), and parents come before children."""

    parents: list[int]
    depths: list[int]
    ranks: list[int]  # which of its depth's candidates a row is

    @classmethod
    def root(cls) -> "Nodes":
        return cls([-1], [0], [0])

    def __len__(self) -> int:
        return len(self.parents)

    def add(self, parent: int, rank: int) -> int:
        """Append a child of row `parent` and return its row."""
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.ranks.append(rank)
        return len(self.parents) - 1

    def spine(self) -> list[int]:
        """Rows of the top-1 chain that are here, the root first."""
        rows = [0]
        for row in range(1, len(self)):
            if self.parents[row] == rows[-1] and self.ranks[row] == 0:
                rows.append(row)
        return rows


def chain(depth: int) -> Nodes:
    """DFlash's own proposal: the top-1 token of each of `depth` depths."""
    nodes = Nodes.root()
    for row in range(depth):
        nodes.add(row, 0)
    return nodes


@np.errstate(over="ignore")  # a drafter may mask with the lowest float; a sum below it is -inf, and skipped
def best_first(log_q: Sequence[Sequence[float]], budget: int, spine: int = 0) -> Nodes:
    """The `budget` prefixes of highest probability under the factorised draft, as a tree.

    Args:
        log_q: [D][K] log-probabilities, best first, at most 0; -inf marks a missing rank.
        budget: nodes without the root. The tree is smaller only when there are not so many prefixes.
        spine: rank-0 tokens that are placed first, whatever their score.
    Order: score, then depth, then the path of ranks; a child's score is one float32 addition to its parent's, so that
    another implementation of the same order builds the same tree.
    Source: DDTree (arXiv 2604.12989), Propositions 1 and 2.
    """
    nodes = Nodes.root()
    heap: list[tuple[float, int, tuple[int, ...], int, float]] = []

    def push(parent: int, parent_score: float, path: tuple[int, ...]) -> None:
        depth, rank = len(path), path[-1]
        if depth > len(log_q) or rank >= len(log_q[depth - 1]):
            return
        score = float(np.float32(parent_score + log_q[depth - 1][rank]))
        if score > -inf:  # also false for NaN
            heapq.heappush(heap, (-score, depth, path, parent, parent_score))

    def take(entry: tuple[float, int, tuple[int, ...], int, float]) -> None:
        cost, _, path, parent, parent_score = entry
        row = nodes.add(parent, path[-1])
        push(parent, parent_score, (*path[:-1], path[-1] + 1))
        push(row, -cost, (*path, 0))

    push(0, 0.0, (0,))
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


def union(tree: Nodes, depth: int) -> tuple[Nodes, list[int]]:
    """The tree with the rest of the top-1 chain of `depth` behind it, and the chain's rows, the root first.

    Rows up to len(tree) - 1 are the tree's own, so both can be verified in one forward.
    """
    nodes = Nodes(list(tree.parents), list(tree.depths), list(tree.ranks))
    rows = tree.spine()
    while len(rows) <= depth:
        rows.append(nodes.add(rows[-1], 0))
    return nodes, rows
