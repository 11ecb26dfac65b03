"""The modes as data: which rows a round verifies, and along which of them it commits."""

from collections.abc import Sequence
from dataclasses import dataclass

from ddtree.config import Speculation
from ddtree.tree import Guesses, Nodes, Pair, best_first, chain, likeliest, union

MOST_PAIRED = 32  # candidates of a depth that have pair scores: each of them behind each, and all of these in order


@dataclass(frozen=True)
class Mode:
    """One mode. Every mode goes through the same verify, accept and commit."""

    name: str
    chain: bool  # verify the drafter's top-1 chain
    tree: bool  # verify the best-first tree
    commits: str  # "chain" or "tree": whose rows may be accepted

    @property
    def drafts(self) -> bool:
        """Whether a round needs a proposal at all."""
        return self.chain or self.tree

    @property
    def shadows(self) -> bool:
        """Whether a round verifies rows that it may not commit."""
        return self.chain and self.tree


MODES = {
    mode.name: mode
    for mode in (
        Mode("ar", chain=False, tree=False, commits="chain"),
        Mode("linear", chain=True, tree=False, commits="chain"),
        Mode("shadow-linear", chain=True, tree=True, commits="chain"),
        Mode("tree", chain=False, tree=True, commits="tree"),
    )
}


@dataclass(frozen=True)
class Layout:
    """One sequence's rows, and which of them belong to the chain and to the tree (both hold the root)."""

    nodes: Nodes
    chain: list[int]
    tree_size: int  # rows 0 .. tree_size - 1 are the tree

    @classmethod
    def root(cls) -> "Layout":
        """No speculation: the root alone."""
        return cls(Nodes.root(), [0], 1)


def depths_needed(mode: Mode, speculation: Speculation, depths: int) -> int:
    """How many of the drafter's depths this mode can use: a tree of B nodes is at most B deep."""
    if not mode.drafts:
        return 0
    return depths if mode.chain else min(depths, speculation.tree_budget)


def ranks_needed(mode: Mode, speculation: Speculation, pairwise: bool = False) -> int:
    """How many candidates per depth: a tree of B nodes uses at most B.

    With pair scores any of them may be the best behind the token before it, in a chain too; there are at most
    MOST_PAIRED then, whatever was asked for: no request can make rounds slow that it shares with others.
    """
    if pairwise and mode.drafts:
        return min(speculation.tree_top_k, MOST_PAIRED)
    return min(speculation.tree_top_k, speculation.tree_budget) if mode.tree else 1


def max_rows(mode: Mode, speculation: Speculation, depths: int) -> int:
    """The most rows a round can have, the root included."""
    return 1 + (depths if mode.chain else 0) + (speculation.tree_budget if mode.tree else 0)


def lay_out(
    mode: Mode,
    speculation: Speculation,
    log_q: Sequence[Sequence[float]],
    guesses: Guesses | None = None,
    pair: Pair | None = None,
) -> Layout:
    """The rows of one sequence.

    log_q: [D][K], best first; pair: the scores behind each candidate, where the drafter has such; guesses: what the
    sequence's text says, over the same scores.
    """
    line = Nodes.root()
    if mode.chain:
        line = chain(len(log_q), pair) if guesses is None else likeliest(guesses)
    if not mode.tree:
        return Layout(line, list(range(len(line))), 1)
    tree = best_first(log_q, speculation.tree_budget, speculation.tree_spine, guesses, pair)
    nodes, rows = union(tree, line)
    return Layout(nodes, rows, len(tree))
