"""What an engine says of itself."""

import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch

from ddtree import __version__
from ddtree.config import EngineConfig, Speculation
from ddtree.drafter import Drafter
from ddtree.engine.loading import HALVES
from ddtree.engine.slots import SlotStore
from ddtree.kernels.backend import usable
from ddtree.layers import packs
from ddtree.target import Target


def describe(
    config: EngineConfig,
    target: Target,
    drafter: Drafter | None,
    names: tuple[str, str | None],
    speculation: Speculation,
    store: SlotStore,
    max_model_len: int,
) -> dict[str, Any]:
    """What is loaded and what runs it, as plain values.

    names: of the target and the drafter; speculation: the engine's own, settled; max_model_len: in tokens.
    """
    spec = target.spec
    return {
        "model": names[0],
        "drafter": names[1],
        "device": str(spec.device),
        "dtype": str(spec.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "linear": "packed" if packs(spec.device.type, spec.dtype) else "plain",
        "rounds": rounds_of(config, target),
        "tree_context": speculation.tree_context,
        "numerics": _numerics(config, target),
        **_draft_side(config, target, drafter),
        "max_model_len": max_model_len,
        "max_running_requests": store.count,
        "max_tree_budget": config.largest_budget,
        "speculation": asdict(speculation),
        "prefix_caching": config.prefix_caching,
        "memory": store.plan.facts() if store.plan else None,
        "versions": {
            "ddtree": __version__,
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "python": platform.python_version(),
        },
    }


def rounds_of(config: EngineConfig, target: Target) -> str:
    """Who runs the rounds: the host, the device by its kernels, or the device as CUDA graphs."""
    if not usable(target.spec.device):
        return "host"
    return "graphs" if config.cuda_graphs and target.spec.device.type == "cuda" else "kernels"


def _numerics(config: EngineConfig, target: Target) -> str:
    """Whether a row's bits depend on its company: "plain" promises nothing (docs/log.md has what was seen)."""
    if not (usable(target.spec.device) and target.spec.dtype in HALVES):
        return "plain"
    return "fast" if config.numerics == "fast" else "invariant"


def _draft_side(config: EngineConfig, target: Target, drafter: Drafter | None) -> dict[str, Any]:
    """Its weights' dtype, the number of tokens that drafts are made of, or "full", and whether pairs are scored."""
    if drafter is None:
        return dict.fromkeys(("draft_dtype", "draft_vocab", "draft_pairwise"))
    dtype = str(target.spec.dtype).removeprefix("torch.")
    return {
        "draft_dtype": dtype if config.draft_dtype == "auto" else config.draft_dtype,
        "draft_vocab": "full" if drafter.vocabulary is None else len(drafter.vocabulary),
        "draft_pairwise": "off" if drafter.pairwise is None else "on",
    }
