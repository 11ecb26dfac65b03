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
        groups = query.shape[1] // key.shape[1]
        if self.flex:
            run = _compiled() if query.is_cuda else _plain
            return run(query, key, value, block_mask=self._masks[kind], enable_gqa=groups > 1)
        if groups > 1:  # with a mask, the fast kernels of CUDA take no groups
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self._masks[kind])

    def dense_mask(self, kind: Kind) -> Tensor:
        """[B, Q, T + Q] bool, true where a row sees a key."""
        device, rows = self.positions.device, self.positions.shape[1]
        batch = torch.arange(len(self.positions), device=device)[:, None, None]
        row = torch.arange(rows, device=device)[None, :, None]
        key = torch.arange(self.length + rows, device=device)[None, None]
        return self._rule(kind)(batch, batch, row, key)

    def _block_mask(self, kind: Kind) -> BlockMask:
        batch, rows = self.positions.shape
        device = str(self.positions.device)
        return create_block_mask(self._rule(kind), batch, None, rows, self.length + rows, device=device)

    def _rule(self, kind: Kind) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Who sees whom: indices of batch, head, row and key, of shapes that broadcast -> bool. Both ways go by it.

        It holds tensors and numbers alone, so that it is compiled once for all batches of one shape.
        """
        (window, causal), positions, starts = kind, self.positions, self.starts
        length, block, last = self.length, self.block, self.positions.shape[1] - 1

        def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            own = (key - length).clamp(0, last)
            inside = key >= length
            seen = torch.where(inside, own // block == row // block, key < starts[batch, row])
            if window is not None or causal:
                away = positions[batch, row] - torch.where(inside, positions[batch, own], key)
                seen = seen & (away >= 0) if causal else seen
                seen = seen & (away.abs() < window) if window is not None else seen
            return seen

        return sees


_plain: Callable[..., Any] = flex_attention


@cache
def _compiled() -> Callable[..., Tensor]:
    """Flex attention is sparse only when it is compiled."""
    run: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)
    return run


def flex_works(
    config: DrafterConfig, device: torch.device, dtype: torch.dtype, length: int, count: int, batch: int = 2
) -> str | None:
    """None where flex attention runs here, forward and backward, and agrees with SDPA; else why not.

    length: T, count: blocks of a sequence, batch: sequences, as they will be: it is compiled for just these.
    """
    if device.type != "cuda":
        return f"it is compiled for GPUs, and this is {device}"
    generator = torch.Generator().manual_seed(0)
    anchors = torch.randint(length, (batch, count), generator=generator).to(device)
    rows, dim = anchors.shape[1] * config.block_size, config.head_dim
    shapes = [(config.num_heads, rows), (config.num_kv_heads, length + rows), (config.num_kv_heads, length + rows)]
    given = [torch.randn(batch, heads, n, dim, generator=generator).to(device, dtype) for heads, n in shapes]
    results: list[list[Tensor]] = []
    compared = min(batch, 2)  # sequences; the plain way takes much memory
    try:
        for flex in (True, False):
            some = batch if flex else compared
            query, key, value = (tensor[:some].clone().requires_grad_() for tensor in given)
            blocks = Blocks(config, anchors[:some], length, flex)
            outs = [blocks.attend(query, key, value, layer)[:compared] for layer in range(config.num_layers)]
            torch.stack(outs).float().square().sum().backward()
            gradients = [t.grad[:compared] for t in (query, key, value) if t.grad is not None]
            results.append([outs[-1].detach(), *gradients])
    except Exception as error:  # a compiler fails in many ways, and the other road is open
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    for ours, theirs in zip(*results, strict=True):
        scale = float(theirs.float().abs().max())
        if not float((ours.float() - theirs.float()).abs().max()) <= 0.03 * scale:
            return "it does not agree with SDPA here"
    return None
