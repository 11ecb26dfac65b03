"""What the text so far adds to drafts (`tree_context`): acceptance length by category, off against branch and mix.

    OMP_NUM_THREADS=1 python benchmarks/context.py --per-category 2 --max-tokens 64 --output FILE
    python benchmarks/context.py --device cuda --dtype bfloat16 --budgets 16,32 --output FILE

Prompts of the bench's suite on the embedded pair. Every prompt is answered by all variants in turn, greedy and
at temperature 0.7 (--temperatures), by trees at each of --budgets and, where --chain is given, by the chain. Acceptance
length is pooled: committed tokens over verify forwards, before cuts. Tokens a second are of decoding alone; they mean
something only on idle cores. On a GPU every variant answers once before, since its rounds are captured then. In float32
tokens must equal those without a context: the report counts who does.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from common import finish, machine, parser
from ddtree.bench.suite import CATEGORIES, Prompt, load_prompts
from ddtree.config import TREE_CONTEXTS, EngineConfig, SamplingParams, Speculation
from ddtree.engine import Engine, Generation, StageTimer


@dataclass(frozen=True)
class Answer:
    """One prompt answered by one variant."""

    prompt: Prompt
    variant: str
    temperature: float
    generation: Generation


def chosen(per_category: int, held_out: bool) -> list[Prompt]:
    """The first prompts of each category; held_out: of its second half, on which nothing was tuned."""
    found = []
    for category in CATEGORIES:
        own = [prompt for prompt in load_prompts() if prompt.category == category]
        found += (own[len(own) // 2 :] if held_out else own)[:per_category]
    return found


def variants(budgets: Sequence[int], contexts: Sequence[str], chain: bool, top_k: int) -> dict[str, Speculation]:
    """By name, such as mix@16."""
    found = {
        f"{context}@{budget}": Speculation("tree", budget, top_k, tree_context=context)
        for budget in budgets
        for context in contexts
    }
    if chain:
        found |= {f"{context}@linear": Speculation("linear", tree_context=context) for context in contexts}
    return found


def measure(
    engine: Engine, prompts: Sequence[Prompt], ways: dict[str, Speculation], temperatures: Sequence[float], tokens: int
) -> list[Answer]:
    """All answers; the variants take turns, and the first of them moves on by one from prompt to prompt."""
    names, answers = list(ways), []
    for index, prompt in enumerate(prompts):
        ids = engine.text.chat([{"role": "user", "content": prompt.prompt}])
        for temperature in temperatures:
            params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=index)
            for name in names[index % len(names) :] + names[: index % len(names)]:
                [generation] = engine.generate([ids], [params], ways[name])
                answers.append(Answer(prompt, name, temperature, generation))
        print(f"{index + 1}/{len(prompts)} {prompt.id}", file=sys.stderr, flush=True)
    return answers


def figures(answers: Iterable[Answer]) -> dict[str, Any]:
    """Pooled acceptance length and tokens a second."""
    found = [answer.generation for answer in answers]
    rounds = sum(generation.rounds for generation in found)
    committed = sum((generation.acceptance_length or 0) * generation.rounds for generation in found)
    seconds = sum(generation.decode_seconds for generation in found)
    return {
        "acceptance_length": round(committed / rounds, 3) if rounds else None,
        "rounds": rounds,
        "tok_s": round(sum(len(generation.token_ids) - 1 for generation in found) / seconds, 2) if seconds else None,
    }


def summary(answers: Sequence[Answer], names: Sequence[str], temperature: float) -> dict[str, Any]:
    """Per variant: over all prompts, by category, and prompt by prompt against the same budget without a context."""
    report: dict[str, Any] = {}
    here = [answer for answer in answers if answer.temperature == temperature]
    for name in names:
        own = [answer for answer in here if answer.variant == name]
        base = {a.prompt.id: a.generation for a in here if a.variant == "off@" + name.partition("@")[2]}
        report[name] = figures(own) | {
            "by_category": {
                category: figures(a for a in own if a.prompt.category == category)["acceptance_length"]
                for category in CATEGORIES
            }
        }
        if base:
            pairs = [(a.generation, base[a.prompt.id]) for a in own]
            report[name]["fewer_rounds_than_off"] = sum(one.rounds < other.rounds for one, other in pairs)
            report[name]["more_rounds_than_off"] = sum(one.rounds > other.rounds for one, other in pairs)
            report[name]["tokens_equal_to_off"] = sum(one.token_ids == other.token_ids for one, other in pairs)
    return report


def build_time(engine: Engine, prompt: Prompt, ways: dict[str, Speculation], tokens: int) -> dict[str, Any]:
    """Milliseconds a round of the stages on the way, by a timer that looks on."""
    ids, found = engine.text.chat([{"role": "user", "content": prompt.prompt}]), {}
    for name, speculation in ways.items():
        timer = StageTimer()
        [generation] = engine.generate([ids], [SamplingParams(max_tokens=tokens)], speculation, observer=timer)
        rounds = max(generation.rounds, 1)
        found[name] = {stage: round(1000 * spent / rounds, 3) for stage, spent in timer.seconds.items()}
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--per-category", type=int, default=2, help="prompts of each of the suite's categories")
    options.add_argument("--held-out", action="store_true", help="only prompts on which nothing was tuned")
    options.add_argument("--max-tokens", type=int, default=64)
    options.add_argument("--budgets", default="8,16,32")
    options.add_argument("--contexts", default="off,branch,mix")
    options.add_argument("--temperatures", default="0,0.7")
    options.add_argument("--top-k", type=int, default=Speculation().tree_top_k)
    options.add_argument("--chain", action="store_true", help="linear too")
    options.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    options.add_argument("--dtype", default="float32")
    options.add_argument("--stages", action="store_true", help="stage times of one prompt, from a pass of their own")
    args = options.parse_args()
    contexts = args.contexts.split(",")
    assert set(contexts) <= set(TREE_CONTEXTS), f"contexts are {TREE_CONTEXTS}"
    temperatures = [float(value) for value in args.temperatures.split(",")]
    ways = variants([int(value) for value in args.budgets.split(",")], contexts, args.chain, args.top_k)
    engine = Engine.load(EngineConfig(dtype=args.dtype, device=args.device, prefix_caching=False, max_model_len=2048))
    prompts = chosen(args.per_category, args.held_out)
    if args.device != "cpu":
        measure(engine, prompts[:1], ways, temperatures[:1], 16)
    answers = measure(engine, prompts, ways, temperatures, args.max_tokens)
    report = machine() | {
        "prompts": [prompt.id for prompt in prompts],
        "max_tokens": args.max_tokens,
        "device": args.device,
        "dtype": args.dtype,
        "top_k": args.top_k,
        "temperatures": {f"{t:g}": summary(answers, list(ways), t) for t in temperatures},
    }
    if args.stages:
        report["stages_ms_a_round"] = build_time(engine, prompts[0], ways, args.max_tokens)
    finish(report, args.output)


if __name__ == "__main__":
    main()
