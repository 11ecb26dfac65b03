"""A tiny random target with a tokenizer and a chat template, and the configuration of a run for it."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|spare|>"]
END, SPARE = 256, 259
VOCAB = 256 + len(SPECIAL)
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_target(folder: Path, layers: int = 6, hidden: int = 32, seed: int = 0, **fields: Any) -> Path:
    """A Llama of random weights whose tokens are bytes."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, eos_token_id=END, bos_token_id=None,
        **{"tie_word_embeddings": False, **fields},
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.uniform_(0.5, 1.5) if name.endswith("norm.weight") else weight.normal_(0, weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SPECIAL[0], additional_special_tokens=SPECIAL[1:], chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    return folder


def run_file(path: Path, target: Path, **changes: dict[str, Any]) -> Path:
    """A whole small run in one TOML file; changes: by table."""
    tables: dict[str, dict[str, Any]] = {
        "target": {"model": str(target), "device": "cpu", "dtype": "float32"},
        "data": {"chats": 16, "shard_chats": 8, "batch": 4, "max_length": 200, "max_tokens": 24, "heldout": 0.3,
                 "sampled": 0.4, "own": 1.0, "seed": 1},
        "drafter": {"layers": 2, "head_dim": 8, "block_size": 4, "taps": 2, "intermediate_size": 48},
        "fit": {"steps": 6, "batch": 4, "micro_batch": 2, "anchors": 5, "warmup": 2, "log_every": 1,
                "checkpoint_every": 3, "eval_every": 3, "eval_sequences": 3, "loss_rows": 17},
        "eval": {"budgets": [8], "max_tokens": 16, "max_length": 256},
    }  # fmt: skip
    for table, values in changes.items():
        tables[table] |= values
    lines = [f'folder = "{path.parent / "run"}"']
    for table, values in tables.items():
        lines += [f"[{table}]", *(f"{name} = {_toml(value)}" for name, value in values.items())]
    path.write_text("\n".join(lines))
    return path


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
