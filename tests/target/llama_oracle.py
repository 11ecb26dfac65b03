"""Small random Llama models, transformers' answers for them, and rows for verify made without the tree's builder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ddtree.tree import Rows

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BASE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def random_llama(seed: int = 0, **fields: Any) -> LlamaForCausalLM:
    """A model whose every weight is random, norms and biases too, and large enough that attention is not uniform."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM._from_config(LlamaConfig(**{**BASE, **fields}), attn_implementation="eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                weight.normal_(0, 0.5)
            else:
                weight.normal_(0, weight.shape[-1] ** -0.5)
    return model.eval()


def round_weights(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Weights that bfloat16 holds exactly. (model.bfloat16() would round the rotary frequencies as well.)"""
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    return model


class Oracle:
    """What transformers computes for a sequence from scratch, without a cache."""

    def __init__(self, model: LlamaForCausalLM, folder: Path, shard: str = "1GB") -> None:
        self.model, self.folder = model, folder
        model.save_pretrained(folder, max_shard_size=shard)

    @torch.inference_mode()
    def __call__(self, ids: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Logits [T, V], and the hidden states [T, H] after every layer (the last one before the final norm)."""
        states: list[Tensor] = []
        hooks = [
            layer.register_forward_hook(lambda _module, _args, out: states.append(out[0]))
            for layer in self.model.model.layers
        ]
        try:
            out = self.model(torch.tensor([list(ids)]), output_hidden_states=True)
        finally:
            for hook in hooks:
                hook.remove()
        for index, state in enumerate(states[:-1]):  # a tap `id` is hidden_states[id + 1] of transformers
            assert torch.equal(state, out.hidden_states[index + 1][0])
        return out.logits[0], states

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits [T, V]."""
        return self(ids)[0]

    def rows(self, prompt: Sequence[int], tree: Sequence[int], parents: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Logits [N, V] and hidden states [N, H] of every row of a tree: one run for the path to each leaf."""
        logits: list[Tensor] = [torch.empty(0)] * len(tree)
        states: list[list[Tensor]] = [[]] * len(tree)
        for leaf in set(range(len(tree))) - set(parents):
            path = path_to(parents, leaf)
            out, hidden = self([*prompt, *[tree[row] for row in path]])
            for place, row in enumerate(path, len(prompt)):
                logits[row], states[row] = out[place], [h[place] for h in hidden]
        return torch.stack(logits), [torch.stack(layer) for layer in zip(*states, strict=True)]


def path_to(parents: Sequence[int], row: int) -> list[int]:
    """Rows from the root to `row`."""
    path = [row]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def tree_rows(tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> Rows:
    """Rows of a batch, padded with rows that see themselves alone."""
    width = max(map(len, tokens))
    padded = [[*p, *[-1] * (width - len(p))] for p in parents]
    depths = [[len(path_to(p, row)) - 1 for row in range(width)] for p in padded]
    words = -(-width // 64)
    bits = torch.zeros(len(tokens), width, words, dtype=torch.int64)
    for b, p in enumerate(padded):
        for row in range(width):
            for seen in path_to(p, row):
                bits[b, row, seen // 64] |= torch.tensor(1, dtype=torch.int64) << (seen % 64)
    return Rows(
        tokens=torch.tensor([[*t, *[0] * (width - len(t))] for t in tokens]),
        parents=torch.tensor(padded),
        depths=torch.tensor(depths),
        ancestors=bits,
    )


def assert_near(ours: Tensor, theirs: Tensor, tolerance: float = 1e-4) -> None:
    """The largest difference, relative to the largest value of the reference."""
    assert ours.shape == theirs.shape
    difference = float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
    assert difference < tolerance, f"relative difference {difference:.2e}"
