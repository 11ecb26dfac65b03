"""Turns scores into a tree and a target's answers into the accepted path."""

from ddtree.tree.accept import Accepted, accept, cut
from ddtree.tree.build import Nodes, best_first, chain, union
from ddtree.tree.proposal import Proposal, best, largest, top_k
from ddtree.tree.state import DraftTree, RoundState, Rows, unpack

__all__ = [
    "Accepted",
    "DraftTree",
    "Nodes",
    "Proposal",
    "RoundState",
    "Rows",
    "accept",
    "best",
    "best_first",
    "chain",
    "cut",
    "largest",
    "top_k",
    "union",
    "unpack",
]
