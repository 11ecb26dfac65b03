"""Acceptance lengths of `tree_context` by replay: exact, at a fraction of the time of running every variant.

    OMP_NUM_THREADS=1 python benchmarks/context_replay.py --keep proposals.pt --output FILE

Speculation changes no token in float32, so an answer is decoded once, plainly, the drafter asked at every one of its
positions. From those proposals the rounds of any budget and context follow without a model: a tree is built by the
engine's own code, and accepted as far as the answer goes along it. Over the bench's suite, greedy and at temperature
0.7; the first half of each category's prompts may be used for tuning, the second is held out. Acceptance length here is
tokens after the first over rounds, so the last round counts up to the answer's end.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import finish, machine, parser
from context_intervals import gain, rate
from ddtree.bench.suite import CATEGORIES, Prompt, load_prompts
from ddtree.config import EngineConfig, SamplingParams, Speculation
from ddtree.engine import Engine, ops
from ddtree.engine.context import SequenceContext
from ddtree.engine.modes import MODES, depths_needed, lay_out, ranks_needed
from ddtree.tree import Proposal, top_k

BATCH, RANKS = 7, 16
WHOLE: Mapping[str, Tensor | None] = {"full": None}
CPU = torch.device("cpu")


@dataclass
class Record:
    """An answer, and what the drafter proposes behind each of its tokens."""

    id: str
    category: str
    held_out: bool
    prompt: list[int]
    answer: list[int]
    tokens: list[list[list[int]]]  # [answer - 1][D][K]
    log_q: list[list[list[float]]]


@contextmanager
def asking(engine: Engine, keep: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Plain rounds ask the drafter too; its logits [D, V] go to `keep` with the number of their answer, by its seed."""
    honest = ops.HostOps.build

    def build(self: ops.HostOps, batch: Any, proposal: Proposal | None) -> None:
        logits = batch.drafter.propose(
            batch.drafter_cache, batch.state.tokens[:, 0], batch.state.position, batch.drafter.config.depths
        )
        for index, request in enumerate(engine.scheduler._running):
            keep((request.params.seed or 0) % BATCH, logits[index])
        honest(self, batch, proposal)

    ops.HostOps.build = build  # type: ignore[method-assign]
    try:
        yield
    finally:
        ops.HostOps.build = honest  # type: ignore[method-assign]


def collect(
    engine: Engine,
    prompts: Sequence[Prompt],
    temperature: float,
    tokens: int,
    cuts: Mapping[str, Tensor | None] = WHOLE,
    seed: int = 0,
) -> dict[str, list[Record]]:
    """Decode everything plainly, several prompts at once; the suite has each category's prompts in turn.

    cuts: the tokens that drafts are made of, by name; None: the drafter's own vocabulary. A cut needs a drafter of the
        whole vocabulary. seed: the first prompt's, a multiple of BATCH. Returns: what is proposed of each.
    """
    records: dict[str, list[Record]] = {name: [] for name in cuts}
    for start in range(0, len(prompts), BATCH):
        part = prompts[start : start + BATCH]
        ids = [engine.text.chat([{"role": "user", "content": prompt.prompt}]) for prompt in part]
        found: dict[str, list[list[Proposal]]] = {name: [[] for _ in part] for name in cuts}

        def keep(number: int, logits: Tensor, found: dict[str, list[list[Proposal]]] = found) -> None:
            for name, cut in cuts.items():
                own = engine.drafter.vocabulary if cut is None and engine.drafter is not None else cut
                drafted = top_k(logits if cut is None else logits[:, cut], RANKS, own)
                found[name][number].append(drafted)

        seeds = [seed + start + i for i in range(len(part))]
        params = [SamplingParams(max_tokens=tokens, temperature=temperature, seed=number) for number in seeds]
        with asking(engine, keep):
            generations = engine.generate(ids, params, Speculation("ar"))
        for (i, (prompt, generation)), name in product(enumerate(zip(part, generations, strict=True)), cuts):
            proposals = found[name][i]
            assert len(proposals) == len(generation.token_ids) - 1
            records[name].append(
                Record(
                    prompt.id, prompt.category, start + i >= len(prompts) // 2, ids[i], generation.token_ids,
                    [p.tokens.tolist() for p in proposals], [p.log_q.tolist() for p in proposals],
                )
            )  # fmt: skip
        print(f"T {temperature:g}: {start + len(part)} of {len(prompts)}", file=sys.stderr, flush=True)
    return records


def rounds(record: Record, speculation: Speculation, given: SequenceContext | None = None) -> int:
    """How many rounds an answer takes. given: a context in place of the speculation's own."""
    mode, context = MODES[speculation.mode], given or SequenceContext.of(speculation, record.prompt)
    ranks, answer, count, done = ranks_needed(mode, speculation), record.answer, 0, 1
    if context is not None:
        context.commit(answer[:1])
    while done < len(answer):
        depth = depths_needed(mode, speculation, len(record.tokens[done - 1]))
        tokens = [row[:ranks] for row in record.tokens[done - 1][:depth]]
        log_q = [row[:ranks] for row in record.log_q[done - 1][:depth]]
        nodes = lay_out(mode, speculation, log_q, context.guesses(tokens, log_q) if context is not None else None).nodes
        own, row, accepted = {}, 0, 0
        for place in range(1, len(nodes)):
            foreign = nodes.foreign.get(place)
            token = tokens[nodes.depths[place] - 1][nodes.ranks[place]] if foreign is None else foreign
            own[nodes.parents[place], token] = place
        while done + accepted < len(answer) and (row := own.get((row, answer[done + accepted]), -1)) >= 0:
            accepted += 1
        committed = answer[done : done + accepted + 1]
        if context is not None:
            context.commit(committed)
        done, count = done + len(committed), count + 1
    return count


def report_of(records: Sequence[Record], ways: dict[str, Speculation]) -> dict[str, Any]:
    """Pooled, by category and for the half that nothing was tuned on; gains are over the budget without a context."""
    shares = {
        name: [(len(record.answer) - 1.0, float(rounds(record, way))) for record in records]
        for name, way in ways.items()
    }
    groups = {c: [i for i, record in enumerate(records) if record.category == c] for c in CATEGORIES}
    held_out = [i for i, record in enumerate(records) if record.held_out]
    report = {}
    for name, own in shares.items():
        base = shares["off@" + name.partition("@")[2]]
        pairs = [(made / cost, made / other) for (made, cost), (_, other) in zip(own, base, strict=True)]
        report[name] = {
            "acceptance_length": round(rate(own), 3),
            "held_out": round(rate([own[i] for i in held_out]), 3),
            "by_category": {c: round(rate([own[i] for i in who]), 3) for c, who in groups.items() if who},
        }
        if own is not base:
            report[name] |= {
                "gain": gain(own, base),
                "held_out_gain": gain([own[i] for i in held_out], [base[i] for i in held_out]),
                "gain_by_category": {
                    c: gain([own[i] for i in who], [base[i] for i in who]) for c, who in groups.items() if who
                },
                "better": sum(one > other for one, other in pairs),
                "worse": sum(one < other for one, other in pairs),
            }
    return report


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--keep", type=Path, help="proposals are kept here, and read again where they are there")
    options.add_argument("--limit", type=int, help="only the first prompts of the suite; 14 or more")
    options.add_argument("--max-tokens", type=int, default=128)
    options.add_argument("--budgets", default="5,8,16,32,64")
    options.add_argument("--top-k", type=int, default=Speculation().tree_top_k)
    options.add_argument("--temperatures", default="0,0.7")
    args = options.parse_args()
    temperatures = [float(value) for value in args.temperatures.split(",")]
    if args.keep is not None and args.keep.exists():
        kept = torch.load(args.keep, weights_only=False)
    else:
        engine = Engine.load(EngineConfig(dtype="float32", device="cpu", prefix_caching=False, max_model_len=2048))
        kept = {t: collect(engine, load_prompts(args.limit), t, args.max_tokens)["full"] for t in temperatures}
        if args.keep is not None:
            torch.save(kept, args.keep)
    ways = {
        f"{context}@{budget}": Speculation("tree", int(budget), args.top_k, tree_context=context)
        for budget in args.budgets.split(",")
        for context in ("off", "branch", "mix")
    }
    ways |= {f"{context}@linear": Speculation("linear", tree_context=context) for context in ("off", "branch", "mix")}
    report = machine() | {
        "prompts": len(kept[temperatures[0]]),
        "max_tokens": max(len(record.answer) for record in kept[temperatures[0]]),
        "top_k": args.top_k,
        "temperatures": {f"{t:g}": report_of(kept[t], ways) for t in temperatures},
    }
    finish(report, args.output)


if __name__ == "__main__":
    main()
