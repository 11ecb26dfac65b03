"""A round's kernels beside attention and products on a CUDA card: equality with their references, then times.

    python benchmarks/kernels_round.py --output benchmarks/results/kernels-round.json

Every check is tried, whatever failed before. A time is the median of `--turns` replays of a graph that holds 24 calls,
by CUDA events, over 24, in microseconds. `hot` calls read one input again and again, as logits that were just written
are read; `cold` ones turn through 24 inputs, and drop the L2 cache where those are larger. `by_kernel` is what the
profiler saw of each launch. The last line has medians alone, the file everything. Without CUDA the checks run in
Triton's interpreter (TRITON_INTERPRET=1), on small sizes.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from common import finish, machine, parser
from ddtree.engine.sampling import greedy
from ddtree.kernels import (
    HistoryStore,
    Kept,
    Penalties,
    Plan,
    PlanRow,
    accept,
    advance,
    build,
    choose,
    lines_of,
    pair,
    penalize,
    settle,
)
from ddtree.kernels.choose import OFF, ChooseTiles
from ddtree.kernels.select import SelectTiles, select
from ddtree.tree import Proposal, RoundState, top_k
from kernels_round_checks import commit_by_torch, draw_answers, draw_head, draw_pair, draw_scores, run_checks

CALLS = 24  # in one graph
Timed = tuple[str, Callable[[int], Any]]  # called with the number of the call, which picks the input


def time_select(options: argparse.Namespace) -> Iterator[Timed]:
    """Depths x vocabulary in bf16, at several ranks and tiles, and torch's version."""
    variants = [SelectTiles(merge_warps=w, bitonic=b) for w in (4, 8, 16) for b in (False, True)]
    variants += [SelectTiles(segment=s, scan_warps=w) for s, w in ((16, 4), (64, 8), (32, 8))]
    for rows, vocab in ((15, options.vocab), (15, 49152), (120, options.vocab)):
        inputs = [torch.randn(rows, vocab, device="cuda").bfloat16() for _ in range(CALLS)]
        at = f"{rows} x {vocab}"
        for k in (1, 8, 16, 32):
            yield f"select {at} k={k} hot", lambda _, a=inputs[0], k=k: select(a, k)
        yield f"select {at} k=16 cold", lambda i, a=inputs: select(a[i], 16)
        for tiles in variants if rows == 15 else variants[:2]:
            for k in (16, 32):
                yield f"select {at} k={k} hot {tiles}", lambda _, a=inputs[0], k=k, t=tiles: select(a, k, t)
        if rows == 15:
            yield f"torch top_k {at} k=16 hot", lambda _, a=inputs[0]: top_k(a.unsqueeze(0), 16)


def time_build(_: argparse.Namespace) -> Iterator[Timed]:
    """D 15, K 16."""
    plans = {
        "tree 15": PlanRow(tree=True, budget=15, ranks=16, depth=15),
        "tree 63": PlanRow(tree=True, budget=63, ranks=16, depth=15),
        "tree 127": PlanRow(tree=True, budget=127, ranks=16, depth=15),
        "tree 48 and chain": PlanRow(tree=True, chain=True, budget=48, ranks=16, depth=15),
        "chain": PlanRow(chain=True, depth=15),
        "root": PlanRow(),
    }
    for (name, row), batch in product(plans.items(), (1, 8, 32)):
        log_q = draw_scores(batch, 15, 16, "normal").cuda()
        candidates = torch.randint(0, 49152, log_q.shape, device="cuda")
        plan, state = Plan.allocate(batch, "cuda"), RoundState.allocate(batch, row.rows, 15, "cuda")
        plan.write([row] * batch, row.rows)
        yield f"build {name} B={batch}", lambda _, a=(log_q, candidates, plan, state, row.rows): build(*a)


def time_pair(_: argparse.Namespace) -> Iterator[Timed]:
    """K 16, a head of rank 64: its scores, the rows laid by them, and both; beside rows without."""
    for hidden, depth, budget, batch in product((576, 4096), (9, 15), (15, 63), (1, 8)):
        head, factors = draw_head(49152, hidden, 64, torch.bfloat16, "cuda")
        row = PlanRow(tree=True, budget=budget, ranks=16, depth=depth)
        states = torch.randn(batch, depth, hidden, device="cuda").bfloat16()
        log_q = draw_scores(batch, depth, 16, "normal").cuda()
        proposal = Proposal(torch.randint(0, 49152, log_q.shape, device="cuda"), log_q)
        plan, state = Plan.allocate(batch, "cuda"), RoundState.allocate(batch, row.rows, depth, "cuda")
        plan.write([row] * batch, row.rows)
        lines = lines_of(log_q, draw_pair(batch, depth, 16, "normal").cuda())
        asked, laid = (factors, states, proposal, plan), (log_q, proposal.tokens, plan, state, row.rows)

        def both(_: int, a: Any = asked, b: Any = laid) -> None:
            build(*b, pair(*a).lines)

        at = f"D={depth} B={batch}"
        if budget == 15:
            yield f"pair H={hidden} {at}", lambda _, a=asked: pair(*a)
            yield f"torch pair H={hidden} {at}", lambda _, h=head, s=states, p=proposal: h.pair(s, p.tokens, p.log_q)
        if hidden == 576:
            yield f"pair rows {budget} without {at}", lambda _, a=laid: build(*a)
            yield f"pair rows {budget} by pairs {at}", lambda _, a=laid, k=lines: build(*a, k)
        yield f"pair and rows {budget} H={hidden} {at}", both


def time_choose(options: argparse.Namespace) -> Iterator[Timed]:
    """Greedy and sampled, bf16."""
    variants = [ChooseTiles(block, warps) for block in (1024, 2048, 4096, 8192) for warps in (4, 8)]
    for batch, rows, vocab in ((1, 1, options.vocab), (1, 16, options.vocab), (1, 64, options.vocab), (1, 16, 49152)):
        logits = torch.randn(batch, rows, vocab, device="cuda").bfloat16()
        depths, seed = torch.zeros(batch, rows, dtype=torch.int64, device="cuda"), torch.tensor([5], device="cuda")
        for temperature in (0.0, 1.0):
            args = (logits, seed, seed, depths, torch.tensor([temperature], dtype=torch.float64, device="cuda"))
            at = f"{batch} x {rows} x {vocab} T={temperature}"
            yield f"choose {at} hot", lambda _, a=args: choose(*a)
            for tiles in variants if rows in (16, 64) else []:
                yield f"choose {at} hot {tiles}", lambda _, a=args, t=tiles: choose(*a, t)
        yield f"torch greedy {batch} x {rows} x {vocab} hot", lambda _, a=logits: greedy(a)


def time_filters(options: argparse.Namespace) -> Iterator[Timed]:
    """Rows with filters, and without one in the same launches; peaked, less so, all equal. Beside one sort."""
    filters = {"none": None, "top_p 0.9": (OFF, 0.9, -math.inf), "top_k 50": (50, 1.0, -math.inf)}
    filters |= {"top_k 20, top_p 0.95": (20, 0.95, -math.inf), "min_p 0.05": (OFF, 1.0, math.log(0.05))}
    rows, vocab = 16, options.vocab
    depths, seed = torch.arange(rows, device="cuda").unsqueeze(0), torch.tensor([5], device="cuda")
    heat = torch.ones(1, dtype=torch.float64, device="cuda")
    for scale in (4.0, 2.0, 0.0):
        logits = (scale * torch.randn(1, rows, vocab, device="cuda")).bfloat16()
        for name, numbers in filters.items():
            kept = Kept.allocate(1, torch.device("cuda"))
            kept.write([numbers])
            call = partial(choose, logits, seed, seed, depths, heat, kept=kept)
            yield (
                f"choose 1 x {rows} x {vocab}, {name}, logits of deviation {scale:g}, hot",
                lambda _, call=call: call(),
            )
    yield f"torch sort {rows} x {vocab} hot", lambda _: logits[0].sort(descending=True, stable=True)


def time_penalties(options: argparse.Namespace) -> Iterator[Timed]:
    """Rows that nothing changes, rows with penalties, and the count of what was committed."""
    vocab = options.vocab
    for rows in (16, 64):
        logits = torch.randn(1, rows, vocab, device="cuda").bfloat16()
        state, own, ends = draw_answers(1, rows, 15, "cuda")
        settle(state, own, ends, torch.zeros(1, dtype=torch.bool, device="cuda"))
        slots, store = torch.zeros(1, dtype=torch.int64, device="cuda"), HistoryStore.allocate(1, vocab, "cuda")
        store.write(0, range(0, vocab, 50), dict.fromkeys(range(0, vocab, 90), 2), {7: 0.5})
        for name, numbers in (("none", None), ("all three", (1.1, 0.2, 0.5))):
            penalties = Penalties.allocate(1, torch.device("cuda"))
            penalties.write([numbers])
            for programs in (256, 512, 1024, 4096):
                call = partial(penalize, logits, state.rows, 15, slots, penalties, store, programs=programs)
                yield f"penalize 1 x {rows} x {vocab}, {name}, {programs} programs, hot", lambda _, call=call: call()
            yield f"count 1 x {rows}, {name}", lambda _, a=(penalties, slots, state), s=store: s.count(*a)


def time_accept(_: argparse.Namespace) -> Iterator[Timed]:
    """One launch each, beside torch's lines."""
    for batch, width in ((1, 16), (1, 64), (8, 64), (32, 64), (1, 128)):
        state, own, ends = draw_answers(batch, width, 15, "cuda")
        ended = torch.zeros(batch, dtype=torch.bool, device="cuda")
        at = f"B={batch} N={width}"
        yield f"accept {at}", lambda _, s=state, o=own: accept(s.rows, o, 15)
        yield f"settle {at}", lambda _, a=(state, own, ends, ended): settle(*a)
        yield f"advance {at}", lambda _, s=state, e=ended: advance(s, e)
        yield f"torch accept, cut and advance {at}", lambda _, a=(state, own, ends): commit_by_torch(*a)


def measure(call: Callable[[int], Any], turns: int) -> dict[str, float]:
    """Median, least and 90th percentile microseconds of one call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(CALLS):
            call(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(CALLS):
            call(index)
    times = []
    for turn in range(turns + 5):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        graph.replay()
        after.record()
        torch.cuda.synchronize()
        if turn >= 5:
            times.append(1000 * before.elapsed_time(after) / CALLS)
    times.sort()
    return {
        "median": round(statistics.median(times), 2),
        "least": round(times[0], 2),
        "p90": round(times[int(0.9 * (len(times) - 1))], 2),
    }


def by_kernel(call: Callable[[int], Any]) -> dict[str, float]:
    """Mean microseconds of every kernel of a call, as the profiler has them; empty where it cannot."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for index in range(CALLS):
            call(index)
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profiler.key_averages():
        total = getattr(event, "device_time_total", 0.0)
        if total:
            found[event.key[:40]] = round(total / CALLS, 2)
    return found


def run_times(options: argparse.Namespace) -> dict[str, Any]:
    """Name -> figures, or what went wrong."""
    results: dict[str, Any] = {}
    for part in (time_select, time_build, time_pair, time_choose, time_filters, time_penalties, time_accept):
        for name, call in part(options):
            if options.only not in name:
                continue
            started = time.perf_counter()
            try:
                results[name] = measure(call, options.turns)
                if options.profile and "Tiles" not in name:
                    results[name]["by_kernel"] = by_kernel(call)
            except Exception as error:
                results[name] = {"error": f"{type(error).__name__}: {error}"[:600]}
            print(f"{name}: {results[name]}  ({time.perf_counter() - started:.1f} s)", flush=True)
    return results


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--vocab", type=int, default=151_936)
    options.add_argument("--turns", type=int, default=30)
    options.add_argument("--only", default="", help="time only what has this in its name")
    options.add_argument("--checks", choices=("all", "none"), default="all")
    options.add_argument("--times", choices=("all", "none"), default="all")
    options.add_argument("--profile", action="store_true", help="time each launch by the profiler too")
    chosen = options.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report: dict[str, Any] = {"machine": machine()}
    report["checks"] = run_checks(chosen, device) if chosen.checks == "all" else {}
    report["microseconds"] = run_times(chosen) if chosen.times == "all" and device == "cuda" else {}
    if chosen.output is not None:
        chosen.output.parent.mkdir(parents=True, exist_ok=True)
        chosen.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    failed = {name: result for name, result in report["checks"].items() if result != "ok"}
    medians = {name: figures.get("median", figures) for name, figures in report["microseconds"].items()}
    passed = len(report["checks"]) - len(failed)
    finish({**report, "checks": {"ok": passed, "failed": failed}, "microseconds": medians}, None)


if __name__ == "__main__":
    main()
