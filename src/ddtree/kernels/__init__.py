"""The operators of a round as Triton kernels. Each has a reference, which it equals, in ddtree.tree, layers or engine.

Importing this room needs no triton; calling a kernel does. All of them fit into a CUDA graph: static shapes, no host
synchronisation, no allocation that depends on data. The Triton side of a module is in the one named `_jit`.
"""

from ddtree.kernels.accept import accept, advance, settle
from ddtree.kernels.attention import AttentionRows, AttentionWorkspace, Tiles, locate, tree_attention
from ddtree.kernels.build import Lines, Plan, PlanRow, build
from ddtree.kernels.choose import Allowed, Kept, choose
from ddtree.kernels.commit import commit
from ddtree.kernels.gather import embed, take
from ddtree.kernels.matmul import MOST_ROWS, Rounded, gated, interleave_gate_up, product, product_parts, suits
from ddtree.kernels.norm import add_norm, swiglu
from ddtree.kernels.pair import PairedProposal, PairFactors, lines_of, pair
from ddtree.kernels.penalty import Changed, HistoryStore, Penalties, penalize
from ddtree.kernels.qkv import HeadNorms, write_heads
from ddtree.kernels.report import report
from ddtree.kernels.select import propose, top_k

__all__ = [
    "MOST_ROWS",
    "Allowed",
    "AttentionRows",
    "AttentionWorkspace",
    "Changed",
    "HeadNorms",
    "HistoryStore",
    "Kept",
    "Lines",
    "PairFactors",
    "PairedProposal",
    "Penalties",
    "Plan",
    "PlanRow",
    "Rounded",
    "Tiles",
    "accept",
    "add_norm",
    "advance",
    "build",
    "choose",
    "commit",
    "embed",
    "gated",
    "interleave_gate_up",
    "lines_of",
    "locate",
    "pair",
    "penalize",
    "product",
    "product_parts",
    "propose",
    "report",
    "settle",
    "suits",
    "swiglu",
    "take",
    "top_k",
    "tree_attention",
    "write_heads",
]
