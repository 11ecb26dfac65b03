"""Small random models: a transformers Llama, and the same as a GGUF file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = sorted(ByteLevel.alphabet())
MERGES = ["Ġ Ġ", "Ċ Ċ", "Ġ 1", "1 2", "h i"]
TOKENS = [*SPECIAL, *BYTES, *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"

PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """A random Llama of two layers with grouped queries, its weights rounded to what bfloat16 holds."""
    values: dict[str, Any] = {
        "vocab_size": len(TOKENS),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(values | changes))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.randn_like(parameter) * 0.2).bfloat16().float())
    return model


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: row i of a head's first half, then row i of its second half, ..."""
    size = weight.shape[0] // heads
    rows = [head * size + offset + i for head in range(heads) for i in range(size // 2) for offset in (0, size // 2)]
    return weight[rows]


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    skip: tuple[str, ...] = (),
    architecture: str = "llama",
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Write a model as a GGUF file. `change` may add metadata or tensors, `skip` leaves tensors out."""
    config, state = model.config, {name: value.numpy() for name, value in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_license("apache-2.0")
    if config.head_dim != config.hidden_size // config.num_attention_heads:
        writer.add_key_length(config.head_dim)
    (tokenizer or byte_level_tokenizer)(writer)
    if change is not None:
        change(writer)
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if not config.tie_word_embeddings:
        names["output.weight"] = "lm_head.weight"
    for layer in range(config.num_hidden_layers):
        names |= {f"blk.{layer}.{a}.weight": f"model.layers.{layer}.{b}.weight" for a, b in PARTS.items()}
    for name, source in names.items():
        if name in skip:
            continue
        value = state[source]
        if ".attn_q." in name or ".attn_k." in name:
            value = interleave(value, config.num_attention_heads if "_q." in name else config.num_key_value_heads)
        chosen = kind if value.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(value, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_tokenizer(writer: gguf.GGUFWriter, pre: str = "smollm") -> None:
    """A byte-level vocabulary with a few merges, as SmolLM2's GGUF states its own."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
