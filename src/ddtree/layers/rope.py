"""Rotary position embedding, on interleaved pairs."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ddtree.errors import UnsupportedModel
from ddtree.layers.fields import Fields


def interleave(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder rows of a query or key projection (or norm) so that rotary pairs (i, i + head_dim/2) lie side by side.

    Queries and keys are permuted alike, so their products are unchanged, and a pair becomes one complex number.
    weight: [heads * head_dim, ...] -> the same shape.
    """
    halves = weight.unflatten(0, (-1, 2, head_dim // 2))  # [heads, 2, hd/2, ...]
    return halves.transpose(1, 2).reshape(weight.shape)


class Rope:
    """Turns positions into unit complex numbers, and queries and keys by them."""

    def __init__(self, head_dim: int, theta: float, scaling: Mapping[str, Any] | None, device: torch.device) -> None:
        """scaling: Hugging Face's rope_parameters; types default, linear and llama3 are known, others are refused."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        self.inv_freq = _scale(1.0 / (theta**exponent), scaling or {}).to(device)  # [hd/2] float32

    def turns(self, positions: Tensor) -> Tensor:
        """positions: [...] int64, M in all -> [M, 1, hd/2] complex64."""
        angles = positions.reshape(-1, 1, 1).float() * self.inv_freq
        return torch.polar(torch.ones_like(angles), angles)

    @staticmethod
    def apply_(heads: Tensor, turns: Tensor) -> None:
        """Turn heads [M, heads, hd] float32 (interleaved pairs, dense in the last dimension) in place."""
        torch.view_as_complex(heads.unflatten(-1, (-1, 2))).mul_(turns)


def _scale(inv_freq: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return inv_freq
    if kind == "linear":
        return inv_freq / Fields(scaling, "rope_parameters").positive("factor")
    if kind == "llama3":
        return _llama3(inv_freq, scaling)
    raise UnsupportedModel(
        f"rope_type {kind!r} is not supported: default, linear and llama3 are", param="rope_parameters.rope_type"
    )


def _llama3(inv_freq: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's scaling: long wavelengths are divided by `factor`, short ones kept, those between blended."""
    fields = Fields(scaling, "rope_parameters")
    factor, context = fields.positive("factor"), fields.positive("original_max_position_embeddings")
    low, high = fields.positive("low_freq_factor"), fields.positive("high_freq_factor")
    wavelength = 2 * math.pi / inv_freq
    blend = ((context / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * inv_freq / factor + blend * inv_freq
