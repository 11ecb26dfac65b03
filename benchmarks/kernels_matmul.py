"""The products with weights on a CUDA card: are they right, are rows equal to the last bit, how fast.

    python benchmarks/kernels_matmul.py [--only qwen] [--skip checks] [--output benchmarks/results/kernels-matmul.json]

Times are microseconds of one call: medians over replays of a CUDA graph that goes through so many copies of the weights
that they come from memory. A program's shape is written columns x depth x stages w warps, and s the parts of the sum.
The last line is JSON: the best of each, torch's beside it, and what failed.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from common import finish, machine, parser
from ddtree import kernels
from ddtree.kernels.matmul import (
    ProductTiles,
    gated,
    pick_splits,
    product,
    product_parts,
)

DEVICE = torch.device("cuda")
# Name -> rows of the weight, inner dimension, kind, parts of the sum to try.
MODELS: dict[str, dict[str, tuple[int, int, str, tuple[int, ...]]]] = {
    "qwen": {
        "qkv": (6144, 4096, "plain", (1, 2, 4)),
        "out": (4096, 4096, "parts", (2, 4)),
        "gate_up": (24576, 4096, "gated", (1,)),
        "down": (4096, 12288, "parts", (2, 4, 6)),
        "head": (151936, 4096, "plain", (1,)),
    },
    "smol": {
        "qkv": (960, 576, "plain", (1, 3)),
        "out": (576, 576, "parts", (1, 3)),
        "gate_up": (3072, 576, "gated", (1,)),
        "down": (576, 1536, "parts", (3, 6)),
        "head": (49152, 576, "plain", (1,)),
    },
}
TILES = {  # rows of x -> columns, depth, stages, warps, rows of a program
    16: [(64, 128, 5, 4, 16), (64, 256, 5, 4, 16), (128, 128, 6, 4, 16)],
    32: [(64, 128, 4, 4, 32), (64, 128, 5, 4, 16), (128, 64, 4, 4, 32)],
    64: [(128, 64, 4, 4, 64), (128, 128, 4, 4, 64), (64, 128, 3, 4, 64), (64, 128, 4, 4, 32), (64, 128, 5, 4, 16)],
    128: [(128, 64, 6, 8, 128), (128, 64, 4, 4, 64), (64, 128, 3, 4, 64), (64, 128, 4, 4, 32), (64, 128, 5, 4, 16)],
}
COLD = 250_000_000  # bytes that a graph reads before it comes back to the same weights


def name_of(tiles: ProductTiles) -> str:
    """As in the output."""
    return f"{tiles.columns}x{tiles.depth}x{tiles.stages}w{tiles.warps}r{tiles.rows}"


def graph_time(call: Callable[[int], Any], calls: int, turns: int = 9) -> float:
    """Median microseconds of a call in a graph of `calls`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
        call(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            call(index)
    times = []
    for turn in range(turns + 2):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        graph.replay()
        after.record()
        torch.cuda.synchronize()
        if turn >= 2:
            times.append(1000 * before.elapsed_time(after) / calls)
    return round(statistics.median(times), 2)


@triton.jit
def stream_kernel(data, out, block: tl.constexpr):
    """Read `block` words and keep next to nothing: what reading alone costs."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    tl.store(out + tl.program_id(0), tl.sum(tl.load(data + at), 0))


def reading() -> dict[str, Any]:
    """Megabytes -> [microseconds, GB/s] of reading so much, cold."""
    results: dict[str, Any] = {}
    memory = torch.zeros(700_000_000, dtype=torch.int32, device=DEVICE)
    out = torch.empty(400_000, dtype=torch.int32, device=DEVICE)
    block = 8192
    for megabytes in (33.5, 50.3, 100.7, 201.3, 1244):
        programs = int(megabytes * 1e6) // (4 * block)
        copies = len(memory) // (programs * block)

        def call(i: int, n: int = programs, c: int = copies) -> None:
            stream_kernel[(n,)](memory[(i % c) * n * block :], out, block=block, num_warps=8)

        found = graph_time(call, max(copies, 4))
        results[str(megabytes)] = [found, round(megabytes * 1e3 / found)]
    return results


def run(kind: str, x: Tensor, weight: Tensor, **how: Any) -> Tensor:
    """One of our products."""
    return {"plain": product, "gated": gated, "parts": product_parts}[kind](x, weight, **how)


def complete(kind: str, x: Tensor, weight: Tensor, **how: Any) -> Tensor:
    """With the parts added, as their reader does."""
    result = run(kind, x, weight, **how)
    return result.cumsum(0)[-1] if kind == "parts" else result


def check(kind: str, columns: int, inner: int, dtype: torch.dtype) -> list[str]:
    """What is wrong with a product of this shape."""
    wrong: list[str] = []
    weight = torch.randn(columns, inner, device=DEVICE).mul_(inner**-0.5).to(dtype)
    x = torch.randn(128, inner, device=DEVICE).to(dtype)
    got = complete(kind, x, weight)
    want, theirs = x.double() @ weight.double().T, F.linear(x, weight)
    if kind == "gated":
        want = F.silu(want[:, ::2]) * want[:, 1::2]
        theirs = F.silu(theirs[:, ::2]) * theirs[:, 1::2]
    error, usual = ((value.double() - want).abs().max().item() for value in (got, theirs))
    if not error <= 1.3 * usual + 1e-6:
        wrong.append(f"error {error:.2e}, torch's {usual:.2e}")
    picked = [0, 3, 15, 31, 63, 127]
    alone = {i: run(kind, x[i : i + 1], weight)[..., 0, :] for i in picked}
    order = torch.randperm(128, device=DEVICE)
    for rows in (1, 2, 6, 16, 33, 64, 128):
        here = run(kind, x[:rows], weight)
        if bad := [i for i in picked if i < rows and not torch.equal(here[..., i, :], alone[i])]:
            worst = max((here[..., i, :].float() - alone[i].float()).abs().max().item() for i in bad)
            wrong.append(f"bits differ at M={rows} rows {bad} by {worst:.1e}")
        swapped = order[:rows]
        here = run(kind, x[swapped], weight)
        for place, i in enumerate(swapped.tolist()):
            if i in alone and not torch.equal(here[..., place, :], alone[i]):
                wrong.append(f"bits differ at M={rows} row {i} at place {place}")
        beside = x[:rows].clone()
        beside[1:] = torch.tensor([float("nan"), 1e4], dtype=dtype, device=DEVICE).repeat(inner // 2)
        if not torch.equal(run(kind, beside, weight)[..., 0, :], alone[0]):
            wrong.append(f"bits differ beside others at M={rows}")
    for rows, shapes in TILES.items():
        for shape in shapes:
            here = run(kind, x[: min(rows, 16)] if rows == 16 else x[:rows], weight, tiles=ProductTiles(*shape))
            if not torch.equal(here[..., 3, :], alone[3]):
                wrong.append(f"bits of tiles {shape} differ")
    again = [complete(kind, x[:5], weight) for _ in range(20)]
    if not all(torch.equal(again[0], other) for other in again):
        wrong.append("a second call differs")
    return wrong


def checks(only: str) -> dict[str, Any]:
    """Name -> what is wrong; nothing where all is well."""
    failed: dict[str, Any] = {}
    count = 0
    for model, shapes in MODELS.items():
        for part, (columns, inner, kind, _) in shapes.items():
            cases = [(kind, torch.bfloat16)]
            cases += [("plain", torch.bfloat16)] if kind == "parts" else []
            cases += [("plain", torch.float16)] if part == "out" else []
            for way, dtype in cases if columns < 100_000 and only in f"{model} {part}" else []:
                name = f"{model} {part} {way} {str(dtype)[6:]}"
                try:
                    wrong = check(way, columns, inner, dtype)
                except Exception as error:
                    wrong = [f"{type(error).__name__}: {str(error)[:300]}"]
                count += 1
                if wrong:
                    failed[name] = wrong[:4]
                    print(f"FAILED {name}: {wrong[:4]}", flush=True)
    print(f"checks: {count - len(failed)} of {count} good", flush=True)
    return failed


def time_shape(model: str, part: str, best: dict[str, Any]) -> None:
    """All of M, tiles and splits of one weight."""
    columns, inner, kind, all_splits = MODELS[model][part]
    size = 2 * columns * inner
    copies = max(2, min(300, -(-COLD // size)))
    calls = max(copies, min(24, 4 * COLD // size), 3)
    weights = [torch.randn(columns, inner, dtype=torch.bfloat16, device=DEVICE) for _ in range(copies)]
    for rows in (1, 16, 32, 64, 128):
        x = torch.randn(rows, inner, device=DEVICE).bfloat16()
        torch_time = graph_time(lambda i, a=x: F.linear(a, weights[i % copies]), calls)
        found: dict[str, float] = {}
        shapes = TILES[max(16, rows)]
        if rows == 16:
            shapes = shapes[:1]
        ways = [(shape, splits, kind) for shape in shapes for splits in all_splits]
        if kind == "parts":
            ways.append((shapes[0], pick_splits(columns, inner, True), "plain"))
        for shape, splits, way in ways:
            tiles = ProductTiles(*shape)
            name = f"{name_of(tiles)}s{splits}" + ("+reduce" if way != kind else "")
            try:
                found[name] = graph_time(
                    lambda i, a=x, t=tiles, s=splits, w=way: run(w, a, weights[i % copies], tiles=t, splits=s), calls
                )
            except Exception as error:
                found[name] = float("nan")
                print(f"{name} {part}: {type(error).__name__} {str(error)[:150]}")
        first = min(found, key=lambda n: (found[n] != found[n], found[n]))
        rate = round(size / 1e3 / found[first])
        best[f"{model} {part} {rows}"] = [torch_time, found[first], first, rate]
        rest = " ".join(f"{n}:{t}" for n, t in found.items())
        print(f"{model} {part} M={rows} torch {torch_time} best {rate}GB/s {rest}", flush=True)


class Layer:
    """Weights of one layer, and the ways to run its products."""

    def __init__(self, model: str) -> None:
        def weight(part: str) -> Tensor:
            columns, inner = MODELS[model][part][:2]
            return torch.randn(columns, inner, dtype=torch.bfloat16, device=DEVICE).mul_(inner**-0.5)

        self.qkv, self.out, self.gate_up, self.down = map(weight, ("qkv", "out", "gate_up", "down"))
        self.scale = torch.ones(self.qkv.shape[1], device=DEVICE)

    def plain(self, x: Tensor, delta: Tensor, heads: Tensor) -> Tensor:
        """By torch's products; the attention's place is taken by one small kernel."""
        states = kernels.add_norm(x, delta, self.scale, 0.1, torch.bfloat16)
        F.linear(states, self.qkv)
        delta = F.linear(kernels.swiglu(heads), self.out)
        states = kernels.add_norm(x, delta, self.scale, 0.1, torch.bfloat16)
        return F.linear(kernels.swiglu(F.linear(states, self.gate_up)), self.down)

    def ours(self, x: Tensor, parts: Tensor, heads: Tensor) -> Tensor:
        """The same by our products."""
        states = kernels.add_norm(x, parts, self.scale, 0.1, torch.bfloat16)
        product(states, self.qkv)
        parts = product_parts(kernels.swiglu(heads), self.out)
        states = kernels.add_norm(x, parts, self.scale, 0.1, torch.bfloat16)
        return product_parts(gated(states, self.gate_up), self.down)


def time_layers(model: str) -> dict[str, Any]:
    """Microseconds of a layer without its attention: torch's products, ours, ours with launches that overlap."""
    count = 5 if model == "qwen" else 60
    layers = [Layer(model) for _ in range(count)]
    hidden = layers[0].qkv.shape[1]
    results: dict[str, Any] = {}
    ways = {"ours": "0", "overlapped": "2"}
    for rows in (1, 16, 64):
        x, heads = torch.randn(rows, hidden, device=DEVICE), torch.randn(rows, 2 * hidden, device=DEVICE).bfloat16()
        delta = torch.randn(rows, hidden, device=DEVICE).bfloat16()
        parts = product_parts(torch.randn(rows, layers[0].down.shape[1], device=DEVICE).bfloat16(), layers[0].down)
        found = {"torch": graph_time(lambda i, a=(x, delta, heads): layers[i % count].plain(*a), 2 * count)}
        start = torch.randn(rows, hidden, device=DEVICE)  # x grows
        want = layers[0].ours(start.clone(), parts, heads)
        for name, overlap in ways.items():
            os.environ["DDTREE_OVERLAP"] = overlap
            try:
                got = layers[0].ours(start.clone(), parts, heads)
                if not torch.equal(got, want):
                    print(f"FAILED layers {model} {rows} {name}: bits differ")
                found[name] = graph_time(lambda i, a=(x, parts, heads): layers[i % count].ours(*a), 2 * count)
            except Exception as error:
                print(f"layers {name}: {type(error).__name__} {str(error)[:200]}")
        results[f"{model} {rows}"] = found
        print(f"layers {model} M={rows} {found}", flush=True)
    return results


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", default="", help="only what has this in 'model part'")
    options.add_argument("--skip", choices=("checks", "times", "layers"), action="append", default=[])
    chosen: argparse.Namespace = options.parse_args()
    started = time.perf_counter()
    report: dict[str, Any] = {"machine": machine(), "best": {}}
    report["failed"] = {} if "checks" in chosen.skip else checks(chosen.only)
    print(f"{time.perf_counter() - started:.0f} s", flush=True)
    if "layers" not in chosen.skip:
        report["layers"] = {}
        for model in MODELS:
            report["layers"] |= time_layers(model)
            torch.cuda.empty_cache()
        print(f"{time.perf_counter() - started:.0f} s", flush=True)
    if "times" not in chosen.skip:
        report["reading"] = reading()
        print(f"reading MB: [us, GB/s] {json.dumps(report['reading'])}", flush=True)
        for model, shapes in MODELS.items():
            for part in shapes:
                if chosen.only in f"{model} {part}":
                    time_shape(model, part, report["best"])
                    torch.cuda.empty_cache()
    print(f"{time.perf_counter() - started:.0f} s", flush=True)
    finish(report, chosen.output)


if __name__ == "__main__":
    main()
