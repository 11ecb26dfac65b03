"""The kernels of attention, qkv and commit on a CUDA card: are they right, are rows equal to the last bit, how fast.

    python benchmarks/kernels_attention.py [--quick] [--output benchmarks/results/kernels-attention.json]

First every kernel against the layers' own operators in float32; then the same rows in `ar`, on a chain, in trees and in
a batch, bit by bit; then times: medians over replays of a CUDA graph that goes through the caches of many layers, so
that they come from memory and not from the L2 cache. A failing check is reported and the rest goes on. The last line is
JSON.
"""

import argparse
import json
import platform
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ddtree.kernels.attention import AttentionWorkspace, Tiles, locate, tree_attention
from ddtree.kernels.commit import commit
from ddtree.kernels.qkv import HeadNorms, write_heads
from ddtree.layers import KVCache, RMSNorm, Rope
from ddtree.tree import Nodes, chain
from kernels_attention_scenes import SHAPES, Shape, Story, close, random_tree, reference, scene, twisted
from kernels_attention_times import Load, bandwidth_gb_s, time_load, time_rest, time_tiles

DEVICE = torch.device("cuda")
REPORT: dict[str, Any] = {"checks": {}, "times": {}}


def attempt(group: str, name: str, function: Callable[[], Any]) -> Any:
    """Run, print and keep what comes out; an exception is a result too."""
    try:
        result = function()
    except Exception as error:
        traceback.print_exc(limit=-3)
        result = {"ok": False, "error": f"{type(error).__name__}: {str(error)[:300]}"}
    REPORT[group][name] = result
    print(f"{group} {name}: {json.dumps(result)}", flush=True)
    return result


def check_attention(shape: Shape, dtype: torch.dtype, mode: str, window: int | None = None) -> dict[str, Any]:
    """mode: invariant, plain, block or causal. The cache is NaN wherever nothing was written."""
    starts, rows = [700, 0, 2047], 19
    query, cache, rows_at, visible = scene(shape, dtype, starts, rows, mode)
    work = AttentionWorkspace.allocate(query, cache.data[0], invariant=mode == "invariant")
    for memory in (work.peak, work.total, work.acc):
        memory.fill_(float("nan"))
    locate(rows_at, work)
    got = tree_attention(query, cache.data[0], rows_at, work, window)
    return close(got, reference(query, cache, rows_at, visible, window), dtype)


def check_bits(shape: Shape, dtype: torch.dtype, start: int, tiles: Tiles | None = None) -> dict[str, Any]:
    """Every row of a path of 16: alone at its position, and in every other company."""
    story = Story(shape, dtype, start + 300)
    tree, path = twisted(15)
    wide, wide_path = twisted(15, siblings=4)
    alone = {start + d: story.answer(start + d, [Nodes.root()], [0], tiles)[start + d] for d in range(16)}
    others = [random_tree(40, 1), chain(15), Nodes.root(), random_tree(64, 2)]
    companies = {
        "chain": story.answer(start, [chain(15)], list(range(16)), tiles),
        "tree": story.answer(start, [tree], path, tiles),
        "tree, start - 5": story.answer(start - 5, [tree], path, tiles),
        "64 rows": story.answer(start, [wide], wide_path, tiles),
        "batch": story.answer(start, [tree, *others], path, tiles),
        "batch, longer cache": story.answer(start - 3, [wide, *others], wide_path, tiles, spare=1000),
    }
    result: dict[str, Any] = {"ok": True, "rows": len(wide)}
    for name, rows in companies.items():
        pairs = [(rows[p].float(), alone[p].float()) for p in rows if p in alone]
        differ = sum(not torch.equal(a, b) for a, b in pairs)
        if differ or not pairs:
            worst = max(((a - b).abs().max().item() for a, b in pairs), default=None)
            result |= {"ok": False, name: f"{differ} of {len(pairs)} rows differ, at most by {worst}"}
    return result


def check_tiles(shape: Shape) -> dict[str, Any]:
    """Which other shapes of programs give the same bits as the usual ones; nothing depends on it."""
    query, cache, rows, _ = scene(shape, torch.bfloat16, [700, 2047], 19, "invariant")
    answers = {}
    for tiles in (None, Tiles(64, 64, 4, 2), Tiles(64, 64, 8, 3), Tiles(128, 64, 8, 2), Tiles(16, 64, 4, 3)):
        work = AttentionWorkspace.allocate(query, cache.data[0], tiles)
        locate(rows, work)
        answers[str(tiles)] = tree_attention(query, cache.data[0], rows, work)
    usual = answers.pop("None")
    return {"ok": True} | {name: bool(torch.equal(usual, answer)) for name, answer in answers.items()}


def check_graph(shape: Shape) -> dict[str, Any]:
    """A captured round replayed at other lengths and with other trees equals the same calls outside."""
    query, cache, rows, _ = scene(shape, torch.bfloat16, [1000, 30], 16, "invariant")
    cache.data.nan_to_num_(0.5)
    work = AttentionWorkspace.allocate(query, cache.data[0])
    out = torch.empty(query.shape[0] * 16, query[0, 0].numel(), dtype=query.dtype, device=DEVICE)

    def call() -> None:
        locate(rows, work)
        tree_attention(query, cache.data[0], rows, work, out=out)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    other = scene(shape, torch.bfloat16, [1000, 30], 16, "invariant", seed=9)[2]
    rows.ancestors.copy_(other.ancestors)
    rows.depths.copy_(other.depths)
    rows.start.copy_(torch.tensor([77, 1030]))
    graph.replay()
    replayed = out.clone()
    call()
    return {"ok": bool(torch.equal(out, replayed)) and not bool(out.isnan().any())}


def check_heads(shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """Norm, rotary turn and cache write against the layers."""
    _, cache, rows, _ = scene(shape, dtype, [900, 4], 21, "invariant")
    heads, kv, dim = shape.heads, shape.kv, shape.dim
    raw = torch.randn(42, (heads + 2 * kv) * dim, device=DEVICE).to(dtype)
    rope = Rope(dim, 1e6, None, DEVICE)
    norms = [RMSNorm(torch.rand(dim, device=DEVICE) + 0.5, 1e-6) for _ in range(2)]
    want = raw.float().unflatten(-1, (-1, dim)).clone()
    want[:, :heads] = norms[0](want[:, :heads], torch.float32)
    want[:, heads : heads + kv] = norms[1](want[:, heads : heads + kv], torch.float32)
    rope.apply_(want[:, : heads + kv], rope.turns((rows.start.unsqueeze(1) + rows.depths).flatten()))
    table = rope.turns(torch.arange(cache.length, device=DEVICE))
    got = write_heads(raw, cache.data[0], rows, table, HeadNorms(norms[0].scale, norms[1].scale, 1e-6))
    places = rows.start.unsqueeze(1) + torch.arange(21, device=DEVICE)
    written = cache.data[0].transpose(1, 2)[rows.slot.unsqueeze(1), places].flatten(0, 1)
    return close(torch.cat([got.flatten(0, 1), written], 1), want, dtype)


def check_commit(shape: Shape) -> dict[str, Any]:
    """Paths that overlap their own rows, in all layers, and nothing else touched."""
    data = torch.randn(5, 4, 2 * shape.kv, 300, shape.dim, device=DEVICE).bfloat16()
    path = torch.tensor([[0, 2, 3, 7, 8, -1], [0, 1, 2, 3, 4, 5], [0, 5, 6, 7, 60, 63]], device=DEVICE)
    slot, position = torch.tensor([3, 0, 2], device=DEVICE), torch.tensor([200, 0, 17], device=DEVICE)
    want = KVCache(data.clone())
    want.view(slot.tolist()).commit(path, position)
    commit(data, slot, path, position)
    return {"ok": bool(torch.equal(data, want.data))}


def checks(quick: bool) -> None:
    dtypes = [torch.bfloat16] if quick else [torch.bfloat16, torch.float16, torch.float32]
    for name, shape in SHAPES.items():
        for dtype in dtypes:
            at = f"{name} {str(dtype)[6:]}"
            for mode in ("invariant", "plain", "block", "causal"):
                attempt("checks", f"{mode} {at}", lambda s=shape, d=dtype, m=mode: check_attention(s, d, m))
            attempt("checks", f"window {at}", lambda s=shape, d=dtype: check_attention(s, d, "block", 100))
            attempt("checks", f"qkv {at}", lambda s=shape, d=dtype: check_heads(s, d))
            starts = (505, 2040) if dtype == torch.float32 else (505, 2040, 16379)
            for start in starts:
                attempt("checks", f"bits {at} {start}", lambda s=shape, d=dtype, p=start: check_bits(s, d, p))
        attempt("checks", f"graph {name}", lambda s=shape: check_graph(s))
        attempt("checks", f"commit {name}", lambda s=shape: check_commit(s))
    attempt("checks", "bits of other tiles", lambda: check_tiles(SHAPES["qwen3-8b"]))


def times(quick: bool, turns: int) -> None:
    bandwidth = REPORT["copy_gb_s"] = bandwidth_gb_s()
    print("copy", bandwidth, "GB/s", flush=True)
    for name in ("qwen3-8b", "smollm2-135m"):
        shape = SHAPES[name]
        for batch in (1, 8):
            for context in (512, 2048, 16384):
                for rows in (1, 16) if quick else (1, 8, 16, 64):
                    load = Load(shape, batch, context + 37, rows)
                    label = f"{name} batch {batch} context {context} rows {rows}"
                    attempt("times", label, lambda x=load: time_load(x, turns, bandwidth))
                    torch.cuda.empty_cache()
            for rows in (1, 16, 64):
                label = f"rest {name} batch {batch} rows {rows}"
                attempt("times", label, lambda s=shape, b=batch, r=rows: time_rest(s, b, r, turns))
        if not quick:
            for context, rows in ((2048, 1), (2048, 16), (2048, 64), (16384, 1), (16384, 64)):
                load = Load(shape, 1, context + 37, rows)
                attempt("times", f"tiles {name} context {context} rows {rows}", lambda x=load: time_tiles(x, turns))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="fewer dtypes and rows, no comparison of tiles")
    options.add_argument("--skip", choices=("checks", "times"), help="leave this part out")
    options.add_argument("--turns", type=int, default=15)
    options.add_argument("--output", type=Path, help="write the JSON here too")
    args = options.parse_args()
    REPORT["machine"] = {
        "gpu": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(),
        "torch": torch.__version__,
        "triton": __import__("triton").__version__,
        "python": platform.python_version(),
        "command": " ".join(["python", *sys.argv]),
    }
    print(json.dumps(REPORT["machine"]), flush=True)
    if args.skip != "checks":
        checks(args.quick)
        bad = [name for name, result in REPORT["checks"].items() if not result["ok"]]
        print(f"{len(REPORT['checks']) - len(bad)} checks passed, {len(bad)} failed: {bad}", flush=True)
    if args.skip != "times":
        times(args.quick, args.turns)
    if args.output is not None:
        args.output.write_text(json.dumps(REPORT, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(REPORT))


if __name__ == "__main__":
    main()
