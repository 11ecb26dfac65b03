"""Attention of many blocks of one sequence in one forward: each sees the context before its anchor, and itself."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ddtree.drafter import DrafterConfig

Kind = tuple[int | None, bool]  # a layer's window, and whether it is causal inside the block


class Blocks:
    """Where the blocks of a batch stand, and who sees whom.

    Keys are the context's positions 0 .. T - 1, then the rows of the blocks, one block after another.
    """

    def __init__(self, config: DrafterConfig, anchors: Tensor, length: int, flex: bool = False) -> None:
        """anchors: [B, A] int64, positions of the roots; length: T; flex: by flex attention, else by SDPA."""
        self.block, self.length, self.flex = config.block_size, length, flex
        self.kinds = list(zip(config.windows, config.causal, strict=True))
        offset = torch.arange(self.block, device=anchors.device)
        self.positions = (anchors.unsqueeze(-1) + offset).flatten(1)  # [B, Q]
        self.starts = anchors.repeat_interleave(self.block, 1)  # [B, Q]
        self._masks: dict[Kind, Any] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
        """query [B, heads, Q, hd]; key, value [B, kv_heads, T + Q, hd] -> [B, heads, Q, hd]."""
        kind = self.kinds[layer]
        if kind not in self._masks:
            self._masks[kind] = self._block_mask(kind) if self.flex else self.dense_mask(kind).unsqueeze(1)
        grouped = key.shape[1] != query.shape[1]
        if self.flex:
            run = _compiled() if query.is_cuda else _plain
            return run(query, key, value, block_mask=self._masks[kind], enable_gqa=grouped)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self._masks[kind], enable_gqa=grouped)

    def dense_mask(self, kind: Kind) -> Tensor:
        """[B, Q, T + Q] bool, true where a row sees a key."""
        device, rows = self.positions.device, self.positions.shape[1]
        batch = torch.arange(len(self.positions), device=device)[:, None, None]
        row = torch.arange(rows, device=device)[None, :, None]
        key = torch.arange(self.length + rows, device=device)[None, None]
        return self._sees(kind, batch, row, key)

    def _sees(self, kind: Kind, batch: Tensor, row: Tensor, key: Tensor) -> Tensor:
        """One rule for both ways: indices of any shapes that broadcast -> bool."""
        window, causal = kind
        at, inside = self.positions[batch, row], key >= self.length
        own = (key - self.length).clamp(min=0, max=self.positions.shape[1] - 1)
        away = at - torch.where(inside, self.positions[batch, own], key)
        sees = torch.where(inside, own // self.block == row // self.block, key < self.starts[batch, row])
        if window is not None:
            sees = sees & (away.abs() < window)
        return sees & (away >= 0) if causal else sees

    def _block_mask(self, kind: Kind) -> BlockMask:
        def rule(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return self._sees(kind, batch, row, key)

        batch, rows = self.positions.shape
        return create_block_mask(rule, batch, None, rows, self.length + rows, device=str(self.positions.device))


_plain: Callable[..., Any] = flex_attention


@cache
def _compiled() -> Callable[..., Tensor]:
    """Flex attention is sparse only when it is compiled."""
    run: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=True)
    return run


def flex_works(config: DrafterConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    """None where flex attention runs here, forward and backward, and agrees with SDPA; else why not."""
    if device.type != "cuda":
        return f"it is compiled for GPUs, and this is {device}"
    generator = torch.Generator().manual_seed(0)
    length, anchors = 256, torch.tensor([[3, 60, 130, 200, 0, 0, 0, 0]], device=device)
    rows, dim = anchors.shape[1] * config.block_size, config.head_dim
    shapes = [(config.num_heads, rows), (config.num_kv_heads, length + rows), (config.num_kv_heads, length + rows)]
    given = [torch.randn(1, heads, n, dim, generator=generator).to(device, dtype) for heads, n in shapes]
    results: list[list[Tensor]] = []
    try:
        for flex in (True, False):
            query, key, value = (tensor.clone().requires_grad_() for tensor in given)
            blocks = Blocks(config, anchors, length, flex)
            outs = [blocks.attend(query, key, value, layer) for layer in range(config.num_layers)]
            torch.stack(outs).float().square().sum().backward()
            results.append([outs[-1].detach(), *(t.grad for t in (query, key, value) if t.grad is not None)])
    except Exception as error:  # a compiler fails in many ways, and the other road is open
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    for ours, theirs in zip(*results, strict=True):
        scale = float(theirs.float().abs().max())
        if not float((ours.float() - theirs.float()).abs().max()) <= 0.03 * scale:
            return "it does not agree with SDPA here"
    return None
