"""Trees, caches and references for kernels_attention.py."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddtree.kernels.attention import AttentionRows, AttentionWorkspace, Tiles, locate, tree_attention
from ddtree.layers import KVCache, attend, attention_mask
from ddtree.tree import Nodes, RoundState, unpack

DEVICE = torch.device("cuda")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}  # of the norm, against float32


@dataclass(frozen=True)
class Shape:
    """Attention of a model."""

    heads: int
    kv: int
    dim: int


SHAPES = {
    "qwen3-8b": Shape(32, 8, 128),
    "smollm2-135m": Shape(9, 3, 64),
    "phi-like": Shape(8, 8, 96),
    "gemma-like": Shape(8, 4, 256),
}


def random_tree(rows: int, seed: int, deepest: int = 15) -> Nodes:
    """A tree of the usual kind: bushy at the root, up to `deepest`."""
    source = torch.Generator().manual_seed(seed)
    nodes = Nodes.root()
    while len(nodes) < rows:
        parent = int(torch.randint(max(0, len(nodes) - 6), len(nodes), (1,), generator=source))
        nodes.add(parent if nodes.depths[parent] < deepest else 0, 0)
    return nodes


def twisted(depth: int, siblings: int = 2) -> tuple[Nodes, list[int]]:
    """A path of `depth` among up to `siblings` others at each depth, and its rows."""
    nodes, path = Nodes.root(), [0]
    for level in range(depth):
        for rank in range((level + 1) % (siblings + 1) if siblings < 4 else 3):
            nodes.add(path[-1], rank + 1)
        path.append(nodes.add(path[-1], 0))
    while siblings >= 4 and len(nodes) < 64:
        nodes.add(0, len(nodes))
    return nodes, path


def laid(trees: list[Nodes]) -> RoundState:
    """A round's rows on the device; its views are not dense."""
    width = max(map(len, trees))
    state = RoundState.allocate(len(trees), width + 5, 64, DEVICE)
    state.lay(trees, [[[5] * 80] * 64] * len(trees))
    return state


def scene(
    shape: Shape, dtype: torch.dtype, starts: list[int], rows: int, mode: str, tree: Nodes | None = None, seed: int = 0
) -> tuple[Tensor, KVCache, AttentionRows, Tensor]:
    """Queries, a cache of one layer that is NaN where nothing was written, where the rows stand, what they see."""
    torch.manual_seed(seed)
    batch, length = len(starts), max(starts) + rows + 60
    cache = KVCache.allocate(1, batch + 1, length, shape.kv, shape.dim, dtype, DEVICE)
    cache.data.fill_(float("nan"))
    slots = list(range(batch, 0, -1))
    for slot, start in zip(slots, starts, strict=True):
        filled = torch.randn(2 * shape.kv, start + rows, shape.dim, device=DEVICE)
        cache.data[0, slot, :, : start + rows] = filled.to(dtype)
    query = torch.randn(batch, rows, shape.heads, shape.dim, device=DEVICE).to(dtype)
    slot, start = torch.tensor(slots, device=DEVICE), torch.tensor(starts, device=DEVICE)
    if mode in ("block", "causal"):
        visible = torch.ones(batch, rows, rows, dtype=torch.bool, device=DEVICE)
        causal = mode == "causal"
        return query, cache, AttentionRows(slot, start, causal=causal), visible.tril() if causal else visible
    trees = [tree or random_tree(rows, seed + b) for b in range(batch)]
    state = laid(trees)
    at = AttentionRows(slot, start, state.rows.depths, state.rows.ancestors)
    return query, cache, at, unpack(state.rows.ancestors, rows)


def reference(query: Tensor, cache: KVCache, rows: AttentionRows, visible: Tensor, window: int | None) -> Tensor:
    """The layers' own attention in float32, one sequence after another: [B * N, heads * hd]."""
    n, parts = query.shape[1], []
    for b, (slot, start) in enumerate(zip(rows.slot.tolist(), rows.start.tolist(), strict=True)):
        keys, values = cache.data[0, slot : slot + 1, :, : start + n].float().chunk(2, 1)
        mask = attention_mask(
            rows.start[b : b + 1], visible[b : b + 1], start + n, torch.float32, query.shape[2] // keys.shape[1], window
        )
        parts.append(attend(query[b : b + 1].float(), keys, values, mask))
    return torch.cat(parts)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Relative error of the norm; NaN never passes."""
    error = ((got.float() - want.float()).norm() / want.float().norm()).item()
    return {"ok": error < TOLERANCE[dtype], "error": error, "worst": (got.float() - want).abs().max().item()}


class Story:
    """A text whose queries, keys and values are fixed by position; everything off it is noise, its values NaN."""

    def __init__(self, shape: Shape, dtype: torch.dtype, length: int) -> None:
        torch.manual_seed(7)
        self.shape, self.dtype, self.length = shape, dtype, length
        self.query = torch.randn(length, shape.heads, shape.dim, device=DEVICE).to(dtype)
        self.pair = torch.randn(2 * shape.kv, length, shape.dim, device=DEVICE).to(dtype)

    def answer(
        self, start: int, trees: list[Nodes], path: list[int], tiles: Tiles | None, spare: int = 0
    ) -> dict[int, Tensor]:
        """Attention of the rows on the path of the first sequence, by position; the other sequences are junk.

        spare: positions the cache has beyond the text.
        """
        state, s = laid(trees), self.shape
        n, batch = state.width, len(trees)
        cache = torch.full((batch, 2 * s.kv, self.length + spare, s.dim), float("nan"), dtype=self.dtype, device=DEVICE)
        query = torch.randn(batch, n, s.heads, s.dim, device=DEVICE).to(self.dtype)
        place = batch // 2  # the slot, and not the first one
        starts = [start] + [max(0, start - 77 * b) for b in range(1, batch)]
        slots = [place] + [b for b in range(batch) if b != place]
        for slot, begin in zip(slots[1:], starts[1:], strict=True):
            cache[slot, :, : begin + n] = torch.randn(2 * s.kv, begin + n, s.dim, device=DEVICE).to(self.dtype) * 3
        cache[place, :, :start] = self.pair[:, :start]
        for depth, row in enumerate(path):
            cache[place, :, start + row] = self.pair[:, start + depth]
            query[0, row] = self.query[start + depth]
        at = AttentionRows(
            torch.tensor(slots, device=DEVICE), torch.tensor(starts, device=DEVICE), state.rows.depths,
            state.rows.ancestors,
        )  # fmt: skip
        work = AttentionWorkspace.allocate(query, cache, tiles)
        locate(at, work)
        out = tree_attention(query, cache, at, work)
        return {start + depth: out[row] for depth, row in enumerate(path)}
