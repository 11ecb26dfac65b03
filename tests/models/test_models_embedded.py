"""The embedded model itself, as it lies in the cache (downloaded when it is missing)."""

import json
from pathlib import Path

from safetensors import safe_open
from transformers import AutoTokenizer

from ddtree.models import list_models, resolve_model

TEMPLATE_START = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


def test_configuration(embedded_model: Path) -> None:
    config = json.loads((embedded_model / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    heads = [config[f"num_{kind}"] for kind in ("hidden_layers", "attention_heads", "key_value_heads")]
    assert heads == [30, 9, 3]
    assert (config["hidden_size"], config["vocab_size"], config["rms_norm_eps"]) == (576, 49152, 1e-5)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    assert config["tie_word_embeddings"]
    assert json.loads((embedded_model / "generation_config.json").read_text())["eos_token_id"] == 2


def test_weights(embedded_model: Path) -> None:
    with safe_open(embedded_model / "model.safetensors", framework="pt") as weights:
        assert len(list(weights.keys())) == 272
        query = weights.get_slice("model.layers.0.self_attn.q_proj.weight")
        assert (query.get_shape(), query.get_dtype()) == ([576, 576], "BF16")


def test_tokenizer(embedded_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.bos_token_id) == ("<|im_end|>", 2, 1)
    pieces = {
        "In 2024, 12 + 7": "In Ġ 2 0 2 4 , Ġ 1 2 Ġ+ Ġ 7",
        "x =  12\n\n1. y": "x Ġ= ĠĠ 1 2 ĊĊ 1 . Ġy",
        "def f(x):\n    return x": "def Ġf ( x ): ĊĠĠĠ Ġreturn Ġx",
    }
    for text, expected in pieces.items():
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == expected.split(" ")
    for text in [*pieces, "hé 😀🎉 ½ 日本語", " a , b n't <|im_end|>\t\n"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template(embedded_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == TEMPLATE_START + "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text)
    assert ids[:8] == [1, 9690, 198, 2683, 359, 253, 5356, 5646]
    assert ids[-3:] == [1, 520, 9531] or ids[-4:] == [1, 520, 9531, 198]


def test_it_is_listed(embedded_model: Path) -> None:
    entry = list_models()[0]
    assert (entry.name, entry.cached, entry.path) == ("smollm2-135m", True, embedded_model)
    assert 265_000_000 < entry.size < 280_000_000
    assert resolve_model(entry.name) == embedded_model
