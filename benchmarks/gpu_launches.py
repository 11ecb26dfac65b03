"""What the host does in a round on a CUDA card: launches, graphs, copies, synchronisations; with a grammar and without.

    python benchmarks/gpu_launches.py --output benchmarks/results/launches.json
    python benchmarks/gpu_launches.py --model MODEL --drafter DRAFTER --device cuda --eager

A real pair, one sequence at a time but for the last variants. Per variant (plain decoding, linear, shadow-linear,
tree; tree with a JSON schema, temperature alone, top_p, top_k, both, min_p, top_p and a penalty, penalties, a bias;
four sequences, of which none or three have filters, or one has penalties) torch.profiler looks at `--rounds` rounds
behind the first ones:
  launches, graphs, copies, synchronisations   calls of the host in a round, summed by kind; `calls` has them by name
  device_ms    sum of what ran on the card in a round
  waiting_ms   of the host in synchronisations, host_ms the rest of the round's wall time, both under the profiler
  ways         how the rounds ran, as the engine tells it (engine.observer.WAYS)
Then `ms`: wall time of a round without the profiler, variants in alternating blocks, medians, with the ratio to `tree`.
Without a card the same rounds run, and only their times are told.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from common import finish, machine, parser
from ddtree.config import DTYPES, EMBEDDED, EngineConfig, Grammar, SamplingParams, Speculation
from ddtree.engine import Engine, RoundRecord
from ddtree.engine.observer import Unobserved
from ddtree.engine.request import Request
from gpu_timing import alternate_blocks, summary, synchronize

SKIPPED = 6  # rounds of a request that are not looked at: a capture may be among them
PROMPT = "List fifty European cities as JSON, each with its country, its population and a sentence about it."
SCHEMA = {
    "type": "object",
    "properties": {
        "cities": {
            "type": "array",
            "minItems": 50,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "country": {"type": "string"},
                    "population": {"type": "integer"},
                    "about": {"type": "string"},
                },
                "required": ["name", "country", "population", "about"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["cities"],
    "additionalProperties": False,
}
KINDS = {  # what a call's name begins with
    "launches": ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperative"),
    "graphs": ("cudaGraphLaunch", "cuGraphLaunch"),
    "copies": ("cudaMemcpy", "cuMemcpy", "cudaMemset", "cuMemset"),
    "synchronisations": ("cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cuStreamSync"),
}


@dataclass(frozen=True)
class Variant:
    """One way to decode."""

    engine: Engine
    speculation: Speculation
    params: SamplingParams
    beside: tuple[SamplingParams, ...] = ()  # of sequences that run along


class Ways(Unobserved):
    """Counts how rounds ran."""

    def __init__(self) -> None:
        self.ways: Counter[str] = Counter()
        self.committed = 0

    def round(self, record: RoundRecord) -> None:
        """A round has ended."""
        self.ways[record.ran] += 1
        self.committed += record.committed


def variants(engine: Engine, budget: int, max_tokens: int) -> dict[str, Variant]:
    """By name."""
    free = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    heated = replace(free, temperature=0.8)
    top_p, top_k, min_p = replace(heated, top_p=0.9), replace(heated, top_k=50), replace(heated, min_p=0.05)
    penalties = replace(free, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.5)
    tree = Speculation("tree", budget, min(budget, 16), tree_context="off")
    return {
        "ar": Variant(engine.without_drafter(), Speculation("ar"), free),
        "linear": Variant(engine, replace(tree, mode="linear"), free),
        "shadow-linear": Variant(engine, replace(tree, mode="shadow-linear"), free),
        "tree": Variant(engine, tree, free),
        "tree, JSON schema": Variant(engine, tree, replace(free, ignore_eos=False, grammar=grammar)),
        "tree, temperature": Variant(engine, tree, heated),
        "tree, top_p": Variant(engine, tree, top_p),
        "tree, top_k": Variant(engine, tree, top_k),
        "tree, top_k and top_p": Variant(engine, tree, replace(heated, top_k=20, top_p=0.95)),
        "tree, min_p": Variant(engine, tree, min_p),
        "tree, top_p and a penalty": Variant(engine, tree, replace(top_p, presence_penalty=0.5)),
        "tree, penalties": Variant(engine, tree, penalties),
        "tree, logit_bias": Variant(engine, tree, replace(free, logit_bias=((11, 1.5), (28, -100.0), (198, 0.5)))),
        "tree, four sampled": Variant(engine, tree, heated, (heated,) * 3),
        "tree, four, one with penalties": Variant(engine, tree, heated, (heated, heated, penalties)),
        "tree, four, three with filters": Variant(engine, tree, heated, (top_p, top_k, min_p)),
    }


class Running:
    """A request behind its first rounds, to be advanced round by round."""

    def __init__(self, variant: Variant, prompt: Sequence[int]) -> None:
        """Raises RuntimeError where the answer ends before the rounds that are looked at."""
        self.observer = Ways()
        self._scheduler = variant.engine.scheduler
        self._scheduler.observer = self.observer
        asked = (variant.params, *variant.beside)
        self._requests: list[Request] = [self._scheduler.add(prompt, one, variant.speculation) for one in asked]
        while sum(self.observer.ways.values()) < SKIPPED:
            self._step()
        self.observer.ways.clear()
        self.observer.committed = 0

    def rounds(self, count: int) -> None:
        """So many rounds."""
        for _ in range(count):
            self._step()

    def end(self) -> None:
        """Give the request up."""
        for request in self._requests:
            self._scheduler.abort(request)

    def _step(self) -> None:
        if not self._scheduler.has_work:
            raise RuntimeError("the answer is over: ask for fewer --rounds, or for more --max-tokens")
        for _, chunk in self._scheduler.step():
            if chunk.error is not None:
                raise chunk.error


def profiled(variant: Variant, prompt: Sequence[int], rounds: int) -> dict[str, Any]:
    """What the host and the card did in a round, by torch.profiler."""
    running = Running(variant, prompt)
    device = variant.engine.target.spec.device
    card = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * card
    try:
        with torch.profiler.profile(activities=activities) as profile:
            started = time.perf_counter()
            running.rounds(rounds)
            wall = 1000 * (time.perf_counter() - started) / rounds
            synchronize(device)
    finally:
        running.end()
    report = {"rounds": rounds, "committed_a_round": running.observer.committed / rounds}
    return report | {"ways": dict(running.observer.ways)} | _calls(profile.key_averages(), rounds, wall, card)


def _calls(events: Sequence[Any], rounds: int, wall: float, card: bool) -> dict[str, Any]:
    """Of one round: calls by kind and by name, milliseconds. The last synchronisation is the profile's own."""
    if not card:
        return {"note": "there is no card: calls are not counted"}
    on_card = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    calls = {event.key: event for event in events if event.key.startswith(("cuda", "cu")) and event not in on_card}
    found: dict[str, Any] = {
        kind: sum(event.count for name, event in calls.items() if name.startswith(prefixes)) / rounds
        for kind, prefixes in KINDS.items()
    }
    waiting = sum(e.cpu_time_total for name, e in calls.items() if name.startswith(KINDS["synchronisations"])) / 1000
    found["calls"] = {name: round(event.count / rounds, 3) for name, event in sorted(calls.items())}
    found["device_ms"] = round(sum(event.self_device_time_total for event in on_card) / 1000 / rounds, 4)
    found["waiting_ms"] = round(waiting / rounds, 4)
    found["host_ms"] = round(wall - waiting / rounds, 4)
    return found


def block(variant: Variant, prompt: Sequence[int], rounds: int) -> float:
    """Milliseconds of a round by the clock, the mean over one request's."""
    running, device = Running(variant, prompt), variant.engine.target.spec.device
    try:
        synchronize(device)
        started = time.perf_counter()
        running.rounds(rounds)
        synchronize(device)
        return 1000 * (time.perf_counter() - started) / rounds
    finally:
        running.end()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The whole document."""
    config = EngineConfig(
        model=args.model, drafter=args.drafter, device=args.device, dtype=args.dtype, cuda_graphs=not args.eager,
        speculation=Speculation("tree", tree_budget=args.budget, tree_top_k=min(args.budget, 16)),
        max_running_requests=4, max_tree_budget=args.budget, prefix_caching=False, max_model_len=args.context,
    )  # fmt: skip
    engine = Engine.load(config)
    started = time.perf_counter()
    engine.warm_up()
    synchronize(engine.target.spec.device)
    report: dict[str, Any] = {**machine(), "about": (__doc__ or "").partition("\n")[0], "engine": engine.info()}
    report["warm_up_seconds"] = round(time.perf_counter() - started, 3)
    prompt = engine.text.encode(PROMPT)
    chosen: Mapping[str, Variant] = variants(engine, args.budget, args.max_tokens)
    report["round"] = {}
    for name, variant in chosen.items():
        block(variant, prompt, 1)  # compiles and captures what the start did not
        report["round"][name] = profiled(variant, prompt, args.rounds)
        print(f"{name}: profiled", file=sys.stderr, flush=True)
    blocks = {name: partial(block, variant, prompt, args.rounds) for name, variant in chosen.items()}
    report["ms"] = summary(alternate_blocks(blocks, args.blocks), "ms", base="tree")
    return report


def main() -> None:
    """Run it."""
    made = parser(__doc__)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.add_argument("--model", default=EMBEDDED)
    made.add_argument("--drafter", default="auto")
    made.add_argument("--device", default="auto")
    made.add_argument("--dtype", default="auto", choices=DTYPES)
    made.add_argument("--budget", type=int, default=15, help="nodes of a tree")
    made.add_argument("--rounds", type=int, default=30, help="of a request that are looked at")
    made.add_argument("--blocks", type=int, default=10, help="alternating, of every variant")
    made.add_argument("--max-tokens", type=int, default=900)
    made.add_argument("--context", type=int, default=2048, help="max_model_len")
    made.add_argument("--eager", action="store_true", help="without CUDA graphs")
    args = made.parse_args()
    finish(measure(args), args.output)


if __name__ == "__main__":
    main()
