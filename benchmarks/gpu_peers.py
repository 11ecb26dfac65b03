"""This engine beside transformers, with the same random weights (a part of gpu.py)."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from ddtree.bench.parity import first_difference
from ddtree.config import SamplingParams, Speculation
from ddtree.drafter import DFlashDrafter
from ddtree.engine import Engine
from gpu_ddtree import EagerDDTree
from gpu_rounds import tree_of
from gpu_shapes import ROOM, Made, batch_at, drafter_of, twin
from gpu_timing import alternate_blocks, summary, wall_ms

TREES = (16, 64)  # rows, the root included
HOW = (
    "milliseconds a step or round by the clock, in alternating blocks, for this engine too (`ar`, `tree N`: launched "
    "one behind the other, as when serving); `generate` is transformers' own greedy generation, between its first and "
    "its last new token, `generate, static` with its static cache, which it compiles on a card; `eager ddtree N` is "
    "gpu_ddtree.py, one sequence only. `same_tokens`: how far each answer to one prompt equals this engine's plain "
    "decoding; in half precision it may part at near-ties"
)


def compare(name: str, made: Made, context: int, batch: int, turns: int, blocks: int) -> dict[str, Any]:
    """Rounds of this engine, transformers' generation with its dynamic cache, and a plain DDTree over transformers."""
    model = twin(name, made.engine.target.spec.dtype, made.engine.target.spec.device)
    prompts = _prompts(model, context, batch)
    variants: dict[str, Callable[[], float]] = {
        "ar": partial(_ours, made.plain, Speculation("ar"), context, batch, turns)
    }
    for rows in TREES:
        tree = tree_of(rows)
        variants[f"tree {rows}"] = partial(_ours, made.engine, tree, context, batch, turns)
    variants["generate"] = partial(generate_ms, model, prompts, turns)
    found: dict[str, Any] = {}
    if batch == 1:
        drafter = drafter_of(name, model)
        for rows in TREES:
            variants[f"eager ddtree {rows}"] = _Rounds(
                _eager(model, drafter, rows, context), prompts[0].tolist(), turns
            )
        found["same_tokens"] = agreement(made, model, drafter)
    return {"times": summary(alternate_blocks(variants, blocks), "ms"), **found}


def compare_static(name: str, made: Made, context: int, batch: int, turns: int, blocks: int) -> dict[str, Any]:
    """Plain decoding here, and transformers' generation with its static cache, compiled anew for this context."""
    torch.compiler.reset()
    model = twin(name, made.engine.target.spec.dtype, made.engine.target.spec.device)
    prompts = _prompts(model, context, batch)
    static = partial(generate_ms, model, prompts, turns, cache_implementation="static")
    variants = {"ar": partial(_ours, made.plain, Speculation("ar"), context, batch, turns), "generate, static": static}
    return {"times": summary(alternate_blocks(variants, blocks), "ms")}


def agreement(made: Made, model: LlamaForCausalLM, drafter: DFlashDrafter, tokens: int = 32) -> dict[str, Any]:
    """How many tokens of an answer are those of this engine's plain decoding, before the first that is not."""
    prompt = _prompts(model, 40, 1)
    params = SamplingParams(max_tokens=tokens)
    expected = made.plain.generate([prompt[0].tolist()], [params])[0].token_ids
    found: dict[str, Any] = {"of": tokens}

    def note(who: str, answer: Sequence[int]) -> None:
        place = first_difference(expected, answer)
        found[who] = tokens if place is None else place

    note("generate", generated(model, prompt, tokens)[0])
    eager = _eager(model, drafter, TREES[1], 40)
    with torch.inference_mode():
        note("eager ddtree", eager.generate(prompt[0].tolist(), tokens))
    found["acceptance_length"] = round(eager.acceptance_length, 3)
    return found


class Stamps(BaseStreamer):
    """When every token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then one token of every sequence at a time."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing."""


def generated(
    model: LlamaForCausalLM, prompts: torch.Tensor, tokens: int, streamer: BaseStreamer | None = None, **options: Any
) -> list[list[int]]:
    """transformers' own greedy answers to prompts [B, T] of one length."""
    out = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        streamer=streamer,
        **options,
    )
    answers: list[list[int]] = out[:, prompts.shape[1] :].tolist()
    return answers


def generate_ms(model: LlamaForCausalLM, prompts: torch.Tensor, turns: int, **options: Any) -> float:
    """Mean milliseconds between the first and the last new token of transformers' generation."""
    stamps = Stamps()
    generated(model, prompts, turns + 1, stamps, **options)
    return 1000 * (stamps.times[-1] - stamps.times[1]) / (len(stamps.times) - 2)


class _Rounds:
    """Blocks of eager rounds behind one prompt, which is read once."""

    def __init__(self, loop: EagerDDTree, prompt: list[int], turns: int) -> None:
        self._loop, self._turns, self._context = loop, turns, len(prompt)
        with torch.inference_mode():
            self._root = loop.start(prompt)

    @torch.inference_mode()
    def __call__(self) -> float:
        self._loop.rewind(self._context, self._root)
        return wall_ms(self._loop.round, self._turns, self._loop.model.device)


def _eager(model: LlamaForCausalLM, drafter: DFlashDrafter, rows: int, context: int) -> EagerDDTree:
    return EagerDDTree(model, drafter, rows - 1, 16, context + ROOM)


@torch.inference_mode()
def _ours(engine: Engine, speculation: Speculation, context: int, batch: int, turns: int) -> float:
    made, runner = batch_at(engine, speculation, context, batch), engine.scheduler._runner
    for _ in range(3):
        runner.launch(made)
    return wall_ms(lambda: runner.launch(made), turns, engine.target.spec.device)


def _prompts(model: LlamaForCausalLM, length: int, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, model.config.vocab_size, (batch, length), generator=generator).to(model.device)
