"""Acceptance lengths of drafts of the first N tokens of a list, by replay: see context_replay.py for how.

    OMP_NUM_THREADS=1 python benchmarks/draft_vocabulary_replay.py --list draft_vocabulary.json --limit 14

One decoding of the bench's suite serves all N, since a cut drops columns of the same logits.
"""

from pathlib import Path
from typing import Any

import torch

from common import finish, machine, parser
from context_replay import collect, rounds
from ddtree.bench.suite import CATEGORIES, load_prompts
from ddtree.config import EngineConfig, Speculation
from ddtree.drafter import read_vocabulary
from ddtree.engine import Engine


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--list", type=Path, required=True)
    options.add_argument("--sizes", default="4096,8192,12288,16384,24576")
    options.add_argument("--drafter", default="auto")
    options.add_argument("--limit", type=int, help="only the first prompts of the suite")
    options.add_argument("--max-tokens", type=int, default=64)
    options.add_argument("--budgets", default="5,8,16")
    options.add_argument("--top-k", type=int, default=8)
    options.add_argument("--temperature", type=float, default=0.0)
    args = options.parse_args()
    engine = Engine.load(
        EngineConfig(
            drafter=args.drafter, dtype="float32", device="cpu", prefix_caching=False, max_model_len=1024,
            draft_vocab="full",
        )
    )  # fmt: skip
    order, _ = read_vocabulary(args.list, engine.target.spec.vocab_size)
    cuts: dict[str, torch.Tensor | None] = {"full": None}
    cuts |= {size: torch.tensor(sorted(order[: int(size)])) for size in args.sizes.split(",")}
    found = collect(engine, load_prompts(args.limit), args.temperature, args.max_tokens, cuts)
    ways = {"linear": Speculation("linear", tree_context="off")}
    ways |= {f"tree@{b}": Speculation("tree", int(b), args.top_k, tree_context="off") for b in args.budgets.split(",")}
    report: dict[str, Any] = machine() | {
        "prompts": len(found["full"]), "max_tokens": args.max_tokens, "temperature": args.temperature,
        "top_k": args.top_k,
    }  # fmt: skip
    for name, way in ways.items():
        report[name] = {}
        for cut, records in found.items():
            made = [len(record.answer) - 1 for record in records]
            taken = [rounds(record, way) for record in records]
            pooled = {
                c: [sum(m for m, r in zip(made, records, strict=True) if r.category == c),
                    sum(t for t, r in zip(taken, records, strict=True) if r.category == c)] for c in CATEGORIES
            }  # fmt: skip
            report[name][cut] = {
                "acceptance_length": round(sum(made) / sum(taken), 4),
                "by_category": {c: round(m / t, 3) for c, (m, t) in pooled.items() if t},
            }
    finish(report, args.output)


if __name__ == "__main__":
    main()
