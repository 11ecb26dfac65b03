"""The DFlash drafter: target features and the root token in, per-depth logits out.

Source: DFlash (arXiv 2602.06036) and z-lab's checkpoints. The layers are Qwen3's; embedding and head are the target's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ddtree import kernels
from ddtree.drafter.config import DrafterConfig
from ddtree.drafter.pairwise import PairwiseHead
from ddtree.kernels import AttentionRows, Rounded
from ddtree.kernels.backend import usable
from ddtree.layers import (
    DevicePlace,
    GatedLinear,
    Heads,
    HostPlace,
    KVCache,
    Linear,
    Place,
    RMSNorm,
    Rope,
    Workspaces,
    add_norm,
    interleave,
)
from ddtree.layers.fields import read_config
from ddtree.layers.weights import Weights, open_weights


@dataclass(frozen=True)
class _Layer:
    input_norm: RMSNorm
    query: Linear
    key_value: Linear  # one projection for context features and block states alike
    joint: Linear | None  # query and key_value in one, for a block; the same memory
    query_norm: RMSNorm
    key_norm: RMSNorm
    out: Linear
    mlp_norm: RMSNorm
    gated: GatedLinear
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
        rounded: bool = False,
        vocabulary: Tensor | None = None,
    ) -> None:
        """embed and head are the target's: ids [...] -> [..., H], and [M, H] -> [M, V].

        vocabulary: the token ids [V] int64, ascending, whose rows of the head `head` has; None: all.

        rounded: keep the matrices in 8 bits. Drafts may differ by it, answers not. Raises InvalidOption where
        the device's kernels cannot.
        """
        c = self.config = config
        self._embed, self._head, self._rounded, self.vocabulary = embed, head, rounded, vocabulary
        fuse = weights("fc.weight", c.hidden_size, c.hidden_size * len(c.target_layer_ids))
        self.dtype, self.device = fuse.dtype, fuse.device
        self.fuse = Linear(self._kept(fuse))
        self.context_norm = RMSNorm(weights("hidden_norm.weight", c.hidden_size), c.rms_norm_eps)
        self.norm = RMSNorm(weights("norm.weight", c.hidden_size), c.rms_norm_eps)
        self.rope = Rope(c.head_dim, c.rope_theta, c.rope_scaling, self.device)
        self.layers = [self._load_layer(f"layers.{i}.", weights) for i in range(c.num_layers)]
        self.pairwise: PairwiseHead | None = None  # laid in by who has one
        self._turns: Tensor | None = None  # of all positions, for a device that reads positions itself
        self._work = Workspaces()
        self._blocks: dict[int, Tensor] = {}  # the ids of B blocks, the first of each written anew

    @classmethod
    def load(
        cls,
        folder: Path,
        embed: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        target_sizes: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        rounded: bool = False,
        vocabulary: Tensor | None = None,
    ) -> "DFlashDrafter":
        """Load a z-lab folder for a target of `target_sizes` (vocabulary, hidden size, layers); rounded: in 8 bits.

        head and vocabulary belong together: see the constructor, and LlamaTarget.draft_head.

        Raises DDTreeError for anything missing, damaged, unsupported or made for another target.
        """
        config = DrafterConfig.read(read_config(folder))
        config.check_fits(*target_sizes)
        with open_weights(folder, dtype, device) as weights:
            return cls(config, weights, embed, head, rounded, vocabulary)

    def _load_layer(self, at: str, weights: Weights) -> _Layer:
        c = self.config
        rows = {"q": c.num_heads * c.head_dim, "k": c.num_kv_heads * c.head_dim, "v": c.num_kv_heads * c.head_dim}

        parts = [(p, f"{at}self_attn.{p}_proj.") for p in "qkv"]
        weight = torch.cat([_paired(p, weights(f"{n}weight", rows[p], c.hidden_size), c.head_dim) for p, n in parts])
        bias = None
        if c.attention_bias:
            bias = torch.cat([_paired(p, weights(f"{n}bias", rows[p]), c.head_dim) for p, n in parts])

        kept = self._kept(weight)

        def projection(part: slice) -> Linear:
            return Linear(kept[part], None if bias is None else bias[part])

        def norm(name: str, size: int) -> RMSNorm:
            return RMSNorm(weights(f"{at}{name}.weight", size), c.rms_norm_eps)

        def head_norm(name: str) -> RMSNorm:
            weight = weights(f"{at}self_attn.{name}.weight", c.head_dim)
            return RMSNorm(interleave(weight, c.head_dim), c.rms_norm_eps)

        gate, up = (weights(f"{at}mlp.{p}_proj.weight", c.intermediate_size, c.hidden_size) for p in ("gate", "up"))
        return _Layer(
            input_norm=norm("input_layernorm", c.hidden_size),
            query=projection(slice(rows["q"])),
            key_value=projection(slice(rows["q"], None)),
            joint=projection(slice(None)) if usable(weight.device) else None,
            query_norm=head_norm("q_norm"),
            key_norm=head_norm("k_norm"),
            out=Linear(
                self._kept(weights(f"{at}self_attn.o_proj.weight", c.hidden_size, rows["q"])),
                weights(f"{at}self_attn.o_proj.bias", c.hidden_size) if c.attention_bias else None,
            ),
            mlp_norm=norm("post_attention_layernorm", c.hidden_size),
            gated=GatedLinear(gate, up, rounded=self._rounded),
            down=Linear(self._kept(weights(f"{at}mlp.down_proj.weight", c.hidden_size, c.intermediate_size))),
        )

    def _kept(self, weight: Tensor) -> Tensor | Rounded:
        return Rounded.of(weight) if self._rounded else weight

    def allocate(self, slots: int, length: int) -> KVCache:
        """See Drafter.allocate."""
        c = self.config
        return KVCache.allocate(c.num_layers, slots, length, c.num_kv_heads, c.head_dim, self.dtype, self.device)

    def append(self, cache: KVCache, features: Tensor, position: Tensor, counts: Sequence[int] | None = None) -> None:
        """See Drafter.append. On a GPU all M are computed; what lies behind `counts` is scratch there."""
        batch, longest, _ = features.shape
        if usable(features.device):
            new, place = features.flatten(0, 1), self._device_place(cache, batch, longest, position, attends=False)
        else:
            counts = counts or [longest] * batch
            new = torch.cat([features[b, :count] for b, count in enumerate(counts)])  # [M, taps * H]
            place = self._host_place(cache, position, counts)
        fused = self._fused(new, place.few)
        for index, layer in enumerate(self.layers):
            place.project(cache, index, layer.key_value(fused, place.few), self._heads(layer, queries=False, kv=True))

    def propose(self, cache: KVCache, root: Tensor, position: Tensor, depths: int) -> Tensor:
        """See Drafter.propose; depths is at most block_size - 1."""
        return self.score(self.states(cache, root, position, depths))

    def score(self, states: Tensor) -> Tensor:
        """See Drafter.score."""
        return self._logits(states.flatten(0, 1)).unflatten(0, states.shape[:2])

    def states(self, cache: KVCache, root: Tensor, position: Tensor, depths: int) -> Tensor:
        """See Drafter.states.

        The whole block is computed, as the drafter was trained; only the head is spared the depths that no tree of the
        budget can reach.
        """
        c, dtype = self.config, self.dtype
        batch, block = root.shape[0], c.block_size
        if batch not in self._blocks:
            self._blocks[batch] = torch.full((batch, block), c.mask_token_id, dtype=torch.int64, device=self.device)
        ids = self._blocks[batch]
        ids[:, 0] = root
        x = self._embed(ids).flatten(0, 1).float()  # [B * b, H], the residual stream
        if c.input_embedding_scale != 1.0:
            x *= c.input_embedding_scale
        if usable(self.device):
            place: Place = self._device_place(cache, batch, block, position, attends=True)
        else:
            place = self._host_place(cache, position, [block] * batch)
        norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]  # after each layer
        states = add_norm(x, None, self.layers[0].input_norm, dtype)
        for index, (layer, norm) in enumerate(zip(self.layers, norms, strict=True)):
            query = self._project(place, cache, index, states)
            attended = place.attend(cache, index, query, c.windows[index], c.causal[index])
            states = layer.out.add_norm(x, attended, layer.mlp_norm, dtype, None, place.few)
            states = layer.down.add_norm(x, layer.gated(states, place.few), norm, dtype, None, place.few)
        return states.unflatten(0, (batch, block))[:, 1 : depths + 1]

    def _fused(self, features: Tensor, few: bool) -> Tensor:
        """features [M, taps * H] -> [M, H]: what the layers take for the context."""
        fused = self.fuse(features, few)
        if usable(fused.device):
            return kernels.add_norm(fused, None, self.context_norm.scale, self.context_norm.squares, self.dtype)
        return self.context_norm(fused.float(), self.dtype)

    def _project(self, place: Place, cache: KVCache, index: int, states: Tensor) -> Tensor:
        """The queries of a block's states [M, H]; keys and values go into the cache."""
        layer = self.layers[index]
        if layer.joint is not None:
            query = place.project(
                cache, index, layer.joint(states, place.few), self._heads(layer, queries=True, kv=True)
            )
        else:
            place.project(cache, index, layer.key_value(states, place.few), self._heads(layer, queries=False, kv=True))
            query = place.project(
                None, index, layer.query(states, place.few), self._heads(layer, queries=True, kv=False)
            )
        assert query is not None
        return query

    def _heads(self, layer: _Layer, *, queries: bool, kv: bool) -> Heads:
        c = self.config
        return Heads(
            c.num_heads if queries else 0, c.num_kv_heads if kv else 0, c.head_dim, layer.query_norm, layer.key_norm
        )

    def _host_place(self, cache: KVCache, position: Tensor, sizes: Sequence[int]) -> Place:
        """Consecutive positions of each sequence, from its own."""
        segments = cache.segments(position.tolist(), sizes)
        positions = torch.cat([torch.arange(s.start, s.span, device=self.device) for s in segments])
        return HostPlace(segments, positions, self.rope, None, self.config.num_heads // self.config.num_kv_heads)

    def _device_place(self, cache: KVCache, batch: int, rows: int, position: Tensor, *, attends: bool) -> Place:
        c = self.config
        if self._turns is None or len(self._turns) < cache.length:
            self._turns = self.rope.turns(torch.arange(cache.length, device=self.device))
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        work = self._work.get(batch, rows, heads, cache) if attends else None
        few = batch * rows <= kernels.MOST_ROWS  # else a prompt's; a draft's bits are nobody's output
        return DevicePlace(AttentionRows(cache.slot, position), self._turns, work, few)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self._head(hidden)
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap


def _paired(part: str, tensor: Tensor, head_dim: int) -> Tensor:
    """Queries and keys as interleaved rotary pairs; values as they are."""
    return tensor if part == "v" else interleave(tensor, head_dim)
