"""What is inside a model's files: sizes and shapes by the headers, and its tokenizer. For child processes.

What is wrong is told in the words that loading uses.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree.config import DRAFT_VOCABULARY
from ddtree.errors import DamagedFile
from ddtree.models.folder import weight_files

if TYPE_CHECKING:
    from ddtree.drafter.config import DrafterConfig
    from ddtree.target.config import LlamaConfig

BITS = {"F64": 64, "F32": 32, "I64": 64, "I32": 32, "BF16": 16, "F16": 16, "I16": 16}  # the others: 8


def size(folder: Path) -> int:
    """Bytes of the weights, wider numbers counted as 16 bits: that is how they are loaded."""
    total = 0
    for entry in _tensors(folder).values():
        begin, end = entry["data_offsets"]
        total += (end - begin) * 16 // max(16, BITS.get(entry["dtype"], 8))
    return total


def check_model(folder: Path, config: "LlamaConfig") -> None:
    """Raise DamagedFile for a weight of a target whose shape is not the one that its config.json asks for."""
    whole = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tied:
        whole["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    _check(folder, whole | dict(_layers("model.layers", config)))


def check_drafter(folder: Path, config: "DrafterConfig") -> None:
    """The same for a drafter."""
    hidden = config.hidden_size
    whole = {
        "fc.weight": (hidden, hidden * len(config.target_layer_ids)),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    _check(folder, whole | dict(_layers("layers", config)))


def draft_vocab(folder: Path, config: "DrafterConfig") -> int | None:
    """Tokens that a drafter's folder has drafts made of; None: all. Raises DamagedFile for a list that is none."""
    from ddtree.drafter import read_vocabulary

    path = folder / DRAFT_VOCABULARY
    return read_vocabulary(path, config.vocab_size)[1] if path.is_file() else None


def check_tokenizer(folder: Path) -> None:
    """Raise DamagedFile for a tokenizer.json that is none. Other files of tokenizers are not looked at."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return
    try:
        from tokenizers import Tokenizer
    except Exception:  # it does not load: that is a finding of its own
        return
    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # of many kinds
        raise DamagedFile(f"the tokenizer in {folder} cannot be read ({error}): fetch the model again") from error


def _layers(prefix: str, config: "LlamaConfig | DrafterConfig") -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    for index in range(config.num_layers):
        for name, shape in shapes.items():
            yield f"{prefix}.{index}.{name}.weight", shape


def _check(folder: Path, wanted: Mapping[str, tuple[int, ...]]) -> None:
    tensors = _tensors(folder)
    for name, shape in wanted.items():
        if name not in tensors:  # loading knows which ones a model may do without
            continue
        found = tuple(tensors[name].get("shape", ()))
        if found != shape:
            raise DamagedFile(f"weight {name!r} in {folder} has shape {found}, config.json asks for {shape}")


def _tensors(folder: Path) -> dict[str, Any]:
    """The headers of all the folder's safetensors files, which are known to be sound."""
    tensors: dict[str, Any] = {}
    for path in weight_files(folder):
        with path.open("rb") as file:
            tensors |= json.loads(file.read(int.from_bytes(file.read(8), "little")))
    tensors.pop("__metadata__", None)
    return tensors
