"""Attention kernels against the layers' own, and a row's bits wherever its path is."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddtree.kernels.attention import (
    AttentionRows,
    AttentionWorkspace,
    Tiles,
    chunk_bounds,
    locate,
    pick_tiles,
    tree_attention,
)
from ddtree.layers import KVCache, attend_segments, attention_mask
from ddtree.tree import Nodes, RoundState, chain, unpack

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
LENGTH = 330
COMPILED = Path(__file__).parent / "compiled_attention.py"


def random_tree(rows: int, seed: int) -> Nodes:
    source = torch.Generator().manual_seed(seed)
    nodes = Nodes.root()
    for row in range(1, rows):
        nodes.add(int(torch.randint(max(0, row - 3), row, (1,), generator=source)), 0)
    return nodes


def laid(trees: list[Nodes], device: torch.device) -> RoundState:
    """The trees in a state that is larger than they are, so that its views are not dense."""
    width = max(map(len, trees))
    state = RoundState.allocate(len(trees), width + 3, 80, device)
    state.lay(trees, [[[5] * 4] * 80] * len(trees))
    return state


def poisoned(slots: int, kv: int, dim: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    cache = KVCache.allocate(1, slots, LENGTH, kv, dim, dtype, device)
    cache.data.fill_(float("nan"))
    return cache


def reference(query, view: KVCache, starts, visible, window=None):
    """attend_segments over the same rows, all of equal number."""
    batch, n, heads, _ = query.shape
    segments = view.segments(starts, [n] * batch)
    groups = heads // (view.data.shape[2] // 2)
    masks = [
        attention_mask(
            torch.tensor([s.start], device=query.device), visible[b : b + 1], s.span, query.dtype, groups, window
        )
        for b, s in enumerate(segments)
    ]
    return attend_segments(query.flatten(0, 1), view, 0, segments, masks)


def run(query, cache: KVCache, rows: AttentionRows, window=None, *, invariant=True, tiles=None):
    layer = cache.data[0]
    work = AttentionWorkspace.allocate(query, layer, tiles, invariant)
    for memory in (work.peak, work.total, work.acc):
        memory.fill_(float("nan"))
    out = torch.full((query.shape[0] * query.shape[1], query[0, 0].numel()), float("nan"), dtype=query.dtype)
    out = out.to(query.device)
    locate(rows, work)
    assert tree_attention(query, layer, rows, work, window, out) is out
    return out


def scene(device, starts, rows, *, heads, kv, dim, dtype):
    """Queries, a cache that is NaN wherever nothing was written, and a view of it for sequences in other slots."""
    torch.manual_seed(3)
    batch = len(starts)
    cache = poisoned(batch + 1, kv, dim, dtype, device)
    slots = list(range(batch, 0, -1))
    for slot, start in zip(slots, starts, strict=True):
        cache.data[:, slot, :, : start + rows] = torch.randn(1, 2 * kv, start + rows, dim).to(device, dtype)
    query = torch.randn(batch, rows, heads, dim).to(device, dtype)
    return query, cache, cache.view(slots), torch.tensor(slots, device=device), torch.tensor(starts, device=device)


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv", "dim", "dtype", "starts", "rows"),
    [
        (6, 2, 64, torch.float16, [201, 0], 7),
        (4, 1, 128, torch.bfloat16, [127], 9),
        (2, 2, 96, torch.float32, [64, 130], 5),
        (2, 1, 256, torch.float16, [97], 3),
        (3, 1, 64, torch.float16, [120], 70),  # more than one block of rows, and two words of ancestor bits
    ],
)
def test_tree_equals_layers(device, heads, kv, dim, dtype, starts, rows, invariant):
    query, cache, view, slot, start = scene(device, starts, rows, heads=heads, kv=kv, dim=dim, dtype=dtype)
    trees = [random_tree(rows - b, b) for b in range(len(starts))]  # the second has padding
    state = laid(trees, device)
    at = AttentionRows(slot, start, state.rows.depths, state.rows.ancestors)
    got = run(query, cache, at, invariant=invariant)
    want = reference(query, view, starts, unpack(state.rows.ancestors, rows))
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 40, 150])
def test_block_equals_layers(device, causal, window):
    """The drafter's rows: a block behind the context, sliding windows over both."""
    starts, rows = [250, 3], 6
    query, cache, view, slot, start = scene(device, starts, rows, heads=4, kv=2, dim=64, dtype=torch.float16)
    got = run(query, cache, AttentionRows(slot, start, causal=causal), window)
    visible = torch.ones(2, rows, rows, dtype=torch.bool, device=device)
    want = reference(query, view, starts, visible.tril() if causal else visible, window)
    torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("window", [1, 30, 100])
def test_window_of_tree_counts_positions(device, invariant, window):
    """A row's distance to an ancestor is in depths, not in places: as if its path were a chain."""
    starts, rows = [190], 8
    query, cache, _, slot, start = scene(device, starts, rows, heads=2, kv=1, dim=64, dtype=torch.float16)
    state = laid([random_tree(rows, 5)], device)
    at = AttentionRows(slot, start, state.rows.depths, state.rows.ancestors)
    got = run(query, cache, at, window, invariant=invariant)
    visible, depths = unpack(state.rows.ancestors, rows)[0], state.rows.depths[0]
    for row in range(rows):
        path = visible[row].nonzero().flatten()
        places = torch.cat([torch.arange(starts[0], device=device), starts[0] + path])[-window:]
        assert len(path) == depths[row] + 1
        keys, values = (part[0, :, places] for part in cache.data[0, 1:2].chunk(2, dim=1))
        want = torch.nn.functional.scaled_dot_product_attention(query[:, row].transpose(0, 1), keys, values)
        torch.testing.assert_close(got[row], want.flatten(), atol=2e-3, rtol=2e-3)


class Story:
    """A text whose queries, keys and values are fixed by token; drafts off it are noise, their values NaN."""

    def __init__(self, device: torch.device, dtype: torch.dtype, dim: int, heads: int, kv: int) -> None:
        torch.manual_seed(7)
        self.device, self.kv, self.heads, self.dim = device, kv, heads, dim
        self.query = torch.randn(LENGTH, heads, dim).to(device, dtype)
        self.pair = torch.randn(2 * kv, LENGTH, dim).to(device, dtype)

    def answer(self, start: int, trees: list[Nodes], paths: list[list[int]], window=None) -> dict[int, torch.Tensor]:
        """Attention of the rows on the path of the first sequence, by position; the rows off it are junk.

        The other sequences have junk contexts; all are as long as the first.
        """
        state = laid(trees, self.device)
        n, batch = state.width, len(trees)
        cache = poisoned(batch, self.kv, self.dim, self.pair.dtype, self.device)
        query = torch.randn(batch, n, self.heads, self.dim).to(self.device, self.pair.dtype)
        starts = [start] + [max(1, start - 31 * b) for b in range(1, batch)]
        for b in range(1, batch):
            cache.data[0, b, :, : starts[b] + n] = torch.randn(2 * self.kv, starts[b] + n, self.dim) * 3
        cache.data[0, 0, :, :start] = self.pair[:, :start]
        for depth, row in enumerate(paths[0]):
            cache.data[0, 0, :, start + row] = self.pair[:, start + depth]
            query[0, row] = self.query[start + depth]
        at = AttentionRows(
            torch.arange(batch, device=self.device),
            torch.tensor(starts, device=self.device),
            state.rows.depths,
            state.rows.ancestors,
        )
        out = run(query, cache, at, window)
        return {start + depth: out[row] for depth, row in enumerate(paths[0])}


def twisted(depth: int) -> tuple[Nodes, list[int]]:
    """A path of `depth` among siblings, so that its rows do not lie one behind another; and its rows."""
    nodes, path = Nodes.root(), [0]
    for level in range(depth):
        for rank in range(level % 3):
            nodes.add(path[-1], rank + 1)
        path.append(nodes.add(path[-1], 0))
    return nodes, path


@pytest.mark.parametrize(
    ("dtype", "dim", "heads", "window"),
    [
        (torch.float16, 64, 3, None),
        (torch.bfloat16, 128, 4, None),
        (torch.float32, 64, 2, None),
        (torch.float16, 64, 3, 90),
    ],
)
def test_row_is_the_same_to_the_last_bit(device, dtype, dim, heads, window):
    """In ar, on a chain, in trees whose committed length differs, and beside others: tiles and chunks are crossed."""
    story = Story(device, dtype, dim, heads, 1)
    positions = [125, 127, 128]
    alone = {p: story.answer(p, [Nodes.root()], [[0]], window)[p] for p in positions}
    tree, path = twisted(5)
    seen = {
        "chain": story.answer(123, [chain(5)], [list(range(6))], window),
        "tree": story.answer(123, [tree], [path], window),
        "earlier tree": story.answer(124, [tree], [path], window),
        "beside others": story.answer(125, [tree, random_tree(12, 1)], [path, []], window),
    }
    for name, rows in seen.items():
        for p in set(positions) & set(rows):
            assert torch.equal(rows[p], alone[p]), f"{name}, position {p}"


def test_chunks_do_not_depend_on_the_length():
    long = chunk_bounds(100_000)
    assert long[:18] == [128 * i for i in range(17)] + [2048 + 256]
    assert long[16:33:8] == [2048, 4096, 8192]
    for length in (1, 128, 129, 2048, 2049, 40_000):
        edges = chunk_bounds(length)
        assert edges == long[: len(edges)]
        assert edges[-2] < length <= edges[-1]


@pytest.mark.parametrize("first", [32, 96])
def test_kernels_know_the_chunks(device, first):
    """The kernels compute the edges that chunk_bounds lists."""
    from attention_chunks import chunks_kernel

    edges = torch.tensor(chunk_bounds(20_000, first), device=device)
    near = torch.cat([edges[:-1], edges[1:] - 1, torch.randint(0, 20_000, (40,), device=device)]).int()
    near = near[torch.arange(256, device=device) % len(near)]
    chunk, begin = torch.full_like(near, -1), torch.full_like(near, -1)
    chunks_kernel[(1,)](near, chunk, begin, FIRST=first, SIZE=256)
    assert torch.equal(chunk.long(), torch.searchsorted(edges, near.long(), right=True) - 1)
    assert torch.equal(begin.long(), edges[chunk.long()])


def test_refusals(device):
    query, cache, _, slot, start = scene(device, [5], 2, heads=2, kv=1, dim=64, dtype=torch.float16)
    layer, rows = cache.data[0], AttentionRows(slot, start)
    work = AttentionWorkspace.allocate(query, layer)
    with pytest.raises(ValueError, match="float16, bfloat16, float32"):
        tree_attention(query.double(), layer, rows, work)
    with pytest.raises(ValueError, match="dense"):
        tree_attention(query.transpose(1, 2), layer, rows, work)
    with pytest.raises(ValueError, match="not made for queries"):
        tree_attention(query[:, :1].contiguous(), layer, rows, work)
    with pytest.raises(ValueError, match="positions"):
        tree_attention(query, layer[:, :, :100].contiguous(), rows, work)
    with pytest.raises(ValueError, match="do not fit"):
        tree_attention(query, torch.cat([layer, layer, layer], 1), rows, work)
    with pytest.raises(ValueError, match="multiple of the 64 keys"):
        AttentionWorkspace.allocate(query, layer, first_chunk=96)
    with pytest.raises(ValueError, match="depths"):
        tree_attention(query, layer, replace(rows, ancestors=start.view(1, 1, 1)), work)


def test_tiles_fit_shared_memory():
    assert pick_tiles(torch.bfloat16, 128, 227 * 1024) == Tiles(64, 64, 4, 3)
    assert pick_tiles(torch.bfloat16, 256, 99 * 1024).stages == 1


def compiled(capabilities: str, heads: str, inside: str) -> dict[str, list]:
    """Without the interpreter, hence in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(COMPILED), capabilities, heads, inside], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_compiles_for_every_card():
    """Each within its card's shared memory; all that fold a tile do it by the same operations on Hopper."""
    report = compiled("80,90,100,120", "bfloat16:128", "0")
    assert len(report) == 4 * 5
    for name, (shared, limit, _) in report.items():
        assert shared <= limit, name
    folds = [fold for name, (_, _, fold) in report.items() if "sm_90" in name and "attend" in name]
    assert len(folds) == 2
    assert folds[0].count("ex2.") == 34  # 32 scores of a thread, and its two rows' states
    assert len(set(folds)) == 1


@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_compiles_for_every_head_size(capability):
    heads = ",".join(f"{t}:{d}" for t in ("float16", "bfloat16", "float32") for d in (64, 96, 128, 256))
    for name, (shared, limit, _) in compiled(str(capability), heads, "0,1,2,3").items():
        assert shared <= limit, name
