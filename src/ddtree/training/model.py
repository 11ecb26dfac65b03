"""The drafter as a module that can be trained: the same function as `ddtree.drafter.DFlashDrafter`, all blocks at once.

Parameters bear the names of z-lab's files. Source: DFlash (arXiv 2602.06036).
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddtree.drafter import DrafterConfig
from ddtree.layers import Rope
from ddtree.layers.weights import open_weights
from ddtree.training.attention import Blocks

INITIAL_STD = 0.02


class Norm(nn.Module):
    """Root mean square normalisation, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Block states attend to the fused context before their anchor and to their own block."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        hidden, dim, biased = c.hidden_size, c.head_dim, c.attention_bias
        self.head_dim = dim
        self.q_proj = nn.Linear(hidden, c.num_heads * dim, bias=biased)
        self.k_proj = nn.Linear(hidden, c.num_kv_heads * dim, bias=biased)
        self.v_proj = nn.Linear(hidden, c.num_kv_heads * dim, bias=biased)
        self.o_proj = nn.Linear(c.num_heads * dim, hidden, bias=biased)
        self.q_norm, self.k_norm = Norm(dim, c.rms_norm_eps), Norm(dim, c.rms_norm_eps)

    def forward(
        self, states: Tensor, context: Tensor, turns: tuple[Tensor, Tensor], blocks: Blocks, layer: int
    ) -> Tensor:
        """states [B, Q, H], context [B, T, H]; turns: cos and sin of context and states [B, 1, T + Q, hd]."""
        rows, dim = states.shape[1], self.head_dim
        both = torch.cat([context, states], 1)
        query = self.q_norm(self.q_proj(states).unflatten(-1, (-1, dim))).transpose(1, 2)
        key = self.k_norm(self.k_proj(both).unflatten(-1, (-1, dim))).transpose(1, 2)
        value = self.v_proj(both).unflatten(-1, (-1, dim)).transpose(1, 2)
        cos, sin = turns
        query = _turn(query, cos[:, :, -rows:], sin[:, :, -rows:]).to(value.dtype)
        mixed = blocks.attend(query, _turn(key, cos, sin).to(value.dtype), value, layer)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """silu(gate) * up, then down."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One layer; the residual stream stays in float32."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(c), Mlp(c.hidden_size, c.intermediate_size)
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, turns: tuple[Tensor, Tensor], blocks: Blocks, layer: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, turns, blocks, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftModel(nn.Module):
    """From target features and many blocks [root, MASK, ...] to the hidden states that the target's head reads."""

    def __init__(self, config: DrafterConfig) -> None:
        """Weights are random: normal, 0.02; norms are 1."""
        super().__init__()
        c = self.config = config
        self.fc = nn.Linear(c.hidden_size * len(c.target_layer_ids), c.hidden_size, bias=False)
        self.hidden_norm, self.norm = Norm(c.hidden_size, c.rms_norm_eps), Norm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.inv_freq: Tensor
        rope = Rope(c.head_dim, c.rope_theta, c.rope_scaling, torch.device("cpu"))
        self.register_buffer("inv_freq", rope.inv_freq, persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INITIAL_STD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    @classmethod
    def read(cls, config: DrafterConfig, folder: Path) -> "DraftModel":
        """With the weights of a z-lab folder, in float32. Raises DamagedFile for what is missing or misshapen."""
        model = cls(config)
        with open_weights(folder, torch.float32, torch.device("cpu")) as weights, torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights(name, *parameter.shape))
        return model

    def forward(self, embedded: Tensor, features: Tensor, blocks: Blocks) -> Tensor:
        """embedded: [B, A, b, H], the target's embeddings of the blocks; features: [B, T, taps * H].

        Returns: [B, A, b - 1, H] float32, the final norm's output at the slots that predict.
        """
        context = self.hidden_norm(self.fc(features))
        x = embedded.flatten(1, 2).float() * self.config.input_embedding_scale
        turns = self._turns(features.shape[1], blocks.positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, context, turns, blocks, index)
        return self.norm(x).unflatten(1, embedded.shape[1:3])[:, :, 1:]

    def logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        """hidden [M, H], head [V, H] -> float32 [M, V], multiplied and capped as the configuration says."""
        logits = F.linear(hidden.to(head.dtype), head).float() * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _turns(self, length: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of context positions 0 .. length - 1, then of the blocks' [B, Q]."""
        context = torch.arange(length, device=positions.device).expand(len(positions), length)
        angles = torch.cat([context, positions], 1)[:, None, :, None].float() * self.inv_freq
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, R, hd]; component i is paired with i + hd / 2."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
