"""The configuration of a drafter to be trained, in z-lab's form, and its first weights."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddtree import models
from ddtree.drafter import DrafterConfig
from ddtree.errors import InvalidOption
from ddtree.layers.fields import read_config
from ddtree.target.base import TargetSpec
from ddtree.training.config import DrafterPart
from ddtree.training.model import DraftModel
from ddtree.training.shards import Chat


def choose(part: DrafterPart, model: str, spec: TargetSpec) -> tuple[dict[str, Any], Path | None]:
    """The JSON of config.json, its mask token -1 where it is to be chosen, and the folder that weights come from.

    Raises DDTreeError where the drafter would not fit the target.
    """
    if part.init:
        folder = models.resolve_drafter(part.init, model)
        if folder is None:
            raise InvalidOption(f"drafter.init {part.init!r} names no drafter: give a folder, or leave it empty")
        return read_config(folder), folder
    return new(part, spec), None


def new(part: DrafterPart, spec: TargetSpec) -> dict[str, Any]:
    """The JSON of a new drafter for a target."""
    hidden = spec.hidden_size
    heads = part.heads or max(hidden // part.head_dim, 1)
    kv_heads = part.kv_heads or next((heads // n for n in (4, 3) if heads % n == 0), heads)
    if heads % kv_heads:
        raise InvalidOption(f"drafter.kv_heads is {kv_heads}: it must divide the {heads} heads")
    inner = part.intermediate_size or -(-hidden * 8 // 3 // 64) * 64
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": part.head_dim,
        "num_hidden_layers": part.layers,
        "num_target_layers": spec.num_layers,
        "rms_norm_eps": 1e-5,
        "rope_theta": part.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": part.rope_theta},
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": part.layers,
        "layer_types": ["full_attention"] * part.layers,
        "block_size": part.block_size,
        "initializer_range": 0.02,
        "dflash_config": {"mask_token_id": part.mask_token_id, "target_layer_ids": taps(part, spec.num_layers)},
    }


def taps(part: DrafterPart, layers: int) -> list[int]:
    """Those named, else evenly spaced from layer 1 to the third last, as z-lab's drafters have them."""
    if part.tap_layers:
        return list(part.tap_layers)
    low, high = min(1, layers - 1), max(layers - 3, min(1, layers - 1))
    if part.taps == 1:
        return [high]
    found = sorted({low + round(i * (high - low) / (part.taps - 1)) for i in range(part.taps)})
    if len(found) < part.taps:
        raise InvalidOption(
            f"drafter.taps is {part.taps}, and the target has only {len(found)} layers for them: lower it"
        )
    return found


def choose_mask(raw: dict[str, Any], chats: Iterable[Chat], special: Iterable[int], spec: TargetSpec) -> None:
    """Put the mask token in where it is -1: a special token that no chat has, else the highest id that none has."""
    if raw["dflash_config"]["mask_token_id"] >= 0:
        return
    seen = np.zeros(spec.vocab_size, bool)
    for chat in chats:
        seen[chat.ids] = True
    used = {*np.flatnonzero(seen).tolist(), *spec.end_ids}
    free = [i for i in special if i not in used and i < spec.vocab_size]
    free = free or [i for i in range(spec.vocab_size - 1, -1, -1) if i not in used][:1]
    if not free:
        raise InvalidOption("every token occurs in the data: name one as drafter.mask_token_id")
    raw["dflash_config"]["mask_token_id"] = free[0]


def build(raw: dict[str, Any], folder: Path | None, spec: TargetSpec, seed: int) -> DraftModel:
    """The module, random or with a folder's weights. Raises DrafterMismatch where it does not fit the target."""
    config = DrafterConfig.read(raw)
    config.check_fits(spec.vocab_size, spec.hidden_size, spec.num_layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DraftModel(config) if folder is None else DraftModel.read(config, folder)


@torch.no_grad()
def calm(model: DraftModel, head: Tensor) -> None:
    """Scale the last norm of a new drafter so that its first logits have a spread of about 1; head: [V, H].

    With SmolLM2's head the loss begins at 20 so, with a norm of 1 at 52 (a guess among all tokens: 10.8).
    """
    model.norm.weight.fill_(1.0 / float(head.float().norm(dim=1).mean()))
