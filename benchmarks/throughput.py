"""Throughput of `ddtree serve` at several numbers of requests at once, by mode; and what HTTP costs beside the engine.

python benchmarks/throughput.py --output benchmarks/results/throughput.json

Modes and levels take turns within one run. `ar` is served without a drafter, as plain decoding is. The overhead of
HTTP compares the same requests at the same concurrency through the server and through the engine in this process.
"""

import argparse
import asyncio
import statistics
import time
from collections import defaultdict
from typing import Any

import httpx

from common import finish, machine, parser
from ddtree.bench.suite import load_prompts
from ddtree.config import EngineConfig, SamplingParams, Speculation
from ddtree.engine import Engine
from serving import Streamed, percentile, served, stream_chat

PROMPTS = [prompt.prompt for prompt in load_prompts()]


async def closed_loop(url: str, mode: str, level: int, requests: int, max_tokens: int) -> list[Streamed]:
    """`requests` chats, `level` at a time: as soon as one ends, the next one begins."""
    queue = list(range(requests))
    answers: list[Streamed] = []

    async def worker(client: httpx.AsyncClient) -> None:
        while queue:
            body: dict[str, Any] = {
                "messages": [{"role": "user", "content": PROMPTS[queue.pop(0) % len(PROMPTS)]}],
                "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "speculative": {"mode": mode},
            }  # fmt: skip
            answers.append(await stream_chat(client, url, body))

    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=level)) as client:
        await asyncio.gather(*(worker(client) for _ in range(level)))
    assert all(answer.finish_reason == "length" for answer in answers), "an answer did not come to its end"
    return answers


def over_http(url: str, mode: str, level: int, requests: int, max_tokens: int) -> dict[str, float]:
    """One cell of the table: rates and latencies."""
    started = time.perf_counter()
    answers = asyncio.run(closed_loop(url, mode, level, requests, max_tokens))
    wall = time.perf_counter() - started
    tokens = sum(answer.usage["completion_tokens"] for answer in answers)
    lengths = [answer.ddtree["acceptance_length"] for answer in answers]
    per_token = [1000 * (a.seconds - a.first) / (a.usage["completion_tokens"] - 1) for a in answers]
    return {
        "tok_s": tokens / wall,
        "ttft_ms": 1000 * statistics.median(a.first for a in answers),
        "ttft_p90_ms": 1000 * percentile([a.first for a in answers], 0.9),
        "tpot_ms": statistics.median(per_token),
        "acceptance_length": statistics.mean(lengths),
    }


def in_process(engine: Engine, mode: str, level: int, requests: int, max_tokens: int) -> float:
    """Tokens per second of the same closed loop through the scheduler, without HTTP."""
    ids = [engine.text.chat([{"role": "user", "content": p}]) for p in PROMPTS[:requests]]
    params, speculation = SamplingParams(max_tokens=max_tokens, ignore_eos=True), Speculation(mode=mode)
    queue, tokens, open_ = list(range(requests)), 0, 0
    started = time.perf_counter()
    while queue or open_:
        while queue and open_ < level:
            engine.scheduler.add(ids[queue.pop(0) % len(ids)], params, speculation)
            open_ += 1
        for _, chunk in engine.scheduler.step():
            tokens += len(chunk.token_ids)
            open_ -= chunk.last
    return tokens / (time.perf_counter() - started)


def summary(turns: list[dict[str, float]]) -> dict[str, float]:
    """Medians over the turns."""
    return {name: round(statistics.median(turn[name] for turn in turns), 3) for name in turns[0]}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run every cell `turns` times, alternating."""
    levels, modes = [int(n) for n in args.levels.split(",")], args.modes.split(",")
    options = ["--dtype", args.dtype, "--no-prefix-caching", "--no-access-log"]
    engine = Engine.load(EngineConfig(dtype=args.dtype, prefix_caching=False))
    cells: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
    alone: dict[int, list[float]] = defaultdict(list)
    with served(*options, "--mode", "tree") as (drafting, _), served(*options, "--mode", "ar") as (plain, _):
        urls = {mode: plain if mode == "ar" else drafting for mode in modes}
        for mode in modes:
            over_http(urls[mode], mode, 1, 1, 8)  # warm
        in_process(engine, modes[-1], 1, 1, 8)
        for turn in range(args.turns):
            for level in levels:
                requests = max(args.requests, 2 * level)
                for mode in modes[turn % len(modes) :] + modes[: turn % len(modes)]:
                    cells[mode, level].append(over_http(urls[mode], mode, level, requests, args.max_tokens))
                alone[level].append(in_process(engine, modes[-1], level, requests, args.max_tokens))
    rows = {f"{mode}@{level}": summary(turns) for (mode, level), turns in cells.items()}
    for mode in modes:
        for level in levels:
            rows[f"{mode}@{level}"]["over_ar"] = round(
                statistics.median(
                    a["tok_s"] / b["tok_s"] for a, b in zip(cells[mode, level], cells["ar", level], strict=True)
                ), 3,
            ) if "ar" in modes else 0.0  # fmt: skip
    overhead = {
        level: round(
            statistics.median(
                1 - http["tok_s"] / rate for http, rate in zip(cells[modes[-1], level], alone[level], strict=True)
            ), 3,
        )
        for level in levels
    }  # fmt: skip
    return {"engine": engine.info(), "rows": rows, "http_overhead": overhead, "options": vars(args) | {"output": None}}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--levels", default="1,2,4,8", help="requests at once")
    options.add_argument(
        "--modes", default="ar,linear,tree", help="the last one is the one whose HTTP cost is measured"
    )
    options.add_argument("--requests", type=int, default=8, help="requests of a cell, at least twice the level")
    options.add_argument("--max-tokens", type=int, default=64)
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--dtype", default="auto")
    args = options.parse_args()
    report = measure(args)
    for name, row in report["rows"].items():
        print(f"{name:>10}  " + "  ".join(f"{key} {value:.2f}" for key, value in row.items()))
    finish(report | machine(), args.output)


if __name__ == "__main__":
    main()
