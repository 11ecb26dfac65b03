"""Losslessness on the embedded model: float32 token for token, bfloat16 by float32 regret.

    python benchmarks/parity.py --output benchmarks/results/parity.json

float32: greedy and at temperature 0.8, every mode alone and in batches of 4 against plain decoding. bfloat16: greedy
answers of every mode, and the float32 regret of each of their tokens (the float32 maximum minus the float32 logit of
the token chosen), whose worst must be within 1.5 times of plain decoding's own worst.
"""

import sys
from dataclasses import replace

from common import finish, machine, parser
from ddtree.bench.parity import answers, compare_modes, regrets
from ddtree.bench.suite import load_prompts
from ddtree.config import MODES, EngineConfig, SamplingParams, Speculation
from ddtree.engine import Engine

SPECULATIONS = [Speculation(mode=mode) for mode in MODES]


def tokens_of(engine: Engine, count: int) -> list[list[int]]:
    """The first prompts of the suite, as chats."""
    return [engine.text.chat([{"role": "user", "content": p.prompt}]) for p in load_prompts()[:count]]


def half_precision(full: Engine, prompts: list[list[int]], params: SamplingParams) -> dict[str, object]:
    """Regret of every bfloat16 token by mode, against float32."""
    half = Engine.load(EngineConfig(dtype="bfloat16", device="cpu"))
    plain = answers(half, prompts, params, Speculation(mode="ar"), 1)
    report: dict[str, object] = {}
    for speculation in SPECULATIONS:
        found = answers(half, prompts, params, speculation, 1)
        lists = [regrets(full, p, g.token_ids) for p, g in zip(prompts, found, strict=True)]
        every = [r for regret in lists for r in regret]
        report[speculation.mode] = {
            "tokens": len(every),
            "equal_to_ar": sum(a.token_ids == b.token_ids for a, b in zip(plain, found, strict=True)),
            "not_the_float32_argmax": sum(r > 0 for r in every),
            "worst_regret": max(every),
            "mean_regret": sum(every) / len(every),
            "regrets": [[round(r, 4) for r in regret] for regret in lists],
        }
        print(speculation.mode, {k: v for k, v in report[speculation.mode].items() if k != "regrets"}, file=sys.stderr)
    return report


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--prompts", type=int, default=20)
    options.add_argument("--max-tokens", type=int, default=128)
    args = options.parse_args()
    full = Engine.load(EngineConfig(dtype="float32", device="cpu"))
    prompts = tokens_of(full, args.prompts)
    greedy = SamplingParams(max_tokens=args.max_tokens, seed=1)
    report = {"prompts": len(prompts), "max_tokens": args.max_tokens, "float32": {}, **machine()}
    for name, params in (("greedy", greedy), ("temperature_0.8", replace(greedy, temperature=0.8))):
        compared = compare_modes(full, prompts, params, SPECULATIONS)
        del compared["answers"]
        report["float32"][name] = compared
        for run in compared["runs"]:
            print(name, run, file=sys.stderr)
    report["bfloat16"] = half_precision(full, prompts, greedy)
    worst = {mode: values["worst_regret"] for mode, values in report["bfloat16"].items()}
    report["worst_regret_over_ar"] = {mode: worst[mode] / worst["ar"] for mode in MODES}
    finish(report, args.output)
    equal = all(run["equal"] == len(prompts) for part in report["float32"].values() for run in part["runs"])
    sys.exit(0 if equal and max(report["worst_regret_over_ar"].values()) <= 1.5 else 1)


if __name__ == "__main__":
    main()
