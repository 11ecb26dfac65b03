"""Prefill, verify rows under an ancestor mask, commit a path; lends its embedding and its head."""

from ddtree.target.base import Target, TargetSpec
from ddtree.target.llama import LlamaTarget

__all__ = ["LlamaTarget", "Target", "TargetSpec"]
