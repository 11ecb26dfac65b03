"""A z-lab DFlash configuration, every field honoured or refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddtree.errors import DamagedFile, DrafterMismatch, UnsupportedModel
from ddtree.layers.fields import Fields

ARCHITECTURES = ("DFlashDraftModel",)
MAX_BLOCK = 1024  # published drafters have 8 to 32
# How far two vocabulary sizes may differ and still be one vocabulary, padded for two machines (152064 and 152576).
_MAX_PADDING = 1024


@dataclass(frozen=True)
class DrafterConfig:
    """The fields of a DFlash checkpoint that change what is computed.

    Source: z-lab's config.json files; some fields stand at the top level in one file and in `dflash_config` in another.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any]
    max_position: int
    attention_bias: bool
    block_size: int  # the root's slot included, so block_size - 1 depths
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    windows: tuple[int | None, ...]  # per layer: sliding window, or None for full attention
    causal: tuple[bool, ...]  # per layer: causal inside the block
    output_multiplier: float
    final_logit_softcapping: float | None
    input_embedding_scale: float

    @property
    def depths(self) -> int:
        """Positions a block proposes."""
        return self.block_size - 1

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "DrafterConfig":
        """Read the JSON of config.json. Raises UnsupportedModel or DamagedFile, naming the field."""
        architectures = raw.get("architectures") or []
        if not isinstance(architectures, list) or not any(name in ARCHITECTURES for name in architectures):
            raise UnsupportedModel(
                f"architectures {architectures!r} is not a drafter that is supported: {', '.join(ARCHITECTURES)} is",
                param="architectures",
            )
        nested = raw.get("dflash_config")
        fields = Fields({**raw, **(nested if isinstance(nested, Mapping) else {})}, "the drafter")
        for name, supported in (("hidden_act", "silu"), ("quantization_config", None)):
            fields.only(name, supported)
        heads, kv_heads, head_dim = fields.heads()
        theta, scaling = fields.rope()
        layers = fields.size("num_hidden_layers")
        windows, causal = _attention_kinds(fields, layers)
        return cls(
            hidden_size=fields.size("hidden_size"),
            intermediate_size=fields.size("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=fields.size("vocab_size"),
            rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position=fields.size("max_position_embeddings", 32768),
            attention_bias=fields.flag("attention_bias"),
            block_size=fields.integer("block_size"),
            mask_token_id=fields.integer("mask_token_id"),
            target_layer_ids=fields.integers("target_layer_ids"),
            num_target_layers=fields.size("num_target_layers") if fields.has("num_target_layers") else None,
            windows=windows,
            causal=causal,
            output_multiplier=fields.number("output_multiplier", 1.0),
            final_logit_softcapping=fields.number("final_logit_softcapping", 0.0) or None,
            input_embedding_scale=fields.number("input_embedding_scale", 1.0),
        )

    def check_fits(self, vocab_size: int, hidden_size: int, num_layers: int) -> None:
        """Raise DrafterMismatch, naming the field, unless the target has these sizes (vocabulary up to padding)."""
        problem = None
        if self.hidden_size != hidden_size:
            problem = f"hidden_size {self.hidden_size}, the target's is {hidden_size}"
        elif abs(self.vocab_size - vocab_size) > _MAX_PADDING:
            problem = f"vocab_size {self.vocab_size}, the target's is {vocab_size}"
        elif self.num_target_layers not in (None, num_layers):
            problem = f"num_target_layers {self.num_target_layers}, the target has {num_layers}"
        elif not self.target_layer_ids or not all(0 <= i < num_layers for i in self.target_layer_ids):
            problem = f"target_layer_ids {list(self.target_layer_ids)}, the target has layers 0 to {num_layers - 1}"
        elif not 0 <= self.mask_token_id < vocab_size:
            problem = f"mask_token_id {self.mask_token_id}, the target's vocabulary has {vocab_size} tokens"
        if problem:
            raise DrafterMismatch(f"the drafter does not fit this target: it has {problem}; name its own drafter")
        if not 2 <= self.block_size <= MAX_BLOCK:
            raise UnsupportedModel(f"block_size {self.block_size} is not supported: it must be from 2 to {MAX_BLOCK}")


def _attention_kinds(fields: Fields, layers: int) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Window and causality of every layer. Without `is_causal`, sliding layers are causal and full ones are not."""
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        use = fields.flag("use_sliding_window") and fields.has("sliding_window")
        first = fields.integer("max_window_layers", layers) if use else layers
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise DamagedFile(f"layer_types of the drafter must be a list of names, not {kinds!r}", param="layer_types")
    if len(kinds) != layers:
        raise DamagedFile(f"layer_types names {len(kinds)} layers, num_hidden_layers {layers}: fetch the drafter again")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModel(
            f"layer_types {unknown[0]!r} is not supported: full_attention and sliding_attention are",
            param="layer_types",
        )
    sliding = [kind == "sliding_attention" for kind in kinds]
    window = fields.size("sliding_window") if any(sliding) else None
    causal = [fields.flag("is_causal")] * layers if fields.has("is_causal") else sliding
    return tuple(window if s else None for s in sliding), tuple(causal)
