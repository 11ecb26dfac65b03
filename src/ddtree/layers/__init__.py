"""The parts that target and drafter are both made of."""

from ddtree.layers.attention import attend, attend_segments, attention_mask
from ddtree.layers.cache import KVCache, Segment
from ddtree.layers.linear import Linear, packs
from ddtree.layers.norm import RMSNorm
from ddtree.layers.rope import Rope, interleave

__all__ = [
    "KVCache",
    "Linear",
    "RMSNorm",
    "Rope",
    "Segment",
    "attend",
    "attend_segments",
    "attention_mask",
    "interleave",
    "packs",
]
