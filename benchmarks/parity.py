"""Losslessness on the embedded model: float32 token for token, bfloat16 by float32 regret.

    python benchmarks/parity.py --output benchmarks/results/parity.json

float32: greedy and at temperature 0.8, every mode alone and in batches of 4 against plain decoding, and greedy plain
decoding against transformers' own generation. bfloat16: greedy
answers of every mode, and the float32 regret of each of their tokens (the float32 maximum minus the float32 logit of
the token chosen), whose worst must be within 1.5 times of plain decoding's own worst.
"""

import sys
from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from common import finish, machine, parser
from ddtree.bench.parity import answers, compare_modes, first_difference, regrets
from ddtree.bench.suite import load_prompts
from ddtree.config import EMBEDDED, MODES, EngineConfig, SamplingParams, Speculation
from ddtree.engine import Engine
from ddtree.models import resolve_model

LIMIT = 1.5  # worst regret over plain decoding's own
SPECULATIONS = [Speculation(mode=mode) for mode in MODES]


def tokens_of(engine: Engine, count: int) -> list[list[int]]:
    """The first prompts of the suite, as chats."""
    return [engine.text.chat([{"role": "user", "content": p.prompt}]) for p in load_prompts()[:count]]


def against_transformers(prompts: list[list[int]], found: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Greedy answers of transformers in float32, compared with ours."""
    oracle = AutoModelForCausalLM.from_pretrained(resolve_model(EMBEDDED), dtype=torch.float32)
    differing = []
    for index, (ids, answer) in enumerate(zip(prompts, found, strict=True)):
        out = oracle.generate(torch.tensor([ids]), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
        if out[0, len(ids) :].tolist() != answer:
            differing.append({"prompt": index, "place": first_difference(out[0, len(ids) :].tolist(), answer)})
    report = {"version": transformers.__version__, "equal": len(prompts) - len(differing), "differences": differing}
    print("transformers", report, file=sys.stderr)
    return report


def half_precision(full: Engine, prompts: list[list[int]], params: SamplingParams) -> dict[str, Any]:
    """Regret of every bfloat16 token by mode, against float32."""
    half = Engine.load(EngineConfig(dtype="bfloat16", device="cpu", prefix_caching=False))
    plain = answers(half, prompts, params, Speculation(mode="ar"), 1)
    report: dict[str, Any] = {}
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
    options.add_argument("--parts", default="greedy,sampled,bfloat16", help="which parts to run, separated by commas")
    args = options.parse_args()
    parts = args.parts.split(",")
    full = Engine.load(EngineConfig(dtype="float32", device="cpu", prefix_caching=False))
    prompts = tokens_of(full, args.prompts)
    greedy = SamplingParams(max_tokens=args.max_tokens, seed=1)
    report: dict[str, Any] = {"prompts": len(prompts), "max_tokens": args.max_tokens, **machine()}
    green = True
    for name, params in (("greedy", greedy), ("sampled", replace(greedy, temperature=0.8))):
        if name in parts:
            report[name] = compare_modes(full, prompts, params, SPECULATIONS, on_run=tell)
            found = report[name].pop("answers")
            report[name]["temperature"] = params.temperature
            green &= all(run["equal"] == len(prompts) for run in report[name]["runs"])
            if name == "greedy":
                report[name]["transformers"] = against_transformers(prompts, found, args.max_tokens)
                green &= report[name]["transformers"]["equal"] == len(prompts)
    if "bfloat16" in parts:
        report["bfloat16"] = half_precision(full, prompts, greedy)
        worst = {mode: values["worst_regret"] for mode, values in report["bfloat16"].items()}
        report["worst_regret_over_ar"] = {mode: round(worst[mode] / worst["ar"], 3) for mode in MODES}
        green &= max(report["worst_regret_over_ar"].values()) <= LIMIT
    finish(report, args.output)
    sys.exit(0 if green else 1)


def tell(run: dict[str, Any]) -> None:
    """A line as a run ends."""
    print(run, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
