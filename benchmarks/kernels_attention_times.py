"""What kernels_attention.py times: loads over the caches of many layers."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from ddtree.kernels.attention import AttentionRows, AttentionWorkspace, Tiles, locate, pick_tiles, tree_attention
from ddtree.kernels.commit import commit
from ddtree.kernels.qkv import HeadNorms, write_heads
from ddtree.layers import RMSNorm, Rope
from kernels_attention_scenes import Shape, random_tree, scene

DEVICE = torch.device("cuda")


def median_us(calls: list[Callable[[], Any]], turns: int) -> float:
    """Microseconds of one call: one graph holds them all."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for turn in range(turns + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if turn >= 3:
            times.append(1000 * begin.elapsed_time(end) / len(calls))
    return round(statistics.median(times), 2)


@dataclass(frozen=True)
class Load:
    """One point of the tables."""

    shape: Shape
    batch: int
    context: int
    rows: int

    def bytes(self) -> int:
        """Keys and values read once, queries in and answers out, bfloat16."""
        s = self.shape
        return 2 * self.batch * s.dim * (2 * s.kv * (self.context + self.rows) + 2 * s.heads * self.rows)


class Layers:
    """Caches of enough layers that one pass does not fit the L2 cache, and calls that go through them."""

    def __init__(self, load: Load) -> None:
        s, length = load.shape, load.context + 128
        one = 4 * load.batch * s.kv * length * s.dim
        self.load, self.count = load, max(2, min(36, -(-400_000_000 // one)))
        self.data = torch.randn(self.count, load.batch, 2 * s.kv, length, s.dim, device=DEVICE, dtype=torch.bfloat16)
        self.query = torch.randn(load.batch, load.rows, s.heads, s.dim, device=DEVICE, dtype=torch.bfloat16)
        tree = random_tree(load.rows, 4)
        _, _, self.rows, self.visible = scene(s, torch.bfloat16, [load.context] * load.batch, load.rows, "tree", tree)
        self.rows = replace(self.rows, slot=torch.arange(load.batch, device=DEVICE))

    def order(self) -> Iterator[int]:
        return iter([i % self.count for i in range(max(self.count, 24))])

    def ours(self, mode: str, tiles: Tiles | None = None, first_chunk: int = 128) -> list[Callable[[], Any]]:
        rows = self.rows
        if mode in ("block", "causal"):
            rows = AttentionRows(rows.slot, rows.start, causal=mode == "causal")
        work = AttentionWorkspace.allocate(self.query, self.data[0], tiles, mode == "invariant", first_chunk)
        locate(rows, work)
        out = torch.empty(self.query.shape[0] * self.query.shape[1], self.query[0, 0].numel(), device=DEVICE).bfloat16()
        return [lambda i=i: tree_attention(self.query, self.data[i], rows, work, out=out) for i in self.order()]

    def sdpa(self) -> list[Callable[[], Any]]:
        """torch's, with the query heads of a group packed into the rows and the mask that a tree needs."""
        load, s = self.load, self.load.shape
        packed = self.query.unflatten(2, (s.kv, -1)).permute(0, 2, 3, 1, 4).reshape(load.batch, s.kv, -1, s.dim)
        span, mask = load.context + load.rows, None
        if load.rows > 1:
            room = torch.zeros(load.batch, 1, packed.shape[2], -(-span // 16) * 16, device=DEVICE).bfloat16()
            hidden = ~self.visible.unsqueeze(1).repeat(1, 1, packed.shape[2] // load.rows, 1)
            room[..., load.context : span].masked_fill_(hidden, -torch.inf)
            mask = room[..., :span].expand(-1, s.kv, -1, -1)

        def call(i: int) -> None:
            keys, values = self.data[i][:, :, :span].chunk(2, 1)
            F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask)

        return [lambda i=i: call(i) for i in self.order()]


class Without:
    """Attention with one of its kernels left out, to see what the other takes."""

    def __init__(self, name: str) -> None:
        from ddtree.kernels import attention_jit

        self.module, self.name, self.kernel = attention_jit, name, getattr(attention_jit, name)

    def __enter__(self) -> None:
        setattr(self.module, self.name, self)

    def __exit__(self, *_: object) -> None:
        setattr(self.module, self.name, self.kernel)

    def __getitem__(self, _: object) -> Callable[..., None]:
        return lambda *args, **options: None


def time_load(load: Load, turns: int, bandwidth: float) -> dict[str, Any]:
    layers = Layers(load)
    result: dict[str, Any] = {}
    result["invariant"] = median_us(layers.ours("invariant"), turns)
    result["plain"] = median_us(layers.ours("plain"), turns)
    with Without("merge_kernel"):
        result["attend_only"] = median_us(layers.ours("invariant"), turns)
    with Without("attend_kernel"):
        result["merge_only"] = median_us(layers.ours("invariant"), turns)
    try:
        result["sdpa"] = median_us(layers.sdpa(), turns)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        result["sdpa"] = str(error)[:80]
    for name in ("invariant", "plain", "sdpa"):
        if isinstance(result[name], float):
            result[f"{name}_gb_s"] = round(load.bytes() / result[name] / 1000)
    result["floor"] = round(load.bytes() / bandwidth / 1000, 2)
    return result


def time_tiles(load: Load, turns: int) -> dict[str, Any]:
    """Other shapes of programs and other first chunks."""
    layers, result = Layers(load), {}
    base = pick_tiles(torch.bfloat16, load.shape.dim, 227 * 1024)
    choices = {
        "base": (base, 128),
        "stages 2": (replace(base, stages=2), 128),
        "stages 4": (replace(base, stages=4), 128),
        "keys 128": (replace(base, keys=128, stages=2), 128),
        "keys 32": (replace(base, keys=32, stages=4), 128),
        "warps 8": (replace(base, warps=8), 128),
        "rows 16": (replace(base, rows=16), 128),
        "rows 32": (replace(base, rows=32), 128),
        "merged by a second launch": (replace(base, merged=0), 128),
        "first chunk 64": (base, 64),
        "first chunk 256": (base, 256),
        "first chunk 512": (base, 512),
    }
    for name, (tiles, chunk) in choices.items():
        if chunk % tiles.keys:
            continue
        for mode in ("invariant", "plain"):
            try:
                result[f"{name}, {mode}"] = median_us(layers.ours(mode, tiles, chunk), turns)
            except Exception as error:
                result[f"{name}, {mode}"] = f"{type(error).__name__}: {str(error)[:60]}"
    return result


def time_rest(shape: Shape, batch: int, rows: int, turns: int) -> dict[str, Any]:
    """write_heads beside the operators of torch, locate, commit (36 layers in one launch), and the drafter's block."""
    load = Load(shape, batch, 2048, rows)
    layers, n = Layers(load), batch * rows
    raw = torch.randn(n, (shape.heads + 2 * shape.kv) * shape.dim, device=DEVICE).bfloat16()
    table = Rope(shape.dim, 1e6, None, DEVICE).turns(torch.arange(2048 + 128, device=DEVICE))
    scale = torch.ones(shape.dim, device=DEVICE)
    norms = HeadNorms(scale, scale, 1e-6)
    out = torch.empty_like(layers.query)
    work = AttentionWorkspace.allocate(layers.query, layers.data[0])
    data = torch.zeros(36, batch, 2 * shape.kv, 2048 + 128, shape.dim, device=DEVICE, dtype=torch.bfloat16)
    path = 2 * torch.arange(max(1, min(rows // 2, 16)), device=DEVICE).expand(batch, -1).contiguous()  # every other row
    at = layers.rows
    norm, turns = RMSNorm(scale, 1e-6), table[(at.start.unsqueeze(1) + at.depths).flatten()]
    places = at.start.unsqueeze(1) + torch.arange(rows, device=DEVICE)

    def by_torch(i: int) -> None:
        heads = raw.float().unflatten(-1, (-1, shape.dim))
        queries, keys, values = heads.split([shape.heads, shape.kv, shape.kv], 1)
        queries, keys = norm(queries, torch.float32), norm(keys, torch.float32)
        for part in (queries, keys):
            Rope.apply_(part, turns)
        out.copy_(queries.view_as(out))
        both = torch.cat([keys, values], 1).bfloat16().unflatten(0, (batch, rows))
        layers.data[i].transpose(1, 2)[at.slot.unsqueeze(1), places] = both

    calls = {
        "write_heads": [lambda i=i: write_heads(raw, layers.data[i], at, table, norms, out) for i in layers.order()],
        "write_heads_torch": [lambda i=i: by_torch(i) for i in layers.order()],
        "locate": [lambda: locate(at, work)] * 24,
        "commit": [lambda: commit(data, at.slot, path, at.start)] * 4,
        "block": layers.ours("block"),
        "causal": layers.ours("causal"),
    }
    return {name: median_us(call, turns) for name, call in calls.items()}


def bandwidth_gb_s() -> float:
    """Of a copy, bytes read plus bytes written."""
    source = torch.randn(512, 1024, 1024, device=DEVICE)
    target = torch.empty_like(source)
    return round(2 * source.nbytes / median_us([lambda: target.copy_(source)] * 4, 10) / 1000, 1)
