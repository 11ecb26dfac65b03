"""Models of random weights with the shapes of real ones: in this engine, and the same weights in transformers."""

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig as TransformersConfig
from transformers import LlamaForCausalLM

from ddtree.config import EngineConfig, SamplingParams, Speculation
from ddtree.drafter import DFlashDrafter
from ddtree.drafter.config import DrafterConfig
from ddtree.engine import Engine
from ddtree.engine.observer import Unobserved
from ddtree.engine.round import Batch
from ddtree.target import LlamaTarget, TargetSpec
from ddtree.target.config import LlamaConfig

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },  # without the norms of queries and keys, which this engine's Llama targets do not have
    "smollm2-135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },  # for a try on a CPU: so few tokens that random drafts are accepted now and then
}  # fmt: skip
DRAFTER_LAYERS = {"qwen3-8b": 5, "smollm2-135m": 4, "tiny": 2}
BLOCK = 16
TAPS = 5
EPS = 1e-6
ROOM = 1024  # positions behind the context
LARGEST_BUDGET = 127


class RandomWeights:
    """Matrices that keep the size of what they multiply, norms of ones; a name has the same values whoever asks."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.bytes: dict[str, int] = {}  # of every tensor that was asked for

    def __call__(self, name: str, *shape: int) -> Tensor:
        if len(shape) == 1:
            made = torch.ones(shape, dtype=self.dtype, device=self.device)
        else:
            generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
            made = torch.randn(shape, generator=generator, dtype=self.dtype, device=self.device)
            made *= shape[-1] ** -0.5
        self.bytes[name] = made.nbytes
        return made


@dataclass(frozen=True)
class Made:
    """An engine of random weights, the same without its drafter, and what a step of plain decoding has to read."""

    engine: Engine
    plain: Engine
    drafter_config: DrafterConfig
    weight_bytes: int  # of the target, without an embedding of which a step reads one row
    kv_bytes: int  # of a sequence's context


class NoText:
    """A tokenizer that is never asked for text."""

    def stream(self) -> "NoText":
        """Itself."""
        return self

    def push(self, token: int) -> str:
        """Nothing."""
        return ""

    def flush(self) -> str:
        """Nothing."""
        return ""


def make(name: str, batch: int, context: int, dtype: torch.dtype, device: torch.device, graphs: bool) -> Made:
    """An engine with the shape `name`, for `batch` sequences of `context` tokens and ROOM more."""
    raw = {**SHAPES[name], "model_type": "llama", "rms_norm_eps": EPS}
    config, weights = LlamaConfig.read(raw), RandomWeights(dtype, device)
    spec = TargetSpec(config.vocab_size, config.hidden_size, config.num_layers, config.max_position, (), dtype, device)
    target = LlamaTarget(config, spec, weights)
    drafter_config = DrafterConfig.read(drafter_fields(name))
    drafter = DFlashDrafter(drafter_config, RandomWeights(dtype, device), target.embed, target.head)
    options = EngineConfig(
        speculation=Speculation("tree", 15, 16, tree_context="off"), max_model_len=context + ROOM,
        max_running_requests=batch, max_tree_budget=LARGEST_BUDGET, cuda_graphs=graphs, prefix_caching=False,
    )  # fmt: skip
    engine = Engine(target, drafter, NoText(), options)  # type: ignore[arg-type]
    unread = 0 if config.tied else weights.bytes["model.embed_tokens.weight"]
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize * context
    return Made(engine, engine.without_drafter(), drafter_config, sum(weights.bytes.values()) - unread, kv)


def with_draft_in_8_bits(made: Made) -> Engine:
    """The same target and caches with the drafter's matrices and a copy of the head for it in 8 bits.

    Raises ValueError where the device's kernels have no such products: without a card, and in float32.
    """
    target = made.engine.target
    weights = RandomWeights(target.spec.dtype, target.spec.device)
    drafter = DFlashDrafter(made.drafter_config, weights, target.embed, target.draft_head(rounded=True), rounded=True)
    return Engine(target, drafter, NoText(), made.engine.config, store=made.engine._store)  # type: ignore[arg-type]


def drafter_fields(name: str) -> dict[str, Any]:
    """A config.json as z-lab's are, for a drafter of this shape: taps evenly spaced from layer 1 to L - 3."""
    layers = SHAPES[name]["num_hidden_layers"]
    return {
        **SHAPES[name], "architectures": ["DFlashDraftModel"], "rms_norm_eps": EPS, "block_size": BLOCK,
        "num_hidden_layers": DRAFTER_LAYERS[name], "num_target_layers": layers,
        "dflash_config": {
            "mask_token_id": 0, "target_layer_ids": [1 + i * (layers - 4) // (TAPS - 1) for i in range(TAPS)]
        },
    }  # fmt: skip


def batch_at(engine: Engine, speculation: Speculation, context: int, batch: int) -> Batch:
    """A batch whose sequences stand at `context`; their caches hold zeros, which cost what keys cost."""
    requests = []
    for index in range(batch):
        request = engine._request([1] * context, SamplingParams(max_tokens=900, seed=index), speculation)
        found = engine._store.acquire(request.prompt, reuse=False, drafts=True)
        assert found is not None
        request.slot, request.position, request.tokens = found[0], context, [*request.prompt, 1]
        requests.append(request)
    made = engine.scheduler._runner.make(requests, Unobserved())
    for request in requests:
        assert request.slot is not None
        engine._store.release(request.slot)
    return made


@torch.no_grad()
def twin(name: str, dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
    """transformers' model with the weights of `make`. It has no end token, so `generate` runs to its limit."""
    config = TransformersConfig(
        **SHAPES[name], rms_norm_eps=EPS, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    with device:
        model = LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa")
    weights = RandomWeights(dtype, device)
    for parameter_name, parameter in model.named_parameters():
        parameter.copy_(weights(parameter_name, *parameter.shape))
    return model.eval()


def drafter_of(name: str, model: LlamaForCausalLM) -> DFlashDrafter:
    """The random drafter of `make` again, with the embedding and the head of transformers' model."""
    weights = RandomWeights(model.dtype, model.device)
    return DFlashDrafter(DrafterConfig.read(drafter_fields(name)), weights, model.get_input_embeddings(), model.lm_head)
