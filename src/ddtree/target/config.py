"""A Llama-type configuration file, every field honoured or refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddtree.errors import DamagedFile, UnsupportedModel


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

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "LlamaConfig":
        """Read the JSON of config.json. Raises UnsupportedModel or DamagedFile, naming the field."""
        if raw.get("model_type") != "llama":
            raise UnsupportedModel(
                f"model_type {raw.get('model_type')!r} is not supported by the embedded engine: llama is "
                "(Llama 2 and 3, SmolLM2)",
                param="model_type",
            )
        for name, only in (("hidden_act", "silu"), ("pretraining_tp", 1), ("quantization_config", None)):
            if raw.get(name, only) != only:
                raise UnsupportedModel(f"{name} {raw[name]!r} is not supported: only {only!r} is", param=name)
        rope = raw.get("rope_parameters") or {}
        try:
            heads = int(raw["num_attention_heads"])
            hidden = int(raw["hidden_size"])
            return cls(
                vocab_size=int(raw["vocab_size"]),
                hidden_size=hidden,
                intermediate_size=int(raw["intermediate_size"]),
                num_layers=int(raw["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(raw.get("num_key_value_heads") or heads),
                head_dim=int(raw.get("head_dim") or hidden // heads),
                rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
                rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
                rope_scaling=rope or raw.get("rope_scaling") or {},
                max_position=int(raw.get("max_position_embeddings", 2048)),
                tied=bool(raw.get("tie_word_embeddings", False)),
            )
        except KeyError as error:
            raise DamagedFile(f"config.json has no {error.args[0]!r}: fetch the model again") from error
