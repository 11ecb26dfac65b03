"""DFlash written a second time: slow, in float64, from scratch every time, without a cache; and small checkpoints.

Source: DFlash (arXiv 2602.06036). Rotary pairs are halves, attention is a softmax over [context; block] in full.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

CPU = torch.device("cpu")
VOCAB, HIDDEN, TARGET_LAYERS = 61, 32, 6
BASE: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 512,
    "num_target_layers": TARGET_LAYERS,
    "block_size": 6,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 4]},
}


def change(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` to a configuration; a value of `...` removes a field, a mapping for dflash_config changes its."""
    merged = dict(raw)
    for name, value in changes.items():
        if value is ...:
            merged.pop(name)
        elif name == "dflash_config" and isinstance(value, Mapping):
            merged[name] = change(raw[name], value)
        else:
            merged[name] = value
    return merged


def random_tensors(raw: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Weights of a checkpoint with these sizes, all of them random, norms and biases too."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, dim = raw["hidden_size"], raw["intermediate_size"], raw["head_dim"]
    sizes = {"q": raw["num_attention_heads"] * dim, "k": raw["num_key_value_heads"] * dim}
    sizes["v"] = sizes["k"]
    out: dict[str, Tensor] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        out[f"{name}.weight"] = torch.randn(rows, columns, generator=generator) * columns**-0.5
        if raw["attention_bias"] and "self_attn" in name:
            out[f"{name}.bias"] = torch.randn(rows, generator=generator) * 0.5

    def norm(name: str, size: int, low: float = 0.5) -> None:
        out[f"{name}.weight"] = torch.rand(size, generator=generator) + low

    matrix("fc", hidden, hidden * len(raw["dflash_config"]["target_layer_ids"]))
    norm("hidden_norm", hidden)
    norm("norm", hidden)
    for at in (f"layers.{i}" for i in range(raw["num_hidden_layers"])):
        for part, rows in sizes.items():
            matrix(f"{at}.self_attn.{part}_proj", rows, hidden)
        matrix(f"{at}.self_attn.o_proj", hidden, sizes["q"])
        for name in ("q_norm", "k_norm"):
            norm(f"{at}.self_attn.{name}", dim, low=1.0)
        for name in ("input_layernorm", "post_attention_layernorm"):
            norm(f"{at}.{name}", hidden)
        for name in ("gate", "up"):
            matrix(f"{at}.mlp.{name}_proj", inner, hidden)
        matrix(f"{at}.mlp.down_proj", hidden, inner)
    return out


def save_checkpoint(folder: Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write a folder as z-lab's are."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


class Reference:
    """The drafter's logits for one sequence. `windows` and `causal` say per layer what the file should mean."""

    def __init__(
        self,
        raw: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        embedding: Tensor,
        head: Tensor,
        windows: Sequence[int | None],
        causal: Sequence[bool],
        theta: float,
    ) -> None:
        self.raw, self.weights = raw, {name: tensor.double() for name, tensor in tensors.items()}
        self.embedding, self.head = embedding.double(), head.double()
        self.windows, self.causal, self.theta = windows, causal, theta
        self.options = {**raw, **raw["dflash_config"]}

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        size = x.shape[-1]
        return F.rms_norm(x, (size,), self.weights[f"{name}.weight"], self.raw["rms_norm_eps"])

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, heads, dim]; component i is paired with i + dim / 2."""
        dim = x.shape[-1]
        freq = self.theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angle = positions.double()[:, None, None] * torch.cat([freq, freq])
        first, second = x.chunk(2, -1)
        return x * angle.cos() + torch.cat([-second, first], -1) * angle.sin()

    def _attention(self, index: int, context: Tensor, states: Tensor) -> Tensor:
        """context [P, H] fused features; states [b, H] normalised block states."""
        at, dim, heads = f"layers.{index}.self_attn", self.raw["head_dim"], self.raw["num_attention_heads"]
        start, block = len(context), len(states)
        both = torch.cat([context, states])
        key_at, query_at = torch.arange(start + block), torch.arange(start, start + block)
        query = self._norm(f"{at}.q_norm", self._linear(f"{at}.q_proj", states).unflatten(-1, (-1, dim)))
        key = self._norm(f"{at}.k_norm", self._linear(f"{at}.k_proj", both).unflatten(-1, (-1, dim)))
        value = self._linear(f"{at}.v_proj", both).unflatten(-1, (-1, dim))
        query, key = self._rotate(query, query_at), self._rotate(key, key_at)
        groups = heads // self.raw["num_key_value_heads"]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(dim)
        away = query_at[:, None] - key_at
        hidden_keys = torch.zeros_like(away, dtype=torch.bool)
        if self.causal[index]:
            hidden_keys |= away < 0
        window = self.windows[index]
        if window is not None:
            hidden_keys |= away.abs() >= window
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden_keys, -torch.inf).softmax(-1), value)
        return self._linear(f"{at}.o_proj", mixed.flatten(1))

    def __call__(self, features: Tensor, root: int) -> Tensor:
        """features [P, taps * H] of all positions before the root -> logits [block - 1, V]."""
        block, mask = self.options["block_size"], self.options["mask_token_id"]
        context = self._norm("hidden_norm", self._linear("fc", features.double()))
        x = self.embedding[torch.tensor([root] + [mask] * (block - 1))]
        x = x * self.options.get("input_embedding_scale", 1.0)
        for index in range(self.raw["num_hidden_layers"]):
            at = f"layers.{index}"
            x = x + self._attention(index, context, self._norm(f"{at}.input_layernorm", x))
            states = self._norm(f"{at}.post_attention_layernorm", x)
            gate = F.silu(self._linear(f"{at}.mlp.gate_proj", states))
            x = x + self._linear(f"{at}.mlp.down_proj", gate * self._linear(f"{at}.mlp.up_proj", states))
        logits = self._norm("norm", x[1:]) @ self.head.T
        logits = logits * self.options.get("output_multiplier", 1.0)
        cap = self.options.get("final_logit_softcapping")
        return logits if not cap else cap * torch.tanh(logits / cap)


def assert_near(ours: Tensor, theirs: Tensor, tolerance: float = 1e-4) -> None:
    """The largest difference, relative to the largest value of the reference."""
    assert ours.shape == theirs.shape
    difference = float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())
    assert difference < tolerance, f"relative difference {difference:.2e}"
