"""Turns scores into a tree and a target's answers into the accepted path."""

from ddtree.tree.accept import Accepted, accept, cut
from ddtree.tree.build import Nodes, best_first, chain, likeliest, union
from ddtree.tree.context import Branch, Context, Guess, Guesses, Match
from ddtree.tree.matches import Matches, TextIndex
from ddtree.tree.pair import Pair
from ddtree.tree.proposal import Proposal, best, largest, top_k
from ddtree.tree.state import DraftTree, RoundState, Rows, unpack

__all__ = [
    "Accepted",
    "Branch",
    "Context",
    "DraftTree",
    "Guess",
    "Guesses",
    "Match",
    "Matches",
    "Nodes",
    "Pair",
    "Proposal",
    "RoundState",
    "Rows",
    "TextIndex",
    "accept",
    "best",
    "best_first",
    "chain",
    "cut",
    "largest",
    "likeliest",
    "top_k",
    "union",
    "unpack",
]
