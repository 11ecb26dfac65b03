"""The parts that target and drafter are both made of."""

from ddtree.layers.attention import attend, attend_segments, attention_mask
from ddtree.layers.cache import KVCache, Segment
from ddtree.layers.linear import FewRows, GatedLinear, Linear, packs
from ddtree.layers.norm import RMSNorm, add_norm, swiglu
from ddtree.layers.place import DevicePlace, Heads, HostPlace, Place, PromptPlace, Workspaces
from ddtree.layers.rope import Rope, interleave

__all__ = [
    "DevicePlace",
    "FewRows",
    "GatedLinear",
    "Heads",
    "HostPlace",
    "KVCache",
    "Linear",
    "Place",
    "PromptPlace",
    "RMSNorm",
    "Rope",
    "Segment",
    "Workspaces",
    "add_norm",
    "attend",
    "attend_segments",
    "attention_mask",
    "interleave",
    "packs",
    "swiglu",
]
