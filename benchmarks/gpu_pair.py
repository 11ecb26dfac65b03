"""The real pair's tokens per second and acceptance: this engine and transformers, alone and in batches (a part of
gpu.py).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from ddtree.bench.suite import Prompt, load_prompts
from ddtree.config import EngineConfig, SamplingParams, Speculation
from ddtree.drafter import DFlashDrafter
from ddtree.engine import Engine
from ddtree.errors import InvalidOption
from ddtree.models import resolve_drafter, resolve_model
from gpu_ddtree import EagerDDTree
from gpu_peers import generated
from gpu_rounds import tree_of
from gpu_timing import alternate_blocks, summary, synchronize

TREES = (16, 32, 64)  # rows, the root included
EAGER = (16, 64)
HOW = (
    "tokens a second of whole answers, prefill included, over all prompts of a block; answers end where the model ends "
    "them; blocks alternate. `N at once`: through this engine's scheduler. acceptance_length is pooled over the prompts"
    ", the bonus included; `equal`: answers that are `ar`'s own"
)
Answers = Callable[[], tuple[list[list[int]], float | None]]  # token ids of every prompt, acceptance length


@dataclass
class Runs:
    """What the variants of one comparison answered, and whether it was the same in every block."""

    device: torch.device
    answers: dict[str, list[list[int]]] = field(default_factory=dict)
    lengths: dict[str, float | None] = field(default_factory=dict)

    def block(self, name: str, answer: Answers) -> float:
        """Tokens a second of one block."""
        synchronize(self.device)
        started = time.perf_counter()
        found, length = answer()
        seconds = time.perf_counter() - started
        self.answers[name], self.lengths[name] = found, length
        return sum(map(len, found)) / seconds

    def compare(self, variants: dict[str, Answers], blocks: int) -> dict[str, dict[str, Any]]:
        """Rates, ratios to `ar`, acceptance lengths, and how many answers are those of `ar`."""
        found = alternate_blocks({name: partial(self.block, name, run) for name, run in variants.items()}, blocks)
        report = summary(found, "tok_s")
        for name, row in report.items():
            pairs = zip(self.answers[name], self.answers["ar"], strict=True)
            row["equal"], row["answers"] = sum(a == b for a, b in pairs), len(self.answers[name])
            row["acceptance_length"] = self.lengths[name]
        return report


def compare_pair(args: Any, dtype: str) -> dict[str, Any]:
    """The pair of --model and --drafter over the first prompts of the suite.

    args: the options of gpu.py; dtype: a name of the engine's. Raises DDTreeError for what cannot be loaded.
    """
    config = EngineConfig(
        model=args.model, drafter=args.drafter, device=args.device, dtype=dtype, cuda_graphs=not args.eager,
        max_running_requests=max(args.at_once), max_tree_budget=max(TREES) - 1, prefix_caching=False,
        max_model_len=args.pair_context,
    )  # fmt: skip
    engine = Engine.load(config)
    model = load_transformers(resolve_model(args.model), engine)
    drafter = load_drafter(resolve_drafter(args.drafter, args.model), model, engine)
    suite = _encoded(engine, load_prompts())
    report: dict[str, Any] = {"engine": engine.info(), "prompts": args.prompts, "max_tokens": args.max_tokens}
    device = engine.target.spec.device
    alone = alone_variants(engine, model, drafter, _encoded(engine, load_prompts(args.prompts)), args.max_tokens)
    report["1 at once"] = Runs(device).compare(alone, args.blocks)
    for count in args.at_once:
        together = together_variants(engine, (suite * (count // len(suite) + 1))[:count], args.max_tokens)
        report[f"{count} at once"] = Runs(device).compare(together, args.blocks)
    return report


def _encoded(engine: Engine, prompts: Sequence[Prompt]) -> list[list[int]]:
    return [engine.text.chat([{"role": "user", "content": prompt.prompt}]) for prompt in prompts]


def load_transformers(folder: Path, engine: Engine) -> LlamaForCausalLM:
    """The same folder in transformers, in the engine's dtype and on its device."""
    spec = engine.target.spec
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=spec.dtype, attn_implementation="sdpa")
    return model.to(spec.device).eval()


def load_drafter(folder: Path | None, model: LlamaForCausalLM, engine: Engine) -> DFlashDrafter:
    """The drafter once more, with transformers' embedding and head. Raises InvalidOption where there is none."""
    if folder is None:
        raise InvalidOption("the part pair needs a drafter: name one with --drafter", param="drafter")
    spec = engine.target.spec
    sizes = (spec.vocab_size, spec.hidden_size, spec.num_layers)
    return DFlashDrafter.load(folder, model.get_input_embeddings(), model.lm_head, sizes, model.dtype, model.device)


def our_speculations() -> dict[str, Speculation]:
    """The modes that are compared, by name."""
    return {
        "ar": Speculation("ar"),
        "linear": Speculation("linear", tree_context="off"),
        **{f"tree {n}": tree_of(n) for n in TREES},
    }


def alone_variants(
    engine: Engine, model: LlamaForCausalLM, drafter: DFlashDrafter, prompts: Sequence[list[int]], max_tokens: int
) -> dict[str, Answers]:
    """One prompt after another, by every mode of the engine, by transformers, and by a plain DDTree over it."""
    plain, params = engine.without_drafter(), SamplingParams(max_tokens=max_tokens, seed=0)

    def ours(user: Engine, speculation: Speculation) -> tuple[list[list[int]], float | None]:
        return _pooled([user.generate([prompt], [params], speculation)[0] for prompt in prompts])

    def theirs() -> tuple[list[list[int]], float | None]:
        rows = [torch.tensor([prompt], device=model.device) for prompt in prompts]
        return [generated(model, row, max_tokens)[0] for row in rows], None

    variants: dict[str, Answers] = {
        name: partial(ours, plain if name == "ar" else engine, speculation)
        for name, speculation in our_speculations().items()
    }
    variants["transformers"] = theirs
    length = max(map(len, prompts)) + max_tokens + drafter.config.block_size
    for rows in EAGER:
        loop = EagerDDTree(model, drafter, rows - 1, 16, length)
        variants[f"eager ddtree {rows}"] = partial(_eagerly, loop, prompts, max_tokens, engine.target.spec.end_ids)
    return variants


def together_variants(engine: Engine, prompts: Sequence[list[int]], max_tokens: int) -> dict[str, Answers]:
    """All prompts at once through the engine's scheduler, by every mode."""
    plain, params = engine.without_drafter(), SamplingParams(max_tokens=max_tokens, seed=0)

    def run(user: Engine, speculation: Speculation) -> tuple[list[list[int]], float | None]:
        return _pooled(user.generate(prompts, [params] * len(prompts), speculation))

    return {
        name: partial(run, plain if name == "ar" else engine, speculation)
        for name, speculation in our_speculations().items()
    }


@torch.inference_mode()
def _eagerly(
    loop: EagerDDTree, prompts: Sequence[list[int]], max_tokens: int, ends: Sequence[int]
) -> tuple[list[list[int]], float | None]:
    answers, rounds, accepted = [], 0, 0
    for prompt in prompts:
        answers.append(loop.generate(prompt, max_tokens, ends))
        rounds, accepted = rounds + loop.rounds, accepted + loop.accepted
    return answers, _length(rounds, accepted)


def _pooled(generations: Sequence[Any]) -> tuple[list[list[int]], float | None]:
    rounds, accepted = (sum(getattr(g.speculative, name) for g in generations) for name in ("rounds", "accepted"))
    return [g.token_ids for g in generations], _length(rounds, accepted)


def _length(rounds: int, accepted: int) -> float | None:
    return round((accepted + rounds) / rounds, 4) if rounds else None
