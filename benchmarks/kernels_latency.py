"""Latency of a round's small kernels on a CUDA card, in chains as long as a model, in one CUDA graph.

    python benchmarks/kernels_latency.py [--context 2048]

First equality with the layers' operators and equality of bits over ar, chain, tree and batch, with and without launches
that overlap; then microseconds a layer of attention (alone, and behind write_heads, as a layer has it), add_norm,
swiglu, and of the launches at a round's ends, for each way of launching. The last line lists what is wrong.
"""

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ddtree import kernels
from ddtree.kernels.attention import AttentionWorkspace, Tiles, locate, pick_tiles, tree_attention
from ddtree.kernels.qkv import write_heads
from ddtree.layers import Rope
from ddtree.tree import Nodes, RoundState, chain
from kernels_attention_scenes import SHAPES, Shape, Story, close, random_tree, reference, scene, twisted
from kernels_attention_times import Layers, Load, median_us

DEVICE = torch.device("cuda")
FOUND: dict[str, Any] = {}
WAYS = {"0": "one by one", "1": "wait first", "2": "overlap"}


def attempt(name: str, function: Callable[[], Any]) -> None:
    """Keep what comes out; an exception is a result too."""
    try:
        FOUND[name] = function()
    except Exception as error:
        FOUND[name] = f"{type(error).__name__}: {str(error)[:200]}"
    print(name, json.dumps(FOUND[name]), flush=True)


def launches(way: str) -> None:
    os.environ["DDTREE_OVERLAP"] = way


def equal_layers(shape: Shape, mode: str, window: int | None = None) -> str:
    """Against the layers, with a cache that is NaN where nothing was written."""
    starts, rows = [700, 0, 2047], 19
    query, cache, at, visible = scene(shape, torch.bfloat16, starts, rows, mode)
    work = AttentionWorkspace.allocate(query, cache.data[0], invariant=mode == "invariant")
    for memory in (work.peak, work.total, work.acc):
        memory.fill_(float("nan"))
    locate(at, work)
    want = reference(query, cache, at, visible, window)
    found = close(tree_attention(query, cache.data[0], at, work, window), want, torch.bfloat16)
    return f"{'ok' if found['ok'] else 'BAD'} {found['error']:.1e}"


def equal_bits(shape: Shape, start: int, tiles: Tiles | None = None) -> str:
    """Every row of a path of 16: alone at its position, and in every other company."""
    story = Story(shape, torch.bfloat16, start + 300)
    tree, path = twisted(15)
    wide, wide_path = twisted(15, siblings=4)
    alone = {start + d: story.answer(start + d, [Nodes.root()], [0], tiles)[start + d] for d in range(16)}
    others = [random_tree(40, 1), chain(15), Nodes.root(), random_tree(64, 2)]
    companies = {
        "chain": story.answer(start, [chain(15)], list(range(16)), tiles),
        "pair": story.answer(start, [chain(1)], [0, 1], tiles),
        "tree": story.answer(start, [tree], path, tiles),
        "tree, start - 5": story.answer(start - 5, [tree], path, tiles),
        "64 rows": story.answer(start, [wide], wide_path, tiles),
        "batch": story.answer(start - 3, [wide, *others], wide_path, tiles, spare=1000),
        "ar in a batch": story.answer(start, [Nodes.root()] * 3, [0], tiles),
    }
    bad = []
    for name, rows in companies.items():
        pairs = [(rows[p], alone[p]) for p in rows if p in alone]
        differ = sum(not torch.equal(a, b) for a, b in pairs)
        if differ or not pairs:
            bad.append(f"{name}: {differ} of {len(pairs)}")
    return "ok" if not bad else "BAD " + "; ".join(bad)


def attention_us(shape: Shape, context: int, rows: int, batch: int = 1) -> dict[str, Any]:
    """Of a layer, over the caches of many layers."""
    layers, found = Layers(Load(shape, batch, context + 37, rows)), {}
    base = pick_tiles(torch.bfloat16, shape.dim, 227 * 1024)
    for way, name in WAYS.items():
        if way == "1" and rows == 64:
            continue
        launches(way)
        found[name] = median_us(layers.ours("invariant"), 9)
        found[f"{name}, behind heads"] = behind_heads(layers)
    variants = {
        "stages 2": (replace(base, stages=2), 128),
        "chunks 256": (base, 256),
        "chunks 64": (base, 64),
        "merged 0": (replace(base, merged=0), 128),
    }
    if 1 < rows <= 16 and rows * shape.heads // shape.kv <= base.rows:
        variants["merged 16"] = (replace(base, merged=16), 128)
    for name, (tiles, first) in variants.items() if batch == 1 else ():
        found[name] = median_us(layers.ours("invariant", tiles, first), 9)
    if rows == 16:
        found["block"] = median_us(layers.ours("block"), 9)
    return found


def behind_heads(layers: Layers) -> float:
    """write_heads and attention in turn."""
    s, load = layers.load.shape, layers.load
    raw = torch.randn(load.batch * load.rows, (s.heads + 2 * s.kv) * s.dim, device=DEVICE).bfloat16()
    turns = Rope(s.dim, 1e6, None, DEVICE).turns(torch.arange(load.context + 128, device=DEVICE))
    work = AttentionWorkspace.allocate(layers.query, layers.data[0])
    locate(layers.rows, work)
    out = torch.empty_like(layers.query)
    answer = torch.empty(load.batch * load.rows, s.heads * s.dim, device=DEVICE, dtype=torch.bfloat16)

    def call(i: int) -> None:
        write_heads(raw, layers.data[i], layers.rows, turns, None, out)
        tree_attention(out, layers.data[i], layers.rows, work, out=answer)

    return median_us([lambda i=i: call(i) for i in layers.order()], 9)


def small_us(hidden: int, inner: int, rows: int) -> dict[str, Any]:
    """add_norm, swiglu and what stands at a round's ends, each in a chain of its own."""
    x = torch.randn(rows, hidden, device=DEVICE)
    delta, scale = torch.randn_like(x).bfloat16(), torch.ones(hidden, device=DEVICE)
    features = torch.empty(1, rows, 5 * hidden, device=DEVICE, dtype=torch.bfloat16)
    gate_up = torch.randn(rows, 2 * inner, device=DEVICE).bfloat16()
    table, ids = torch.randn(50_000, hidden, device=DEVICE).bfloat16(), torch.arange(rows, device=DEVICE) * 77
    state = RoundState.allocate(1, rows, 15, DEVICE)
    state.lay([random_tree(rows, 3)], [[[1] * 64] * 64])
    path = torch.arange(16, device=DEVICE).clamp(max=rows - 1).view(1, 16)
    calls = {
        "add_norm": lambda: kernels.add_norm(x, delta, scale, 1e-6, torch.bfloat16),
        "add_norm, kept": lambda: kernels.add_norm(x, delta, scale, 1e-6, torch.bfloat16, features[0, :, :hidden]),
        "swiglu": lambda: kernels.swiglu(gate_up),
        "embed": lambda: kernels.embed(ids, table),
        "take": lambda: kernels.take(features, path),
        "report": lambda: kernels.report(state, None),
    }
    found: dict[str, Any] = {}
    for name, call in calls.items():
        found[name] = []
        for way in WAYS:
            launches(way)
            found[name].append(median_us([call] * 24, 7))
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--context", type=int, default=2048)
    args = options.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, "small kernels:", list(WAYS.values()), flush=True)
    main_shapes = {name: SHAPES[name] for name in ("qwen3-8b", "smollm2-135m")}
    launches("2")
    for name, shape in SHAPES.items():
        attempt(f"invariant {name}", lambda s=shape: equal_layers(s, "invariant"))
        for start in (5, 505, 2040, 16379) if name in main_shapes else (2040,):
            attempt(f"bits {name} {start}", lambda s=shape, p=start: equal_bits(s, p))
    small = SHAPES["smollm2-135m"]
    for mode in ("plain", "block", "causal"):
        attempt(mode, lambda m=mode: equal_layers(small, m))
    attempt("window", lambda: equal_layers(small, "block", 100))
    launches("0")
    attempt("invariant, one by one", lambda: equal_layers(SHAPES["qwen3-8b"], "invariant"))
    attempt("bits, one by one", lambda: equal_bits(SHAPES["qwen3-8b"], 2040))
    for name, shape in main_shapes.items():
        for rows in (1, 16, 64):
            attempt(f"{name} rows {rows}", lambda s=shape, r=rows: attention_us(s, args.context, r))
    attempt("qwen3-8b batch 8 rows 16", lambda: attention_us(SHAPES["qwen3-8b"], args.context, 16, 8))
    for hidden, inner in ((4096, 12288), (576, 1536)):
        for rows in (1, 16):
            attempt(f"small {hidden} rows {rows}", lambda h=hidden, i=inner, r=rows: small_us(h, i, r))
    bad = [name for name, found in FOUND.items() if isinstance(found, str) and not found.startswith("ok")]
    print(json.dumps({"bad": bad}))


if __name__ == "__main__":
    main()
