"""A Llama-type configuration file, every field honoured or refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddtree.errors import UnsupportedModel
from ddtree.layers.fields import Fields


@dataclass(frozen=True)
class LlamaConfig:
    """The fields of a Hugging Face `LlamaConfig` that change what is computed."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any]
    max_position: int
    tied: bool
    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "LlamaConfig":
        """Read the JSON of config.json. Raises UnsupportedModel or DamagedFile, naming the field."""
        if raw.get("model_type") != "llama":
            raise UnsupportedModel(
                f"model_type {raw.get('model_type')!r} is not supported by the embedded engine: llama is "
                "(Llama 2 and 3, SmolLM2)",
                param="model_type",
            )
        fields = Fields(raw, "the model")
        for name, supported in (("hidden_act", "silu"), ("pretraining_tp", 1), ("quantization_config", None)):
            fields.only(name, supported)
        heads, kv_heads, head_dim = fields.heads()
        theta, scaling = fields.rope()
        return cls(
            vocab_size=fields.size("vocab_size"),
            hidden_size=fields.size("hidden_size"),
            intermediate_size=fields.size("intermediate_size"),
            num_layers=fields.size("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position=fields.size("max_position_embeddings", 2048),
            tied=fields.flag("tie_word_embeddings"),
            attention_bias=fields.flag("attention_bias"),
            mlp_bias=fields.flag("mlp_bias"),
        )
