"""Mixed traffic against `ddtree serve` for a while: good requests of every kind, bad ones, clients that hang up.

python benchmarks/soak.py --minutes 30 --output benchmarks/results/soak.json

Fails (exit code 1) on any status of 500 or above, on an answer without an end, on a slot or a waiting request that is
left at the end, on a server that has died, and on memory that keeps growing after the first quarter.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx

from common import finish, machine, parser
from ddtree.bench.suite import load_prompts
from serving import TIMEOUT, served

PROMPTS = [prompt.prompt for prompt in load_prompts()]
GROWTH_MIB = 64  # between the median of the second quarter and that of the last
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
Body = dict[str, Any]


def chat(rng: random.Random) -> Body:
    """A chat with a random selection of what a chat may ask for."""
    turns = [{"role": "user", "content": rng.choice(PROMPTS)}]
    if rng.random() < 0.3:
        turns += [{"role": "assistant", "content": "Here it is."}, {"role": "user", "content": rng.choice(PROMPTS)}]
    body: Body = {"messages": turns, "max_tokens": rng.choice((1, 4, 16, 48, 96))}
    options: list[Body] = [
        {"temperature": 0},
        {"temperature": rng.choice((0.5, 1.0, 1.7)), "top_p": 0.9, "top_k": 40, "seed": rng.randrange(100)},
        {"min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": -0.3, "repetition_penalty": 1.1},
        {"stop": ["\n\n", "."], "temperature": 0},
        {"logprobs": True, "top_logprobs": 3},
        {"n": 2},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}},
        {"response_format": {"type": "json_object"}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"logit_bias": {"5": -100, "11": 3}},
        {"ignore_eos": True, "max_tokens": 64},
    ]
    for option in rng.sample(options, rng.choice((0, 1, 1, 2))):
        body |= option
    if rng.random() < 0.5:
        body["speculative"] = {"mode": rng.choice(("ar", "linear", "shadow-linear", "tree"))}
    return body


def long_prompt(rng: random.Random) -> Body:
    """A prompt of several chunks."""
    return {"messages": [{"role": "user", "content": rng.choice(PROMPTS) * rng.randrange(5, 30)}], "max_tokens": 8}


BAD: list[Body] = [
    {"messages": []},
    {"messages": [{"role": "user", "content": "Hi"}], "temperature": -1},
    {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 10**9},
    {"messages": [{"role": "user", "content": "word " * 60_000}]},
    {"messages": [{"role": "user", "content": "Hi"}], "no_such_field": 1},
    {"messages": [{"role": "user", "content": "Hi"}], "model": "another"},
    {"messages": [{"role": "user", "content": "Hi"}], "speculative": {"mode": "magic"}},
    {"messages": [{"role": "user", "content": "Hi"}], "logit_bias": {"99999999": 1}},
    {
        "messages": [{"role": "user", "content": "Hi"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}},
    },
]


class Soak:
    """The traffic of one run, and what came of it."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.rng = url, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    def fail(self, what: str) -> None:
        """Note a fault, the first twenty in words."""
        self.counts["failures"] += 1
        if len(self.failures) < 20:
            self.failures.append(what)

    async def worker(self, client: httpx.AsyncClient, until: float) -> None:
        """One client after another until the time is over."""
        kinds: list[tuple[float, Callable[[httpx.AsyncClient], Any]]] = [
            (0.40, self.streamed), (0.25, self.whole), (0.15, self.leaves), (0.10, self.bad), (0.10, self.completion),
        ]  # fmt: skip
        while time.monotonic() < until:
            (kind,) = self.rng.choices([k for _, k in kinds], [w for w, _ in kinds])
            try:
                await kind(client)
            except httpx.HTTPError as error:
                self.fail(f"{kind.__name__}: {type(error).__name__} {error}")

    def note(self, kind: str, response: httpx.Response, body: Body, expected: tuple[int, ...]) -> bool:
        """Count a status; whether it is the expected one."""
        self.counts[f"{kind} {response.status_code}"] += 1
        if response.status_code not in (*expected, 429):
            self.fail(f"{kind}: {response.status_code} for {json.dumps(body)[:300]}")
        return response.status_code in expected

    async def streamed(self, client: httpx.AsyncClient) -> None:
        """A stream that is read to its end."""
        long = self.rng.random() < 0.1
        body = (long_prompt(self.rng) if long else chat(self.rng)) | {"stream": True}
        async with client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as response:
            expected = (200, 400) if long else (200,)  # a long prompt may be longer than the context served
            if not self.note("streamed", response, body, expected) or response.status_code != httpx.codes.OK:
                return
            lines = [line async for line in response.aiter_lines() if line]
        ends = [line for line in lines if '"finish_reason":"' in line]
        if lines[-1] != "data: [DONE]" or len(ends) != body.get("n", 1) or '"error"' in lines[-2]:
            self.fail(f"streamed: no sound end for {json.dumps(body)[:300]}: {lines[-2:]}")

    async def whole(self, client: httpx.AsyncClient) -> None:
        """An answer in one piece."""
        body = chat(self.rng)
        response = await client.post(f"{self.url}/v1/chat/completions", json=body)
        if not self.note("whole", response, body, (200,)):
            return
        answer = response.json()
        limit = body["max_tokens"] * body.get("n", 1)
        if len(answer["choices"]) != body.get("n", 1) or answer["usage"]["completion_tokens"] > limit:
            self.fail(f"whole: {answer['usage']} for {json.dumps(body)[:300]}")

    async def leaves(self, client: httpx.AsyncClient) -> None:
        """A client that hangs up: before the first byte, or somewhere in the stream."""
        body = chat(self.rng) | {"stream": True, "max_tokens": 200, "ignore_eos": True}
        after = self.rng.randrange(12)
        try:
            async with asyncio.timeout(0.05 if after == 0 else 5):
                async with client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as response:
                    self.note("leaves", response, body, (200,))
                    async for _ in response.aiter_lines():
                        if (after := after - 1) <= 0:
                            break
        except TimeoutError:
            self.counts["leaves early"] += 1

    async def bad(self, client: httpx.AsyncClient) -> None:
        """A request that must be refused."""
        body = self.rng.choice(BAD)
        response = await client.post(f"{self.url}/v1/chat/completions", json=body)
        if self.note("bad", response, body, (400, 404)) and "message" not in response.json().get("error", {}):
            self.fail(f"bad: no message for {json.dumps(body)[:300]}")

    async def completion(self, client: httpx.AsyncClient) -> None:
        """The older route."""
        body: Body = {"prompt": self.rng.choice(PROMPTS), "max_tokens": 16, "logprobs": 2, "n": self.rng.choice((1, 2))}
        response = await client.post(f"{self.url}/v1/completions", json=body)
        self.note("completion", response, body, (200,))


def resident_mib(pid: int) -> float:
    """Memory that a process holds now (Linux)."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as status:
        line = next(line for line in status if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


async def run(soak: Soak, pid: int, seconds: float, workers: int) -> tuple[list[float], dict[str, float]]:
    """The traffic; memory every few seconds, and the gauges of /metrics once everybody has left."""
    memory: list[float] = []
    until = time.monotonic() + seconds

    async def watch() -> None:
        while time.monotonic() < until:
            memory.append(round(resident_mib(pid), 1))
            await asyncio.sleep(max(seconds / 200, 1))

    async with httpx.AsyncClient(timeout=TIMEOUT, limits=httpx.Limits(max_connections=2 * workers)) as client:
        await asyncio.gather(watch(), *(soak.worker(client, until) for _ in range(workers)))
        await asyncio.sleep(2)
        health = await client.get(f"{soak.url}/health")
        if health.status_code != httpx.codes.OK:
            soak.fail(f"health: {health.status_code}")
        metrics = (await client.get(f"{soak.url}/metrics")).text
    gauges = {}
    for line in metrics.splitlines():
        name, _, value = line.rpartition(" ")
        if name.split("{")[0] in ("ddtree_requests_running", "ddtree_requests_waiting"):
            gauges[name.split("{")[0]] = float(value)
    return memory, gauges


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, default=30)
    options.add_argument("--workers", type=int, default=12, help="clients at once")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("args", nargs="*", help="more options for ddtree serve, behind --")
    args: argparse.Namespace = options.parse_args()
    with served("--no-access-log", *args.args) as (url, server):
        soak = Soak(url, args.seed)
        memory, gauges = asyncio.run(run(soak, server.pid, 60 * args.minutes, args.workers))
        if server.poll() is not None:
            soak.fail(f"the server ended with {server.returncode}")
    quarter = max(len(memory) // 4, 1)
    second, last = statistics.median(memory[quarter : 2 * quarter]), statistics.median(memory[-quarter:])
    if last - second > GROWTH_MIB:
        soak.fail(f"memory grew from {second:.0f} to {last:.0f} MiB")
    if len(gauges) != 2 or any(gauges.values()):
        soak.fail(f"left at the end: {gauges}")
    report = {
        "minutes": args.minutes,
        "workers": args.workers,
        "answers": dict(sorted(soak.counts.items())),
        "failures": soak.failures,
        "memory_mib": {"second_quarter": second, "last_quarter": last, "samples": memory},
        "left_at_the_end": gauges,
        **machine(),
    }
    finish(report, args.output)
    if soak.failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
