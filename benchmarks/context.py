"""What the text so far adds to drafts (`tree_context`): tokens a second and tokens a round, off against branch and mix.

    python benchmarks/context.py --ar --chain --turns 3 --limit-s 240 --device cuda --dtype bfloat16 --output FILE
    python benchmarks/context.py --ar --chain --budgets 5,8 --limit-s 1500 --dtype bfloat16 --output FILE

Prompts of the bench's suite on the embedded pair, one at a time. Every prompt is answered by all variants in turn,
greedy and at temperature 0.7 (--temperatures), by trees at each of --budgets and, where --chain is given, by the chain;
--turns times, each with seeds of its own. Gains are over the same budget without a context, pooled over all prompts and
of each category, with paired intervals (context_intervals.py). Tokens a second are of decoding alone; they mean
something only on idle cores. On a GPU every variant answers once before, since its rounds are captured then. Acceptance
length is committed tokens over verify forwards, before cuts. In float32, and on a GPU, tokens must equal those without
a context: the report counts them. Once --limit-s have gone by no prompt is begun, and the report is of those that were
done, by all variants; so it is where one fails ("failed"; the exit code is 1 then).
"""

import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common import finish, machine, parser
from context_intervals import Share, gain, rate
from ddtree.bench.suite import CATEGORIES, Prompt, load_prompts
from ddtree.config import TREE_CONTEXTS, EngineConfig, SamplingParams, Speculation
from ddtree.engine import Engine, Generation, StageTimer


@dataclass
class Tally:
    """One prompt's answers by one variant at one temperature, added up."""

    tokens: int = 0  # decoded ones: the first comes from the prompt
    seconds: float = 0.0
    committed: float = 0.0
    rounds: int = 0
    answers: list[list[int]] = field(default_factory=list)

    def add(self, generation: Generation) -> None:
        self.tokens += len(generation.token_ids) - 1
        self.seconds += generation.decode_seconds
        self.committed += (generation.acceptance_length or 0.0) * generation.rounds
        self.rounds += generation.rounds
        self.answers.append(generation.token_ids)

    @property
    def speed(self) -> Share:
        """Tokens and seconds."""
        return self.tokens, self.seconds

    @property
    def length(self) -> Share:
        """Committed tokens and rounds."""
        return self.committed, self.rounds


Found = dict[tuple[float, str], dict[str, Tally]]  # by temperature and variant, then by prompt


def chosen(per_category: int, held_out: bool) -> list[Prompt]:
    """The first prompts of each category, which take turns; held_out: of its second half, not used for tuning."""
    found = []
    for category in CATEGORIES:
        own = [prompt for prompt in load_prompts() if prompt.category == category]
        found.append((own[len(own) // 2 :] if held_out else own)[:per_category])
    return [prompt for row in zip(*found, strict=True) for prompt in row]


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


def answer(
    engine: Engine, prompt: Prompt, ways: dict[str, Speculation], order: Sequence[str], params: SamplingParams
) -> dict[str, Generation]:
    """One prompt by every variant."""
    ids = engine.text.chat([{"role": "user", "content": prompt.prompt}])
    return {name: engine.generate([ids], [params], ways[name])[0] for name in order}


def measure(
    engine: Engine,
    prompts: Sequence[Prompt],
    ways: dict[str, Speculation],
    temperatures: Sequence[float],
    tokens: int,
    turns: int = 1,
    deadline: float = float("inf"),
) -> tuple[Found, str | None]:
    """All answers; the variants take turns, and the first of them moves on by one from prompt to prompt.

    deadline: no prompt is begun after it, by time.monotonic(). What one has is added once all variants are done.
    Returns: the answers, and the last line of what went wrong, which ends the measurement.
    """
    names: list[str] = list(ways)
    found: Found = {(temperature, name): {} for temperature in temperatures for name in names}
    for number in range(turns * len(prompts)):
        if time.monotonic() > deadline:
            print(f"the time is over: {number} of {turns * len(prompts)}", file=sys.stderr, flush=True)
            break
        prompt, order = prompts[number % len(prompts)], names[number % len(names) :] + names[: number % len(names)]
        try:
            made = {
                temperature: answer(engine, prompt, ways, order, SamplingParams(tokens, temperature, seed=number))
                for temperature in temperatures
            }
        except Exception:
            traceback.print_exc()
            return found, traceback.format_exc().strip().splitlines()[-1][:300]
        for temperature, generations in made.items():
            for name, generation in generations.items():
                found[temperature, name].setdefault(prompt.id, Tally()).add(generation)
        print(f"{number + 1}/{turns * len(prompts)} {prompt.id}", file=sys.stderr, flush=True)
    return found, None


def figures(own: dict[str, Tally], who: Sequence[str]) -> dict[str, Any]:
    """Tokens a second and acceptance length of some prompts."""
    tallies = [own[id_] for id_ in who]
    return {
        "tok_s": round(rate([tally.speed for tally in tallies]), 2),
        "acceptance_length": round(rate([tally.length for tally in tallies]), 3),
    }


def gains(own: dict[str, Tally], base: dict[str, Tally], who: Sequence[str]) -> dict[str, Any]:
    """Over another variant, with their intervals: see context_intervals.gain."""
    return {
        "tok_s_gain": gain([own[id_].speed for id_ in who], [base[id_].speed for id_ in who]),
        "acceptance_gain": gain([own[id_].length for id_ in who], [base[id_].length for id_ in who]),
    }


def summary(found: Found, temperature: float, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Per variant: over all prompts and by category, against the same budget without a context, and against `ar`."""
    mine = {name: tallies for (heat, name), tallies in found.items() if heat == temperature}
    report: dict[str, Any] = {}
    for name, own in mine.items():
        groups = {c: [p.id for p in prompts if p.category == c and p.id in own] for c in CATEGORIES}
        who = [id_ for group in groups.values() for id_ in group]
        if not who:
            continue
        base = mine.get("off@" + name.partition("@")[2], own)
        line = {c: figures(own, group) for c, group in groups.items() if group}
        report[name] = figures(own, who) | {"rounds": sum(tally.rounds for tally in own.values())}
        if base is not own:
            same = [a == b for id_ in who for a, b in zip(own[id_].answers, base[id_].answers, strict=True)]
            report[name] |= gains(own, base, who) | {"answers_as_off": [sum(same), len(same)]}
            line = {c: row | gains(own, base, groups[c]) for c, row in line.items()}
        if "ar" in mine and name != "ar":
            report[name]["over_ar"] = round(report[name]["tok_s"] / figures(mine["ar"], who)["tok_s"], 3)
        report[name]["by_category"] = line
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
    options.add_argument("--per-category", type=int, default=4, help="prompts of each of the suite's categories")
    options.add_argument("--held-out", action="store_true", help="only prompts on which nothing was tuned")
    options.add_argument("--max-tokens", type=int, default=128)
    options.add_argument("--budgets", default="8,16,32,64")
    options.add_argument("--contexts", default="off,branch,mix")
    options.add_argument("--temperatures", default="0,0.7")
    options.add_argument("--top-k", type=int, help="(default: what suits the device)")
    options.add_argument("--chain", action="store_true", help="linear too")
    options.add_argument("--ar", action="store_true", help="plain decoding too")
    options.add_argument("--turns", type=int, default=1, help="how often every prompt is answered")
    options.add_argument("--limit-s", type=float, default=float("inf"), help="begin no prompt after so many seconds")
    options.add_argument("--model", default="smollm2-135m", help="a name, folder, .gguf file or hub id")
    options.add_argument("--drafter", default="auto", help="the same kinds; auto: the one made for the model")
    options.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    options.add_argument("--dtype", default="float32")
    options.add_argument("--stages", action="store_true", help="stage times of one prompt, from a pass of their own")
    args = options.parse_args()
    started = time.monotonic()
    contexts, temperatures = args.contexts.split(","), [float(value) for value in args.temperatures.split(",")]
    assert set(contexts) <= set(TREE_CONTEXTS), f"contexts are {TREE_CONTEXTS}"
    top_k = args.top_k or Speculation().settled(args.device.partition(":")[0]).tree_top_k
    ways = variants([int(value) for value in args.budgets.split(",")], contexts, args.chain, top_k)
    ways |= {"ar": Speculation("ar")} if args.ar else {}
    pair = {"model": args.model, "drafter": args.drafter, "dtype": args.dtype, "device": args.device}
    engine = Engine.load(EngineConfig(**pair, prefix_caching=False, max_model_len=2048))
    prompts = chosen(args.per_category, args.held_out)
    if args.device != "cpu":
        measure(engine, prompts[:1], ways, temperatures[:1], 16)
    ready = time.monotonic()
    deadline = started + args.limit_s
    found, failed = measure(engine, prompts, ways, temperatures, args.max_tokens, args.turns, deadline)
    report = machine() | {
        "max_tokens": args.max_tokens,
        "device": args.device,
        "dtype": args.dtype,
        "top_k": top_k,
        "seconds": {"until ready": round(ready - started, 1), "answers": round(time.monotonic() - ready, 1)},
        "answers_of_each": sum(len(tally.answers) for tally in next(iter(found.values())).values()),
        "failed": failed,
        "temperatures": {f"{t:g}": summary(found, t, prompts) for t in temperatures},
    }
    if args.stages and not failed:
        report["stages_ms_a_round"] = build_time(engine, prompts[0], ways, args.max_tokens)
    finish(report, args.output)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
