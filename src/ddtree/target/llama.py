"""Llama-type targets (Llama 2 and 3, SmolLM2), written for few rows on a CPU and for CUDA alike."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree import kernels
from ddtree.kernels import AttentionRows, Rounded, locate
from ddtree.kernels.backend import usable
from ddtree.layers import (
    DevicePlace,
    FewRows,
    GatedLinear,
    Heads,
    HostPlace,
    KVCache,
    Linear,
    Place,
    PromptPlace,
    RMSNorm,
    Rope,
    Workspaces,
    add_norm,
    interleave,
)
from ddtree.layers.fields import Fields, read_config
from ddtree.layers.weights import Weights, open_weights
from ddtree.target.base import TargetSpec
from ddtree.target.config import LlamaConfig
from ddtree.tree import Rows, unpack

FEW_ROWS = 64  # up to so many the kernels' products are as fast as the vendor's, or faster (docs/log.md)


@dataclass(frozen=True)
class _Layer:
    input_norm: RMSNorm
    qkv: Linear  # [H -> (heads + 2 kv_heads) * hd], query and key rows as interleaved rotary pairs
    out: Linear
    mlp_norm: RMSNorm
    gated: GatedLinear
    down: Linear


class LlamaTarget:
    """A Llama model. The residual stream is float32 in every dtype, so half precision rounds in the products alone."""

    def __init__(self, config: LlamaConfig, spec: TargetSpec, weights: Weights, invariant: bool = True) -> None:
        """invariant: see `load`."""
        self.config, self.spec, self.invariant = config, spec, invariant
        self.feature_layers: tuple[int, ...] = ()
        self.rope = Rope(config.head_dim, config.rope_theta, config.rope_scaling, spec.device)
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embedding = weights("model.embed_tokens.weight", vocab, hidden)
        self.norm = RMSNorm(weights("model.norm.weight", hidden), config.rms_norm_eps)
        self.lm_head = Linear(self.embedding if config.tied else weights("lm_head.weight", vocab, hidden))
        self.layers = [self._load_layer(i, weights) for i in range(config.num_layers)]
        self.heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self._turns: Tensor | None = None  # of all positions, for a device that reads positions itself
        self._work = Workspaces(invariant)

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, device: torch.device, invariant: bool = True) -> "LlamaTarget":
        """Load a Hugging Face folder.

        invariant: in half precision on a GPU, a row of `verify` has the same bits alone, on a chain, in any tree and
        in any batch; else what is fastest for the number of rows is taken. Elsewhere it changes nothing.
        Raises DDTreeError for anything missing, damaged or unsupported.
        """
        raw = read_config(folder)
        config = LlamaConfig.read(raw)
        spec = TargetSpec(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            max_position=config.max_position,
            end_ids=_end_ids(folder, raw),
            dtype=dtype,
            device=device,
        )
        with open_weights(folder, dtype, device) as weights:
            return cls(config, spec, weights, invariant)

    def _load_layer(self, index: int, weights: Weights) -> _Layer:
        c, at = self.config, f"model.layers.{index}."
        sizes = {"q": c.num_heads * c.head_dim, "k": c.num_kv_heads * c.head_dim, "v": c.num_kv_heads * c.head_dim}

        def norm(name: str) -> RMSNorm:
            return RMSNorm(weights(at + name, c.hidden_size), c.rms_norm_eps)

        def paired(part: str, tensor: Tensor) -> Tensor:
            return tensor if part == "v" else interleave(tensor, c.head_dim)

        def linear(name: str, rows: int, columns: int, biased: bool) -> Linear:
            bias = weights(f"{at}{name}.bias", rows) if biased else None
            return Linear(weights(f"{at}{name}.weight", rows, columns), bias)

        qkv = [paired(p, weights(f"{at}self_attn.{p}_proj.weight", n, c.hidden_size)) for p, n in sizes.items()]
        qkv_bias = None
        if c.attention_bias:
            qkv_bias = torch.cat([paired(p, weights(f"{at}self_attn.{p}_proj.bias", n)) for p, n in sizes.items()])
        gate, up = (weights(f"{at}mlp.{p}_proj.weight", c.intermediate_size, c.hidden_size) for p in ("gate", "up"))
        gate_up_bias = None
        if c.mlp_bias:
            gate_up_bias = torch.cat([weights(f"{at}mlp.{p}_proj.bias", c.intermediate_size) for p in ("gate", "up")])
        return _Layer(
            input_norm=norm("input_layernorm.weight"),
            qkv=Linear(torch.cat(qkv), qkv_bias),
            out=linear("self_attn.o_proj", c.hidden_size, sizes["q"], c.attention_bias),
            mlp_norm=norm("post_attention_layernorm.weight"),
            gated=GatedLinear(gate, up, gate_up_bias),
            down=linear("mlp.down_proj", c.hidden_size, c.intermediate_size, c.mlp_bias),
        )

    def tap(self, layers: tuple[int, ...]) -> None:
        """See Target.tap."""
        self.feature_layers = layers

    def allocate(self, slots: int, length: int) -> KVCache:
        """See Target.allocate."""
        c = self.config
        return KVCache.allocate(
            c.num_layers, slots, length, c.num_kv_heads, c.head_dim, self.spec.dtype, self.spec.device
        )

    def prefill(
        self, cache: KVCache, ids: Tensor, position: Tensor, last: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See Target.prefill."""
        n = ids.shape[1]
        if last is not None:
            hidden, features = self._forward(cache, ids[0], self._padded_place(cache, n, position), last)
            return features.unsqueeze(0), self.head(hidden)
        causal = torch.ones(1, n, n, dtype=torch.bool, device=ids.device).tril()
        segments = cache.segments(position.tolist(), [n])
        positions = position + torch.arange(n, device=ids.device)
        told = (segments, positions, self.rope, [causal], self.config.num_heads // self.config.num_kv_heads)
        if usable(ids.device):
            rows = AttentionRows(cache.slot, position)
            place: Place = PromptPlace(*told, rows=rows, turns=self._turns_of(cache.length))
        else:
            place = HostPlace(*told)
        hidden, features = self._forward(cache, ids[0], place, slice(-1, None))
        return features.unsqueeze(0), self.head(hidden)

    def verify(self, cache: KVCache, rows: Rows, position: Tensor) -> tuple[Tensor, Tensor]:
        """See Target.verify. On a CPU padding is not computed: its logits and features are 0."""
        batch, n = rows.tokens.shape
        if usable(rows.tokens.device):
            padded = self._device_place(cache, rows, position)
            hidden, features = self._forward(cache, rows.tokens.flatten(), padded)
            logits = self.lm_head(hidden, padded.few)
            return logits.unflatten(0, (batch, n)), features.unflatten(0, (batch, n))
        sizes = ((rows.parents >= 0).sum(1) + 1).tolist()
        real = [(b, slice(size)) for b, size in enumerate(sizes)]
        visible = unpack(rows.ancestors, n)
        place = HostPlace(
            cache.segments(position.tolist(), sizes),
            torch.cat([position[b] + rows.depths[b, :size] for b, size in enumerate(sizes)]),
            self.rope,
            [visible[b : b + 1, :size, :size] for b, size in enumerate(sizes)],
            self.config.num_heads // self.config.num_kv_heads,
        )
        hidden, features = self._forward(cache, torch.cat([rows.tokens[at] for at in real]), place)
        return _padded(self.head(hidden), sizes, n), _padded(features, sizes, n)

    def _device_place(self, cache: KVCache, rows: Rows, position: Tensor) -> DevicePlace:
        batch, n = rows.tokens.shape
        work = self._work.get(batch, n, self.heads, cache)
        where = AttentionRows(cache.slot, position, rows.depths, rows.ancestors)
        locate(where, work)
        few = self.invariant or batch * n <= FEW_ROWS
        return DevicePlace(where, self._turns_of(cache.length), work, few)

    def _padded_place(self, cache: KVCache, n: int, position: Tensor) -> DevicePlace:
        """One sequence's rows, each behind the one before it."""
        work = self._work.get(1, n, self.heads, cache)
        rows = AttentionRows(cache.slot, position, causal=True)
        return DevicePlace(rows, self._turns_of(cache.length), work, self.invariant or n <= FEW_ROWS)

    def _turns_of(self, length: int) -> Tensor:
        """The rotary turns of positions 0 .. length - 1, and maybe of some more."""
        if self._turns is None or len(self._turns) < length:
            self._turns = self.rope.turns(torch.arange(length, device=self.spec.device))
        return self._turns

    def commit(self, cache: KVCache, path: Tensor, position: Tensor) -> None:
        """See Target.commit."""
        cache.commit(path, position)

    def embed(self, ids: Tensor) -> Tensor:
        """See Target.embed."""
        if usable(ids.device):
            return kernels.embed(ids, self.embedding)
        return F.embedding(ids, self.embedding)

    def head(self, hidden: Tensor) -> Tensor:
        """See Target.head."""
        return self.lm_head(hidden, few=True)

    def draft_head(self, vocabulary: Tensor | None = None, rounded: bool = False) -> Callable[[Tensor], Tensor]:
        """The head that drafts are made with: of these tokens alone ([N] int64; None: all), rounded: in 8 bits.

        Either is a copy. Raises InvalidOption where the device's kernels cannot use 8 bits.
        """
        if vocabulary is None:
            return Linear(Rounded.of(self.lm_head.weight)) if rounded else self.head
        rows = self.embedding[vocabulary] if self.config.tied else self.lm_head.rows(vocabulary)
        return Linear(Rounded.of(rows)) if rounded else FewRows(Linear(rows))

    def _forward(
        self, cache: KVCache, ids: Tensor, place: Place, last: Tensor | slice | None = None
    ) -> tuple[Tensor, Tensor]:
        """All layers over rows of ids [M] int64: normed hidden states [M, H] (of the `last` row alone, where one is
        asked for), and features [M, F], both in the model's dtype."""
        dtype, few = self.spec.dtype, place.few
        x = self.embed(ids).float()  # [M, H], the residual stream
        features = x.new_empty(len(x), len(self.feature_layers) * x.shape[1], dtype=dtype)
        norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]  # after each layer
        states = add_norm(x, None, self.layers[0].input_norm, dtype)
        for index, (layer, norm) in enumerate(zip(self.layers, norms, strict=True)):
            query = place.project(cache, index, layer.qkv(states, few), self.heads)
            assert query is not None
            attended = place.attend(cache, index, query, None, False)
            kept = self._kept(index, features)
            if last is not None and norm is self.norm and kept is None:  # the cache holds all there is of the others
                x, attended, last = x[last], attended[last], None
            states = layer.out.add_norm(x, attended, layer.mlp_norm, dtype, None, few)
            states = layer.down.add_norm(x, layer.gated(states, few), norm, dtype, kept, few)
        return states if last is None else states[last], features

    def _kept(self, index: int, features: Tensor) -> Tensor | None:
        """Where the stream after layer `index` is kept, if a drafter asks for it."""
        if index not in self.feature_layers:
            return None
        size, at = self.config.hidden_size, self.feature_layers.index(index)
        return features[:, at * size : (at + 1) * size]


def _padded(rows: Tensor, sizes: list[int], width: int) -> Tensor:
    """rows [M, ...] of sequences one after another -> [B, width, ...]; a view where all are of this width."""
    if all(size == width for size in sizes):
        return rows.unflatten(0, (len(sizes), width))
    out = rows.new_zeros(len(sizes), width, *rows.shape[1:])
    for b, part in enumerate(rows.split(sizes)):
        out[b, : len(part)] = part
    return out


def _end_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids, from generation_config.json where there is one, else config.json."""
    if (folder / "generation_config.json").is_file():
        raw = raw | read_config(folder, "generation_config.json")
    fields = Fields(raw, "the model")
    if not fields.has("eos_token_id"):
        return ()
    many = isinstance(raw["eos_token_id"], list)
    return fields.integers("eos_token_id") if many else (fields.integer("eos_token_id"),)
