"""The DFlash drafter: target features and the root token in, per-depth logits out.

Source: DFlash (arXiv 2602.06036) and z-lab's checkpoints. The layers are Qwen3's; embedding and head are the target's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree.drafter.config import DrafterConfig
from ddtree.layers import KVCache, Linear, RMSNorm, Rope, Segment, attend_segments, attention_mask, interleave
from ddtree.layers.fields import read_config
from ddtree.layers.weights import Weights, open_weights


@dataclass(frozen=True)
class _Layer:
    input_norm: RMSNorm
    query: Linear
    key_value: Linear  # one projection for context features and block states alike
    query_norm: RMSNorm
    key_norm: RMSNorm
    out: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear


class DFlashDrafter:
    """One block per round: [root, MASK, ...] at positions p .. p + b - 1; slots 1 .. b - 1 predict their own positions.

    The cache holds keys and values of the committed context only (features of positions before the root); the block's
    own go into scratch slots behind it and are overwritten by the next append.
    """

    def __init__(
        self,
        config: DrafterConfig,
        weights: Weights,
        embed: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
    ) -> None:
        """embed and head are the target's: ids [...] -> [..., H], and [M, H] -> [M, V]."""
        c = self.config = config
        self._embed, self._head = embed, head
        self.fuse = Linear(weights("fc.weight", c.hidden_size, c.hidden_size * len(c.target_layer_ids)))
        self.context_norm = RMSNorm(weights("hidden_norm.weight", c.hidden_size), c.rms_norm_eps)
        self.norm = RMSNorm(weights("norm.weight", c.hidden_size), c.rms_norm_eps)
        self.dtype, self.device = self.fuse.weight.dtype, weights("norm.weight", c.hidden_size).device
        self.rope = Rope(c.head_dim, c.rope_theta, c.rope_scaling, self.device)
        self.layers = [self._load_layer(f"layers.{i}.", weights) for i in range(c.num_layers)]

    @classmethod
    def load(
        cls,
        folder: Path,
        embed: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        target_sizes: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> "DFlashDrafter":
        """Load a z-lab folder for a target of `target_sizes` (vocabulary, hidden size, layers).

        Raises DDTreeError for anything missing, damaged, unsupported or made for another target.
        """
        config = DrafterConfig.read(read_config(folder))
        config.check_fits(*target_sizes)
        with open_weights(folder, dtype, device) as weights:
            return cls(config, weights, embed, head)

    def _load_layer(self, at: str, weights: Weights) -> _Layer:
        c = self.config
        rows = {"q": c.num_heads * c.head_dim, "k": c.num_kv_heads * c.head_dim, "v": c.num_kv_heads * c.head_dim}

        def projection(parts: str) -> Linear:
            names = [(p, f"{at}self_attn.{p}_proj.") for p in parts]
            weight = [_paired(p, weights(f"{n}weight", rows[p], c.hidden_size), c.head_dim) for p, n in names]
            bias = None
            if c.attention_bias:
                bias = torch.cat([_paired(p, weights(f"{n}bias", rows[p]), c.head_dim) for p, n in names])
            return Linear(torch.cat(weight), bias)

        def norm(name: str, size: int) -> RMSNorm:
            return RMSNorm(weights(f"{at}{name}.weight", size), c.rms_norm_eps)

        def head_norm(name: str) -> RMSNorm:
            weight = weights(f"{at}self_attn.{name}.weight", c.head_dim)
            return RMSNorm(interleave(weight, c.head_dim), c.rms_norm_eps)

        gate_up = [weights(f"{at}mlp.{p}_proj.weight", c.intermediate_size, c.hidden_size) for p in ("gate", "up")]
        return _Layer(
            input_norm=norm("input_layernorm", c.hidden_size),
            query=projection("q"),
            key_value=projection("kv"),
            query_norm=head_norm("q_norm"),
            key_norm=head_norm("k_norm"),
            out=Linear(
                weights(f"{at}self_attn.o_proj.weight", c.hidden_size, rows["q"]),
                weights(f"{at}self_attn.o_proj.bias", c.hidden_size) if c.attention_bias else None,
            ),
            mlp_norm=norm("post_attention_layernorm", c.hidden_size),
            gate_up=Linear(torch.cat(gate_up)),
            down=Linear(weights(f"{at}mlp.down_proj.weight", c.hidden_size, c.intermediate_size)),
        )

    def allocate(self, slots: int, length: int) -> KVCache:
        """See Drafter.allocate."""
        c = self.config
        return KVCache.allocate(c.num_layers, slots, length, c.num_kv_heads, c.head_dim, self.dtype, self.device)

    def append(self, cache: KVCache, features: Tensor, position: Tensor, counts: Sequence[int] | None = None) -> None:
        """See Drafter.append."""
        batch, longest, _ = features.shape
        counts = counts or [longest] * batch
        segments = cache.segments(position.tolist(), counts)
        new = torch.cat([features[b, :count] for b, count in enumerate(counts)])  # [M, taps * H]
        fused = self.context_norm(self.fuse(new).float(), self.dtype)  # [M, H]
        turns = self._turns(segments)
        for index, layer in enumerate(self.layers):
            cache.write(index, segments, self._key_value(layer, fused, turns))

    def propose(self, cache: KVCache, root: Tensor, position: Tensor, depths: int) -> Tensor:
        """See Drafter.propose; depths is at most block_size - 1.

        The whole block is computed, as the drafter was trained; only the head is spared the depths that no tree of the
        budget can reach.
        """
        c = self.config
        batch, block = root.shape[0], c.block_size
        ids = torch.full((batch, block), c.mask_token_id, dtype=torch.int64, device=self.device)
        ids[:, 0] = root
        x = self._embed(ids).flatten(0, 1).float() * c.input_embedding_scale  # [B * b, H]
        segments = cache.segments(position.tolist(), [block] * batch)
        turns, masks = self._turns(segments), self._masks(segments)
        for index, layer in enumerate(self.layers):
            states = layer.input_norm(x, self.dtype)
            cache.write(index, segments, self._key_value(layer, states, turns))
            query = layer.query_norm(layer.query(states).float().unflatten(-1, (-1, c.head_dim)), torch.float32)
            self.rope.apply_(query, turns)
            mask = masks[c.windows[index], c.causal[index]]
            x = x + layer.out(attend_segments(query.to(self.dtype), cache, index, segments, mask))
            gate, up = layer.gate_up(layer.mlp_norm(x, self.dtype)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        slots = x.unflatten(0, (batch, block))[:, 1 : depths + 1].flatten(0, 1)
        return self._logits(self.norm(slots, self.dtype)).unflatten(0, (batch, depths))

    def _turns(self, segments: Sequence[Segment]) -> Tensor:
        """Rotary turns of the segments' rows, which stand at consecutive positions: [M, 1, hd/2] complex64."""
        return self.rope.turns(torch.cat([torch.arange(s.start, s.span, device=self.device) for s in segments]))

    def _key_value(self, layer: _Layer, states: Tensor, turns: Tensor) -> Tensor:
        """states [M, H] -> keys' heads, then values' [M, 2 * kv_heads, hd] float32."""
        heads = layer.key_value(states).float().unflatten(-1, (-1, self.config.head_dim))
        keys, values = heads.chunk(2, 1)
        keys = layer.key_norm(keys, torch.float32)
        self.rope.apply_(keys, turns)
        return torch.cat([keys, values], 1)

    def _masks(self, segments: Sequence[Segment]) -> dict[tuple[int | None, bool], list[Tensor | None]]:
        """Attention masks by kind of layer, one per segment."""
        c = self.config
        block = torch.ones(1, c.block_size, c.block_size, dtype=torch.bool, device=self.device)
        kinds: set[tuple[int | None, bool]] = set(zip(c.windows, c.causal, strict=True))
        groups = c.num_heads // c.num_kv_heads
        starts = torch.tensor([s.start for s in segments], device=self.device)
        return {
            (window, causal): [
                attention_mask(starts[i : i + 1], block.tril() if causal else block, s.span, self.dtype, groups, window)
                for i, s in enumerate(segments)
            ]
            for window, causal in kinds
        }

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self._head(hidden)
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap


def _paired(part: str, tensor: Tensor, head_dim: int) -> Tensor:
    """Queries and keys as interleaved rotary pairs; values as they are."""
    return tensor if part == "v" else interleave(tensor, head_dim)
