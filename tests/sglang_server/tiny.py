"""A tiny random target, its drafter and a tokenizer, as files that SGLang reads."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY, HIDDEN, INNER, HEADS, KV_HEADS, HEAD = 512, 64, 128, 4, 2, 16
TARGET_LAYERS, DRAFT_LAYERS, TAPS, BLOCK, POSITIONS = 4, 2, [1, 2], 8, 512


def make_target(folder: Path) -> None:
    """A Qwen3 of random weights whose logits are far apart, so that no two tokens tie."""
    text = Path(__file__).read_text()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special, alphabet = ["<|endoftext|>", "<|mask|>"], pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [text] * 3,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[0], mask_token=special[1]
    ).save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=TARGET_LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
        eos_token_id=0,
        bos_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=2.0 if "lm_head" in name else 0.15)
    model.save_pretrained(folder)


def make_drafter(folder: Path) -> None:
    """A DFlash drafter of random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    weights = {"fc.weight": _random(HIDDEN, len(TAPS) * HIDDEN)}
    weights |= {name: torch.ones(HIDDEN) for name in ("hidden_norm.weight", "norm.weight")}
    for layer in range(DRAFT_LAYERS):
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        norms = {"self_attn.q_norm": HEAD, "self_attn.k_norm": HEAD}
        norms |= {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}
        weights |= {f"layers.{layer}.{name}.weight": _random(*shape) for name, shape in shapes.items()}
        weights |= {f"layers.{layer}.{name}.weight": torch.ones(size) for name, size in norms.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": DRAFT_LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "block_size": BLOCK,
        "num_target_layers": TARGET_LAYERS,
        "layer_types": ["full_attention"] * DRAFT_LAYERS,
        "dflash_config": {"mask_token_id": 1, "target_layer_ids": TAPS},
    }
    (folder / "config.json").write_text(json.dumps(config))


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) * 0.15
