"""Ways to lay attention over programs on a CUDA card: are they equal to the last bit, and how fast.

    python benchmarks/kernels_attention_launches.py [--quick] [--before SRC] [--output FILE.json]

First the answers against float64, and the same rows under every launch, bit by bit, in forwards of 1 to 64 rows. Then
microseconds of a layer, every variant in turn in one run: replays of CUDA graphs that go through the caches of many
layers, launched as a round launches them. `before` is the attention of another version of this repository (SRC: its
folder `src`), `now` what `AttentionWorkspace.allocate` picks; the rest are launches that it could pick. Bfloat16, the
attention of Qwen3-8B. The last line is JSON.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ddtree.kernels import attention as now
from ddtree.kernels.attention import AttentionWorkspace, Launch, Tiles, locate, pick_tiles, tree_attention
from ddtree.tree import Nodes, chain
from kernels_attention_scenes import SHAPES, Story, random_tree, scene, twisted
from kernels_attention_times import DEVICE, Layers, Load

SHAPE = SHAPES["qwen3-8b"]
TILES = pick_tiles(torch.bfloat16, SHAPE.dim, 227 * 1024)
FEW = Launch(TILES.rows, TILES.warps, TILES.stages, units=1, tails=True)
WIDE = Launch(128, 8, 3, units=2, tails=False)
LAUNCHES = {
    "one chunk": FEW,
    "one, tails merged": replace(FEW, tails=False),
    "two": replace(FEW, units=2),
    "two, tails merged": replace(FEW, units=2, tails=False),
    "two, 2 stages": replace(FEW, units=2, tails=False, stages=2),
    "wide": WIDE,
    "wide, 2 stages": replace(WIDE, stages=2),
    "wide, one chunk": replace(WIDE, units=1),
    "one, ask 128": replace(FEW, ask=128),
    "one, ask 1024": replace(FEW, ask=1024),
}
SWEEP = {  # (batch, context, rows): what is worth a try there
    (1, 2048, 64): [n for n in LAUNCHES if "ask" not in n],
    (1, 16384, 64): [n for n in LAUNCHES if "ask" not in n],
    (1, 2048, 32): ["one chunk", "one, tails merged", "two", "two, tails merged", "wide"],
    (1, 2048, 16): ["one, tails merged", "two", "one, ask 128", "one, ask 1024"],
    (1, 16384, 16): ["one, tails merged", "two", "one, ask 128", "one, ask 1024"],
    (1, 16384, 1): ["two", "one, ask 128", "one, ask 1024"],
    (8, 4096, 16): ["one chunk", "one, tails merged", "two", "two, tails merged"],
    (8, 4096, 1): ["one chunk", "two"],
}


@contextmanager
def modules_of(source: Path) -> Iterator[None]:
    """Inside, `ddtree` is imported from another folder; what was imported stays itself."""
    ours = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "ddtree"}
    for name in ours:
        del sys.modules[name]
    sys.path.insert(0, str(source))
    try:
        yield
    finally:
        sys.path.remove(str(source))
        for name in [name for name in sys.modules if name.split(".")[0] == "ddtree"]:
            del sys.modules[name]
        sys.modules.update(ours)


def load_before(source: Path) -> ModuleType:
    """The attention of another version."""
    with modules_of(source):
        module = import_module("ddtree.kernels.attention")
        module.jit("attention")  # kept by the room, so that it is not looked up again
    assert Path(str(module.__file__)).is_relative_to(source.resolve()), module.__file__
    return module


def check_against_float64(start: int, n: int) -> dict[str, Any]:
    """The norm of the error of a tree's rows over that of the answers."""
    query, cache, rows, visible = scene(SHAPE, torch.bfloat16, [start], n, "invariant")
    work = AttentionWorkspace.allocate(query, cache.data[0])
    for memory in (work.peak, work.total, work.acc):
        memory.fill_(float("nan"))
    locate(rows, work)
    got = tree_attention(query, cache.data[0], rows, work).view(n, SHAPE.heads, SHAPE.dim)
    keys, values = cache.data[0, 1, :, : start + n].double().chunk(2)
    groups, hidden = SHAPE.heads // SHAPE.kv, torch.zeros(n, start + n, dtype=torch.bool, device=DEVICE)
    hidden[:, start:] = ~visible[0]
    keys, values = (part.repeat_interleave(groups, 0) for part in (keys, values))
    scores = query[0].double().transpose(0, 1) @ keys.transpose(1, 2) / SHAPE.dim**0.5
    want = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values
    error = ((got.transpose(0, 1).double() - want).norm() / want.norm()).item()
    return {"ok": error < 5e-3, "error": error}


def check_launches(start: int, n: int, spare: int) -> dict[str, Any]:
    """Every launch gives the same bits to a batch of trees."""
    query, cache, rows, _ = scene(SHAPE, torch.bfloat16, [start, max(0, start - spare)], n, "invariant")
    answers = {}
    for name, launch in {"picked": None, **LAUNCHES}.items():
        work = AttentionWorkspace.allocate(query, cache.data[0], launch=launch)
        for memory in (work.peak, work.total, work.acc):
            memory.fill_(float("nan"))
        locate(rows, work)
        answers[name] = tree_attention(query, cache.data[0], rows, work)
    want = answers["one chunk"]
    bad = {name: int((got != want).any(1).sum()) for name, got in answers.items() if not torch.equal(got, want)}
    return {"ok": not bad and not bool(want.isnan().any()), "rows that differ": bad}


def check_rows(start: int) -> dict[str, Any]:
    """A path's rows alone, on a chain, in trees of 24, 48, 64 and 128 rows and in a batch, as they are launched."""
    story = Story(SHAPE, torch.bfloat16, start + 300)
    alone = {start + d: story.answer(start + d, [Nodes.root()], [0], None)[start + d] for d in range(16)}
    tree, path = twisted(15)
    wide, wide_path = twisted(15, siblings=4)
    widest = Nodes.root()
    for row in range(1, len(wide)):
        widest.add(wide.parents[row], 0)
    while len(widest) < 128:
        widest.add(0, 0)
    others = [random_tree(40, 1), chain(15), Nodes.root(), random_tree(64, 2)]
    companies = {
        "chain": ([chain(15)], list(range(16))),
        "tree": ([tree], path),
        "64 rows": ([wide], wide_path),
        "128 rows": ([widest], wide_path),
        "batch": ([wide, *others], wide_path),
    }
    bad = {}
    for name, (trees, rows) in companies.items():
        seen = story.answer(start, trees, rows, None, spare=500 if name == "batch" else 0)
        if differ := sum(not torch.equal(seen[p], alone[p]) for p in alone):
            bad[name] = f"{differ} of {len(alone)} rows"
    return {"ok": not bad, "differ": bad}


def calls(layers: Layers, module: ModuleType, **options: Any) -> list[Callable[[], Any]]:
    """One pass through the layers; what it captures stays alive with it."""
    at, n = layers.rows, layers.load.rows
    rows = module.AttentionRows(at.slot, at.start, at.depths, at.ancestors)
    work = module.AttentionWorkspace.allocate(layers.query, layers.data[0], **options)
    module.locate(rows, work)
    out = torch.empty(layers.load.batch * n, SHAPE.heads * SHAPE.dim, device=DEVICE, dtype=torch.bfloat16)
    return [
        lambda i=i: module.tree_attention(layers.query, layers.data[i], rows, work, out=out) for i in layers.order()
    ]


def alternate(variants: dict[str, list[Callable[[], Any]]], turns: int) -> dict[str, float]:
    """Median microseconds of a call of each variant; their graphs are replayed in turn."""
    graphs, spent = {}, {name: [] for name in variants}
    for name, functions in variants.items():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            functions[0]()
        torch.cuda.current_stream().wait_stream(side)
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for function in functions:
                function()
    for turn in range(turns + 2):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 2:
                spent[name].append(1000 * begin.elapsed_time(end) / len(variants[name]))
    return {name: round(statistics.median(times), 2) for name, times in spent.items()}


def time_load(load: Load, before: ModuleType | None, names: list[str], keys: bool, turns: int) -> dict[str, Any]:
    layers, variants, failed = Layers(load), {}, {}
    wanted: dict[str, tuple[ModuleType, dict[str, Any]]] = {"before": (before, {})} if before else {}
    wanted |= {"now": (now, {})} | {name: (now, {"launch": LAUNCHES[name]}) for name in names}
    if keys:  # other bits: it would be the choice for all rows
        tiles = Tiles(rows=64, keys=128, warps=4, stages=2)
        for name in ("one chunk", "wide"):
            wanted[f"{name}, 128 keys"] = (now, {"launch": replace(LAUNCHES[name], stages=2), "tiles": tiles})
    for name, (module, options) in wanted.items():
        try:
            variants[name] = calls(layers, module, **options)
            variants[name][0]()
            torch.cuda.synchronize()
        except Exception as error:
            variants.pop(name, None)
            failed[name] = f"{type(error).__name__}: {str(error)[:80]}"
    return alternate(variants, turns) | failed


def points(quick: bool) -> list[tuple[int, int, int]]:
    if quick:
        return [(1, c, r) for c in (2048, 16384) for r in (1, 16, 64)]
    return [(b, c, r) for b in (1, 8) for c in (512, 2048, 4096, 16384) for r in (1, 16, 32, 64, 128)]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="fewer sizes, about a minute")
    options.add_argument("--before", type=Path, help="src of another version of this repository, to time beside")
    options.add_argument("--turns", type=int, default=10)
    options.add_argument("--output", type=Path, help="write the JSON here too")
    args = options.parse_args()
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": __import__("triton").__version__,
        "python": platform.python_version(), "command": " ".join(["python", *sys.argv]), "checks": {}, "times": {},
    }  # fmt: skip
    begin = time.monotonic()

    def keep(group: str, name: str, function: Callable[[], dict[str, Any]]) -> None:
        try:
            found = function()
        except Exception as error:
            found = {"ok": False, "error": f"{type(error).__name__}: {str(error)[:200]}"}
        report[group][name] = found
        print(f"{time.monotonic() - begin:5.0f} s  {group} {name}: {json.dumps(found)}", flush=True)

    for start, n in ((2040, 1), (2040, 16), (16379, 64)):
        keep("checks", f"float64 {start} rows {n}", lambda s=start, r=n: check_against_float64(s, r))
    for start, n in ((700, 40), (4107, 70)):
        keep("checks", f"launches {start} rows {n}", lambda s=start, r=n: check_launches(s, r, 333))
    for start in (505, 2040, 16379):
        keep("checks", f"rows {start}", lambda s=start: check_rows(s))
    before = load_before(args.before) if args.before else None
    for batch, context, rows in points(args.quick):
        names = SWEEP.get((batch, context, rows), [])
        keys = not args.quick and (batch, context) in ((1, 2048), (1, 16384)) and rows in (1, 64)
        load = Load(SHAPE, batch, context + 37, rows)
        keep(
            "times", f"batch {batch} context {context} rows {rows}",
            lambda x=load, n=names, k=keys: time_load(x, before, n, k, args.turns),
        )  # fmt: skip
        torch.cuda.empty_cache()
    bad = [name for name, found in report["checks"].items() if not found["ok"]]
    print(f"{len(report['checks']) - len(bad)} checks passed, {len(bad)} failed: {bad}")
    for name, found in report["times"].items():
        print(f"{name:34s}" + "".join(f"  {way} {us}" for way, us in found.items()))
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
