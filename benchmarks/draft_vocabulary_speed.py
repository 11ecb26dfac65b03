"""What a cut draft vocabulary saves: a draft's time, and tokens a second, of the whole vocabulary and of cuts in turns.

    python benchmarks/draft_vocabulary_speed.py --list draft_vocabulary.json --sizes 4096,8192,16384 --output FILE

All engines share one target and its caches; they differ in the copy of the head for drafts alone. `draft_ms` is a draft
with its search for the best ranks, `stages_ms` what a round's stages take inside of an answer, from a pass of its own.
"""

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from common import alternate, finish, machine, parser
from ddtree import models
from ddtree.bench.suite import load_prompts
from ddtree.config import EngineConfig, SamplingParams, Speculation
from ddtree.drafter import DFlashDrafter, choose_vocabulary, read_vocabulary
from ddtree.engine import Engine, Generation, StageTimer
from ddtree.tree import top_k

CONTEXT = 300  # tokens that a draft looks back on in `draft_ms`


def engines(base: Engine, folder: Path, listed: Path | None, sizes: list[str]) -> dict[str, Engine]:
    """The whole vocabulary, and the first so many of a list; `listed`: None for the drafter's own."""
    target, dtype, device = base.target, base.target.spec.dtype, base.target.spec.device
    shape = (target.spec.vocab_size, target.spec.hidden_size, target.spec.num_layers)
    found = {"full": base}
    for size in sizes:
        if listed is None:
            ids = choose_vocabulary(size, folder, target.spec.vocab_size)
            assert ids is not None
        else:
            ids = torch.tensor(sorted(read_vocabulary(listed, target.spec.vocab_size)[0][: int(size)]))
        ids = ids.to(device)
        head = target.draft_head(ids)  # type: ignore[attr-defined]  # what Engine.load gives is a LlamaTarget
        drafter = DFlashDrafter.load(folder, target.embed, head, shape, dtype, device, vocabulary=ids)
        found[size] = Engine(target, drafter, base.text, base.config, (base.names[0], folder.name), base._store)
    return found


def draft(engine: Engine, ranks: int) -> Any:
    """One draft behind a context, and its best ranks."""
    drafter = engine.drafter
    assert drafter is not None
    cache = drafter.allocate(1, CONTEXT + drafter.config.block_size)
    root, position = torch.tensor([5]), torch.tensor([CONTEXT])
    return lambda: top_k(drafter.propose(cache, root, position, drafter.config.depths), ranks, drafter.vocabulary)


def summary(generations: list[Generation]) -> dict[str, Any]:
    """Of one engine and mode, over all prompts."""
    tokens = sum(len(g.token_ids) - 1 for g in generations)
    return {
        "tok_s": round(tokens / sum(g.decode_seconds for g in generations), 2),
        "acceptance_length": round(tokens / sum(g.rounds for g in generations), 3),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--list", type=Path, help="default: the list in the drafter's folder")
    options.add_argument("--sizes", default="4096,8192,16384")
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--drafter", default="auto")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--limit", type=int, default=14, help="only the first prompts of the suite")
    options.add_argument("--max-tokens", type=int, default=96)
    options.add_argument("--modes", default="linear,tree")
    options.add_argument("--turns", type=int, default=40)
    args = options.parse_args()
    config = EngineConfig(
        args.model, args.drafter, device="cpu", dtype=args.dtype, draft_vocab="full", max_running_requests=1,
        prefix_caching=False,
    )  # fmt: skip
    base = Engine.load(config)
    made = engines(base, models.resolve_drafter(args.drafter, args.model), args.list, args.sizes.split(","))
    ranks = base.speculation.tree_top_k
    report: dict[str, Any] = machine() | {"engine": base.info(), "limit": args.limit, "max_tokens": args.max_tokens}
    with torch.inference_mode():
        report["draft_ms"] = alternate({name: draft(engine, ranks) for name, engine in made.items()}, args.turns)
    prompts = [base.text.chat([{"role": "user", "content": p.prompt}]) for p in load_prompts(args.limit)]
    sampling = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    ways = [("ar", "ar", base.without_drafter())]
    ways += [(f"{mode} {name}", mode, engine) for mode in args.modes.split(",") for name, engine in made.items()]
    answers: dict[str, list[Generation]] = {name: [] for name, _, _ in ways}
    for index, prompt in enumerate(prompts):
        first = index % len(ways)
        for name, mode, engine in ways[first:] + ways[:first]:
            answers[name] += engine.generate([prompt], [sampling], Speculation(mode))
    report["suite"] = {name: summary(found) for name, found in answers.items()}
    plain = [g.token_ids for g in answers["ar"]]
    report["answers_like_ar"] = {
        name: sum(g.token_ids == ids for g, ids in zip(found, plain, strict=True)) for name, found in answers.items()
    }
    report["times_ar"] = {
        name: round(median(p.decode_seconds / g.decode_seconds for p, g in zip(answers["ar"], found, strict=True)), 3)
        for name, found in answers.items()
    }
    report["stages_ms"] = {}
    short = replace(sampling, max_tokens=min(32, args.max_tokens))
    for name, mode, engine in ways:
        timer, taken = StageTimer(), 0
        for prompt in prompts[:3]:
            taken += engine.generate([prompt], [short], Speculation(mode), timer)[0].rounds
        report["stages_ms"][name] = {k: round(1000 * v / taken, 3) for k, v in timer.seconds.items() if k != "prefill"}
    finish(report, args.output)


if __name__ == "__main__":
    main()
