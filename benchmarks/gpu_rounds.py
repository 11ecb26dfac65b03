"""What a round costs, and its stages, by rows, context and batch (a part of gpu.py)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ddtree.config import Speculation
from ddtree.engine import Engine
from ddtree.engine.graphs import recording
from ddtree.engine.observer import STAGES, RoundRecord, Unobserved
from ddtree.engine.prompts import Prompts
from ddtree.engine.round import Batch, run_round
from gpu_shapes import Made, batch_at, with_draft_in_8_bits
from gpu_timing import alternate_blocks, spread, step_ms, summary, wall_ms

ROUND = [stage for stage in STAGES if stage != "prefill"]
HOW_STAGES = (
    "each prefix of the round (draft; draft and build; ...; all five stages) is run by itself, in alternating blocks; "
    "a stage is the prefix that ends with it less the one before, of the same block"
)


def speculations(rows: Sequence[int]) -> dict[str, Speculation]:
    """What is timed beside plain decoding, by name: trees of so many rows, the root included, and the two chains."""
    found = {
        "ar, drafter fed": Speculation("ar"),
        "linear": Speculation("linear", tree_context="off"),
        "shadow-linear 15": Speculation("shadow-linear", 15, 16, tree_context="off"),
    }
    return {**found, **{f"tree {n}": tree_of(n) for n in rows}}


def tree_of(rows: int) -> Speculation:
    """A tree of so many rows, the root included, of the 16 best of every depth, without a context."""
    return Speculation("tree", rows - 1, min(rows - 1, 16), tree_context="off")


def round_times(made: Made, context: int, batch: int, rows: Sequence[int], turns: int, blocks: int) -> dict[str, Any]:
    """T_round of every variant in milliseconds, and its ratio to T_ar."""
    variants = {"ar": partial(_round_block, made.plain, Speculation("ar"), context, batch, turns)}
    for name, speculation in speculations(rows).items():
        variants[name] = partial(_round_block, made.engine, speculation, context, batch, turns)
    return summary(alternate_blocks(variants, blocks), "ms")


def round_times_draft8(
    made: Made, context: int, batch: int, rows: Sequence[int], turns: int, blocks: int
) -> dict[str, Any]:
    """The same for trees whose draft side is in 8 bits, beside those whose is not."""
    rounded = with_draft_in_8_bits(made)
    variants = {"ar": partial(_round_block, made.plain, Speculation("ar"), context, batch, turns)}
    for n in rows:
        variants[f"tree {n}"] = partial(_round_block, made.engine, tree_of(n), context, batch, turns)
        variants[f"tree {n}, draft in 8 bits"] = partial(_round_block, rounded, tree_of(n), context, batch, turns)
    return summary(alternate_blocks(variants, blocks), "ms")


@torch.inference_mode()
def _round_block(engine: Engine, speculation: Speculation, context: int, batch: int, turns: int) -> float:
    made, runner = batch_at(engine, speculation, context, batch), engine.scheduler._runner
    for _ in range(3):
        runner.launch(made)
    return step_ms(lambda: runner.launch(made), turns, engine.target.spec.device)


class _Reached(Exception):
    """The last stage that was asked for is over."""


class Prefix(Unobserved):
    """An observer that ends a round behind the stage `last`."""

    def __init__(self, last: str) -> None:
        self.last = last

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Raise at the end of the last stage."""
        yield
        if name == self.last:
            raise _Reached

    def round(self, record: RoundRecord) -> None:
        """Nothing."""


def run_prefix(batch: Batch, last: str) -> None:
    """The engine's own round, up to the end of the stage `last`."""
    batch.observer = Prefix(last)
    try:
        run_round(batch)
    except _Reached:
        pass
    finally:
        batch.observer = Unobserved()


class Prefixes:
    """The prefixes of one batch's round, ready to run again and again from the same place."""

    def __init__(self, engine: Engine, speculation: Speculation, context: int, batch: int) -> None:
        self.device = engine.target.spec.device
        self.batch = batch_at(engine, speculation, context, batch)
        state = self.batch.state
        self._state = (state.tokens, state.position, state.remaining, state.done)
        self._saved = [tensor.clone() for tensor in self._state]
        self._graphs = engine.info()["rounds"] == "graphs"
        # Plain decoding has nothing to draft and to build.
        self.stages = ROUND[ROUND.index("verify") :] if speculation.mode == "ar" else ROUND
        self.steps: dict[str, Callable[[], None]] = {last: self._step(last) for last in self.stages}

    def restore(self) -> None:
        """Back to where the rounds began."""
        for tensor, value in zip(self._state, self._saved, strict=True):
            tensor.copy_(value)

    def _step(self, last: str) -> Callable[[], None]:
        run = partial(run_prefix, self.batch, last)
        if not self._graphs:
            return run
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles, and allocates what a graph goes on using
                run()
            self.restore()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with recording(graph):
            run()
        self.restore()
        return graph.replay

    @torch.inference_mode()
    def block(self, last: str, turns: int) -> float:
        """Median milliseconds of a prefix."""
        self.restore()
        for _ in range(2):
            self.steps[last]()
        return step_ms(self.steps[last], turns, self.device)


@torch.inference_mode()
def stage_times(made: Made, context: int, batch: int, rows: Sequence[int], turns: int, blocks: int) -> dict[str, Any]:
    """Milliseconds of every stage, of plain decoding and of trees of so many rows, and of the whole round."""
    found: dict[str, Any] = {}
    for name, speculation in {"ar": Speculation("ar"), **{f"tree {n}": tree_of(n) for n in rows}}.items():
        prefixes = Prefixes(made.plain if name == "ar" else made.engine, speculation, context, batch)
        times = alternate_blocks({last: partial(prefixes.block, last, turns) for last in prefixes.stages}, blocks)
        before = [0.0] * blocks
        stages = {}
        for stage in prefixes.stages:
            stages[stage] = spread([b - a for a, b in zip(before, times[stage], strict=True)])
            before = times[stage]
        found[name] = {"ms": stages, "round_ms": spread(before)}
    return found


@torch.inference_mode()
def prompt_times(made: Made, sizes: Sequence[int], turns: int, blocks: int) -> dict[str, Any]:
    """Milliseconds by the clock of prompts' pieces of so many tokens, until their logits are there: as the engine
    computes them, and launched as they are, without padding and graphs."""
    engine, variants = made.engine, {}
    spare, device = engine.scheduler._store.spare, engine.target.spec.device
    plain = Prompts(engine.target, engine.drafter, engine.scheduler._store)
    for size in sizes:
        for name, prompts in (("engine", engine.scheduler._prompts), ("plain", plain)):
            step = partial(prompts.forward, spare, [1] * size, 0)
            variants[f"{size} {name}"] = partial(wall_ms, step, turns, device)
    return summary(alternate_blocks(variants, blocks), "ms", f"{sizes[0]} engine")


@torch.inference_mode()
def kernels(engine: Engine, speculation: Speculation, context: int, batch: int) -> dict[str, Any]:
    """What runs in one round on a card: launches, calls of the host, microseconds by kernel."""
    made, runner = batch_at(engine, speculation, context, batch), engine.scheduler._runner
    runner.launch(made)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(4):
            runner.launch(made)
        torch.cuda.synchronize()
    table, host = [], {}
    for event in profile.key_averages():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            table.append((event.self_device_time_total / 4, event.count / 4, event.key[:90]))
        elif event.key.startswith("cuda"):
            host[event.key] = event.count
    table.sort(reverse=True)
    return {
        "kernels_a_round": sum(count for _, count, _ in table),
        "kernel_us_a_round": round(sum(us for us, _, _ in table), 1),
        "host_calls_in_4_rounds": host,
        "kernels": [{"us": round(us, 1), "count": count, "name": name} for us, count, name in table[:25]],
    }
