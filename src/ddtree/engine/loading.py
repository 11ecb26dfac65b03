"""Target and drafter as a configuration names them."""

from dataclasses import dataclass
from pathlib import Path

import torch

from ddtree import models
from ddtree.config import PAIRWISE, EngineConfig
from ddtree.drafter import DFlashDrafter, Drafter, PairwiseHead, choose_vocabulary
from ddtree.engine.device import choose_device, choose_dtype
from ddtree.errors import InvalidOption, UnsupportedModel
from ddtree.kernels.backend import usable
from ddtree.kernels.build import MOST_DEPTHS
from ddtree.target import LlamaTarget, Target

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Loaded:
    """What was loaded, and from where."""

    target: Target
    drafter: Drafter | None
    folder: Path  # of the target
    names: tuple[str, str | None]  # what target and drafter are called


def load_pair(config: EngineConfig) -> Loaded:
    """Resolve the names and load everything. Raises DDTreeError for whatever a user can mend."""
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    drafter_name = "none" if config.speculation.mode == "ar" and config.drafter == "auto" else config.drafter
    invariant, rounded = _invariant(config, device, dtype), _rounded(config, device, dtype, drafter_name)
    for name in ("draft_vocab", "draft_pairwise"):
        if drafter_name == "none" and (value := getattr(config, name)) != "auto":
            raise InvalidOption(
                f"{name} {value} needs a drafter, and none is loaded: leave it at auto, or choose a mode that drafts",
                param=name,
            )
    folder = models.resolve_model(config.model)
    drafter_folder = None if drafter_name == "none" else models.resolve_drafter(drafter_name, config.model)
    target = LlamaTarget.load(folder, dtype, device, invariant)
    drafter = None
    if drafter_folder is not None:
        sizes = (target.spec.vocab_size, target.spec.hidden_size, target.spec.num_layers)
        chosen = choose_vocabulary(config.draft_vocab, drafter_folder, target.spec.vocab_size)
        vocabulary = None if chosen is None else chosen.to(device)
        head = target.draft_head(vocabulary, rounded)
        drafter = DFlashDrafter.load(drafter_folder, target.embed, head, sizes, dtype, device, rounded, vocabulary)
        _check_depths(drafter, device)
        drafter.pairwise = _pairwise(config, drafter_folder, sizes, device)
    return Loaded(target, drafter, folder, (config.model, drafter_folder.name if drafter_folder else None))


def _check_depths(drafter: Drafter, device: torch.device) -> None:
    """Raises UnsupportedModel for blocks that are deeper than the kernels' trees."""
    if usable(device) and drafter.config.depths > MOST_DEPTHS:
        raise UnsupportedModel(
            f"block_size {drafter.config.block_size} of the drafter is not supported on {device}: it must be at most"
            f" {MOST_DEPTHS + 1}; use another drafter, or --device cpu",
            param="block_size",
        )


def _pairwise(
    config: EngineConfig, folder: Path, target_sizes: tuple[int, int, int], device: torch.device
) -> PairwiseHead | None:
    """The drafter's own head. Raises DamagedFile, DrafterMismatch, or InvalidOption where one is asked for in vain."""
    if config.draft_pairwise == "off":
        return None
    head = PairwiseHead.of_drafter(folder, target_sizes[0], target_sizes[1])
    if head is None and config.draft_pairwise == "on":
        raise InvalidOption(
            f"draft_pairwise on needs a pairwise head, and {folder} has no {PAIRWISE}: make one with `ddtree train"
            " pair`, or leave it at auto",
            param="draft_pairwise",
        )
    return None if head is None else head.to(device)


def _invariant(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether rounds keep a row's bits. Raises InvalidOption where nothing can be chosen."""
    if config.numerics != "auto" and not (usable(device) and dtype in HALVES):
        raise InvalidOption(
            f"numerics {config.numerics} is a choice in float16 and bfloat16 on a GPU, not in {_name(dtype)} on"
            f" {device}: leave it at auto",
            param="numerics",
        )
    return config.numerics != "fast"


def _rounded(config: EngineConfig, device: torch.device, dtype: torch.dtype, drafter_name: str) -> bool:
    """Whether drafts are made in 8 bits. Raises InvalidOption where they cannot."""
    if config.draft_dtype == "auto":
        return False
    if drafter_name == "none":
        raise InvalidOption(
            "draft_dtype int8 needs a drafter, and none is loaded: leave it at auto, or choose a mode that drafts",
            param="draft_dtype",
        )
    if not (usable(device) and dtype in HALVES):
        raise InvalidOption(
            f"draft_dtype int8 needs float16 or bfloat16 on a GPU, not {_name(dtype)} on {device}: leave it at auto",
            param="draft_dtype",
        )
    return True


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
