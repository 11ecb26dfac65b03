"""Read a llama-architecture GGUF file: metadata, the configuration it amounts to, and where each tensor belongs."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree.errors import DamagedFile, UnsupportedModel
from ddtree.models.wording import brief

if TYPE_CHECKING:
    from gguf import ReaderTensor

ARCHITECTURE = "llama"
ROPE_FACTORS = "rope_freqs.weight"
# The shape of Llama 3's context extension, which a GGUF keeps only as the divisors that it leads to.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192
TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>")  # end an answer, also where the file names only another end
MAX_ENTRIES = 1_000_000  # of metadata or tensors: above it the header is not one


@dataclass(frozen=True)
class GGUF:
    """An open GGUF file."""

    path: Path
    meta: dict[str, Any]  # every key of the header, as Python values
    tensors: dict[str, "ReaderTensor"]  # by name; the data stays in the file until it is used

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own section, such as `block_count`."""
        return self.meta.get(f"{ARCHITECTURE}.{key}", default)

    def need(self, key: str) -> Any:
        """As `get`, for values without which there is no model."""
        value = self.get(key)
        if value is None:
            raise self.lacks(f"the value {ARCHITECTURE}.{key}")
        return value

    def lacks(self, what: str) -> DamagedFile:
        """The error for something without which there is no model."""
        return DamagedFile(f"{self.path} lacks {what}: download or convert the file again")

    def refuse(self, what: str) -> UnsupportedModel:
        """The error for something sound that is not implemented here."""
        return UnsupportedModel(
            f"{self.path}: {what} is not supported. Use the model's safetensors, or another GGUF of the llama family"
        )


@dataclass(frozen=True)
class Place:
    """Where a GGUF tensor goes."""

    name: str  # in the Hugging Face layout
    shape: tuple[int, ...]  # rows first
    heads: int = 0  # above 0: rows interleaved per head for rotary embedding, to be put back


def read_gguf(path: Path) -> GGUF:
    """Open a GGUF file of the llama architecture. Raises DamagedFile or UnsupportedModel."""
    from gguf import GGUFReader

    try:
        _check_start(path)
        reader = GGUFReader(path)
        meta = {key: field.contents() for key, field in reader.fields.items()}
        file = GGUF(path, meta, {tensor.name: tensor for tensor in reader.tensors})
    except (OSError, ValueError, KeyError, IndexError, OverflowError, MemoryError, TypeError) as error:
        raise DamagedFile(
            f"{path} cannot be read as a GGUF file ({type(error).__name__}: {error}): it is cut short or damaged; "
            "download or copy it again"
        ) from error
    if int(meta.get("split.count", 1)) > 1:
        raise file.refuse("a model split over several .gguf files")
    if meta.get("general.architecture") != ARCHITECTURE:
        raise file.refuse(
            f"the architecture {brief(repr(meta.get('general.architecture')))} (only 'llama' can be converted)"
        )
    return file


def _check_start(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(24)
    if len(start) < 24 or start[:4] != b"GGUF":
        raise ValueError("it does not begin with a GGUF header")
    if max(int.from_bytes(start[8:16], "little"), int.from_bytes(start[16:24], "little")) > MAX_ENTRIES:
        raise ValueError("its header has impossible counts")


def model_config(file: GGUF) -> dict[str, Any]:
    """The config.json of a `LlamaForCausalLM` for this file. Raises UnsupportedModel by the name of what is not."""
    if file.get("expert_count", 0):
        raise file.refuse("a mixture of experts")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise file.lacks("the tensor token_embd.weight")
    hidden, heads = int(file.need("embedding_length")), int(file.need("attention.head_count"))
    head_dim, layers = int(file.get("attention.key_length", hidden // heads)), int(file.need("block_count"))
    if layers > len(file.tensors):  # said here, for the layout would fill the memory with a damaged count's layers
        raise file.lacks(f"the tensors of its {layers} layers")
    if int(file.get("rope.dimension_count", head_dim)) != head_dim:
        raise file.refuse("rotary embedding over a part of the head")
    rope = rope_parameters(file, head_dim)
    ends = end_tokens(file)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": file.meta.get("tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(file.need("feed_forward_length")),
        "max_position_embeddings": int(file.need("context_length")),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": int(file.get("attention.head_count_kv", heads)),
        "pad_token_id": file.meta.get("tokenizer.ggml.padding_token_id"),
        # stored as a 32-bit float: 9.999999747378752e-06 was 1e-05
        "rms_norm_eps": float(f"{file.need('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": int(embedding.shape[1]),
    }


def end_tokens(file: GGUF) -> list[int]:
    """The ids that end an answer: those the header names, then the usual ends of a turn among the control tokens."""
    named = [file.meta.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    tokens = file.meta.get("tokenizer.ggml.tokens", [])
    ends = [int(token) for token in named if token is not None]
    ends += [tokens.index(token) for token in TURN_ENDS if token in tokens]
    if not ends:
        raise file.refuse("a tokenizer without an end-of-sequence token")
    return list(dict.fromkeys(ends))


def rope_parameters(file: GGUF, head_dim: int) -> dict[str, Any]:
    """The rotary embedding's parameters: plain, linear, or Llama 3's. Anything else is refused by name."""
    theta = float(file.get("rope.freq_base", 10000.0))
    kind = file.get("rope.scaling.type", "none")
    factor = float(file.get("rope.scaling.factor", file.get("rope.scale_linear", 1.0)))
    if kind not in ("none", "linear"):
        raise file.refuse(f"rope scaling of type {brief(repr(kind))}")
    if ROPE_FACTORS in file.tensors:
        return _llama3_parameters(file, theta, head_dim)
    if factor not in (0.0, 1.0):
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    return {"rope_type": "default", "rope_theta": theta}


def _llama3_parameters(file: GGUF, theta: float, head_dim: int) -> dict[str, Any]:
    import numpy as np

    found = np.array(file.tensors[ROPE_FACTORS].data, dtype=np.float64).reshape(-1)
    factor = round(float(found.max()), 3) if found.size else 0.0
    if found.size == head_dim // 2 and np.allclose(found, 1.0):
        return {"rope_type": "default", "rope_theta": theta}
    if found.size != head_dim // 2 or not np.allclose(found, _llama3_divisors(theta, head_dim, factor), rtol=1e-3):
        raise file.refuse(f"the rope scaling in {ROPE_FACTORS} (it is not Llama 3's)")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_CONTEXT,
    }


def _llama3_divisors(theta: float, head_dim: int, factor: float) -> Any:
    """What Llama 3's scaling divides each inverse frequency by, [head_dim / 2] float64."""
    import numpy as np

    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((LLAMA3_CONTEXT / wavelength - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def layout(config: dict[str, Any]) -> dict[str, Place]:
    """GGUF tensor name -> place, for every tensor that a model of this configuration has."""
    hidden, wide, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    q_rows, kv_rows = heads * config["head_dim"], shared * config["head_dim"]
    places = {
        "token_embd.weight": Place("model.embed_tokens.weight", (vocab, hidden)),
        "output_norm.weight": Place("model.norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        places["output.weight"] = Place("lm_head.weight", (vocab, hidden))
    parts = {
        "attn_norm": Place("input_layernorm", (hidden,)),
        "attn_q": Place("self_attn.q_proj", (q_rows, hidden), heads),
        "attn_k": Place("self_attn.k_proj", (kv_rows, hidden), shared),
        "attn_v": Place("self_attn.v_proj", (kv_rows, hidden)),
        "attn_output": Place("self_attn.o_proj", (hidden, q_rows)),
        "ffn_norm": Place("post_attention_layernorm", (hidden,)),
        "ffn_gate": Place("mlp.gate_proj", (wide, hidden)),
        "ffn_up": Place("mlp.up_proj", (wide, hidden)),
        "ffn_down": Place("mlp.down_proj", (hidden, wide)),
    }
    for layer in range(config["num_hidden_layers"]):
        for part, place in parts.items():
            name = f"model.layers.{layer}.{place.name}.weight"
            places[f"blk.{layer}.{part}.weight"] = Place(name, place.shape, place.heads)
    return places


def check_tensors(file: GGUF, places: dict[str, Place]) -> None:
    """Raise unless the file holds exactly these tensors in these shapes (and perhaps the rope factors)."""
    missing = [name for name in places if name not in file.tensors]
    if missing:
        raise file.lacks(f"the tensor {missing[0]}")
    unknown = [name for name in file.tensors if name not in places and name != ROPE_FACTORS]
    if unknown:
        raise file.refuse(f"the tensor {unknown[0]}")
    for name, place in places.items():
        shape = tuple(int(size) for size in reversed(file.tensors[name].shape))
        if shape != place.shape:
            raise DamagedFile(f"{file.path}: the tensor {name} has shape {shape} where {place.shape} was expected")
