"""Half precision on a GPU: is every answer the same in every mode, alone and in a batch, greedy and sampled?

    python benchmarks/invariance.py --output benchmarks/results/invariance.json

The first prompts of the suite, then the same with a system message. Every mode's answers are compared with plain
decoding's, alone; with --draft-dtype int8 drafts are made in 8 bits, which must change none of them. Tokens a second
are those of decoding, prompts left out, with modes in turns. Exit code 1 if any answer differs.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from common import finish, machine, parser
from ddtree.bench.suite import load_prompts
from ddtree.config import DRAFT_DTYPES, EMBEDDED, MODES, NUMERICS, EngineConfig, SamplingParams, Speculation
from ddtree.engine import Engine, Generation

SYSTEM = {"role": "system", "content": "Answer in a few plain words."}


def chats(engine: Engine, count: int) -> list[list[int]]:
    """The token ids of `count` chats, all different."""
    users = [{"role": "user", "content": prompt.prompt} for prompt in load_prompts()]
    every = [[user] for user in users] + [[SYSTEM, user] for user in users]
    if count > len(every):
        raise SystemExit(f"--prompts: at most {len(every)}")
    return [engine.text.chat(messages) for messages in every[:count]]


def speculations(budgets: Sequence[int]) -> dict[str, Speculation]:
    """Every mode, and trees of several sizes."""
    found = {mode: Speculation(mode) for mode in MODES if mode != "tree"}
    return found | {f"tree@{budget}": Speculation("tree", budget, 16) for budget in budgets}


def alone(engines: dict[str, Engine], modes: dict[str, Speculation], chosen: list[tuple[list[int], SamplingParams]]):
    """The generations of every mode, one prompt after another; modes take turns at a prompt."""
    found: dict[str, list[Generation]] = {name: [] for name in modes}
    for index, (prompt, params) in enumerate(chosen):
        names = list(modes)[index % len(modes) :] + list(modes)[: index % len(modes)]
        for name in names:
            found[name] += engines[name].generate([prompt], [params], modes[name])
    return found


def batched(engine: Engine, mode: Speculation, chosen: list[tuple[list[int], SamplingParams]], size: int):
    """The same prompts, `size` at once."""
    found: list[Generation] = []
    for first in range(0, len(chosen), size):
        prompts, params = zip(*chosen[first : first + size], strict=True)
        found += engine.generate(prompts, params, mode)
    return found


def equal(found: list[Generation], wanted: list[Generation]) -> int:
    """How many answers are the same."""
    return sum(a.token_ids == b.token_ids for a, b in zip(found, wanted, strict=True))


def rate(found: list[Generation]) -> float:
    """Tokens a second of decoding: the first token of an answer is its prompt's."""
    return round(sum(len(g.token_ids) - 1 for g in found) / sum(g.decode_seconds for g in found), 1)


def measure(args: Any, engine: Engine) -> dict[str, Any]:
    """Rows by mode."""
    modes = speculations([int(part) for part in args.budgets.split(",")])
    engines = {name: engine.without_drafter() if name == "ar" else engine for name in modes}
    prompts = chats(engine, args.prompts)
    rows: dict[str, Any] = {name: {"of": len(prompts)} for name in modes}
    for name, mode in modes.items():  # graphs are captured, kernels compiled
        engines[name].generate(prompts[:1], [SamplingParams(max_tokens=4)], mode)
    for kind, temperature in (("greedy", 0.0), ("sampled", args.temperature)):
        params = SamplingParams(max_tokens=args.max_tokens, temperature=temperature)
        chosen = [(prompt, replace(params, seed=seed)) for seed, prompt in enumerate(prompts)]
        found = alone(engines, modes, chosen)
        for name, mode in modes.items():
            together = batched(engines[name], mode, chosen, args.at_once)
            rows[name][kind] = {
                "equal_to_ar": equal(found[name], found["ar"]),
                "equal_in_batches": equal(together, found["ar"]),
                "tok_s": rate(found[name]),
                "over_ar": round(rate(found[name]) / rate(found["ar"]), 3),
                "acceptance_length": _pooled(found[name]),
                "prefill_ms": round(1000 * sum(g.prefill_seconds for g in found[name]) / len(prompts), 2),
            }
        print(kind, {name: row[kind] for name, row in rows.items()}, flush=True)
    return rows


def _pooled(found: list[Generation]) -> float:
    rounds = sum(g.speculative.rounds for g in found)
    return round((sum(g.speculative.accepted for g in found) + rounds) / rounds, 3)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default=EMBEDDED)
    options.add_argument("--drafter", default="auto")
    options.add_argument("--device", default="auto")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--draft-dtype", choices=DRAFT_DTYPES, default="auto")
    options.add_argument("--numerics", choices=NUMERICS, default="auto")
    options.add_argument("--prompts", type=int, default=40)
    options.add_argument("--budgets", default="15,31,63", help="of trees")
    options.add_argument("--max-tokens", type=int, default=96)
    options.add_argument("--temperature", type=float, default=0.8, help="of the sampled answers")
    options.add_argument("--at-once", type=int, default=8, help="prompts of a batch")
    args = options.parse_args()
    config = EngineConfig(
        model=args.model, drafter=args.drafter, device=args.device, dtype=args.dtype, draft_dtype=args.draft_dtype,
        numerics=args.numerics, max_model_len=2048, max_running_requests=args.at_once, prefix_caching=False,
    )  # fmt: skip
    engine = Engine.load(config)
    rows = measure(args, engine)
    finish({"rows": rows, "engine": engine.info(), **machine()}, args.output)
    counts = [row[kind][what] for row in rows.values() for kind in ("greedy", "sampled") for what in row[kind]
              if what.startswith("equal")]  # fmt: skip
    sys.exit(0 if min(counts) == args.prompts else 1)


if __name__ == "__main__":
    main()
