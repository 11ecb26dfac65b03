"""A quantised target inside SGLang: the modes' tokens against plain decoding under the same quantisation.

python benchmarks/sglang_quantised.py --target DIR --drafter DIR --out FILE.json [--quantization fp8]

SGLang quantises a checkpoint in half precision as it loads it; what is quantised already needs `--quantization ""`.
Every server answers the same prompts, greedy. The plain server then says of each answer's every token how far it is
below its own best one (in log-probability, so in logits): rounding differs from batch to batch, and in eight bits
near-ties are many, so plain's own answers show what is usual. SGLang loads the drafter in the target's quantisation
too, unless it is told otherwise: the last server is a tree whose drafter is left as it is.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from common import machine
from ddtree.bench.suite import load_prompts
from sglang_judge import acceptance
from sglang_servers import Ended, Server, Settings, each, end_in_order, start
from sglang_start import wait

ONLY = "plain,dflash,linear,shadow31,tree31"
LEFT = "drafter left as it is"
USUAL = 0.1  # logits: what is less is a near-tie


def main() -> None:
    """See the top of the file."""
    end_in_order()
    options = _options()
    folder = options.out.with_name(f"{options.out.stem}-logs")
    report: dict[str, Any] = machine() | {"quantization": options.quantization, "servers": {}}
    servers = _start(options, folder)
    try:
        wait(list(servers.values()), options.start_s, options.start_s)
        prompts = _prompts(options.target, options.prompts)
        for label, server in servers.items():
            found = each([server], lambda one: ask(one, prompts, options.max_tokens))
            report["servers"][label] = found.get(server.name, {}) | {"up_s": server.up_s}
        judge(servers["plain"], prompts, report["servers"])
    except Ended:
        print(f"the time is over (--limit-s {options.limit_s})")
    finally:
        for label, server in servers.items():
            report["servers"].setdefault(label, {})["problem"] = server.problem
            server.stop()
        report["ok"] = verdict(report["servers"])
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for label, found in report["servers"].items():
        print(label, {key: value for key, value in found.items() if key != "ids"})
    print("ok" if report["ok"] else "NOT OK", "written to", options.out)
    sys.exit(not report["ok"])


def ask(server: Server, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Every prompt alone, greedy: the answers, and what rounds accepted."""
    found = [server.generate(ids, tokens) for ids in prompts]
    told: dict[str, Any] = {"ids": [list(answer["output_ids"]) for answer in found]}
    lengths = [acceptance(answer["meta_info"]) for answer in found]
    if all(lengths):
        told["acceptance_length"] = round(sum(length or 0 for length in lengths) / len(lengths), 4)
    return told


def judge(plain: Server, prompts: list[list[int]], servers: dict[str, dict[str, Any]]) -> None:
    """Equal answers and regret, into the report."""
    answered = {label: found["ids"] for label, found in servers.items() if "ids" in found}
    for label, ids in answered.items():
        for base in ("plain", "dflash"):
            if base in answered and base != label:
                servers[label][f"same_as_{base}"] = sum(a == b for a, b in zip(ids, answered[base], strict=True))
        if plain.problem is None:
            every = [value for pair in zip(prompts, ids, strict=True) for value in regret(plain, *pair)]
            servers[label]["tokens"] = len(every)
            servers[label]["off_best"] = sum(value > 0 for value in every)
            servers[label]["largest_regret"] = round(max(every, default=0.0), 5)


def regret(plain: Server, prompt: list[int], answer: list[int]) -> list[float]:
    """How far each token of an answer is below the best one, by the plain server's own prefill."""
    body: dict[str, Any] = {"input_ids": [*prompt, *answer], "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    body |= {"return_logprob": True, "logprob_start_len": len(prompt) - 1, "top_logprobs_num": 1}
    meta = plain.post("/generate", body)["meta_info"]
    chosen, best = (meta[f"input_{name}_logprobs"][-len(answer) :] for name in ("token", "top"))
    if [one[1] for one in chosen] != answer:
        raise RuntimeError("the plain server judged other tokens than it was given")
    return [float(top[0][0] - own[0]) for own, top in zip(chosen, best, strict=True)]


def verdict(servers: dict[str, dict[str, Any]]) -> bool:
    """Whether all answered, and none is further off than twice what plain decoding and DFLASH show."""
    if any(found.get("problem") or "largest_regret" not in found for found in servers.values()):
        return False
    usual = [found["largest_regret"] for label, found in servers.items() if label in ("plain", "dflash")]
    return all(found["largest_regret"] <= max(USUAL, 2 * max(usual)) for found in servers.values())


def _start(options: argparse.Namespace, folder: Path) -> dict[str, Server]:
    words = ["--context-length", "2048", "--mem-fraction-static", str(options.memory), "--max-total-tokens", "16384"]
    words += ["--max-running-requests", "8", "--cuda-graph-max-bs-decode", "4", "--cuda-graph-backend-prefill"]
    words += ["disabled", "--sampling-backend", "pytorch", "--dtype", options.dtype, "--attention-backend", "triton"]
    words += ["--quantization", options.quantization] if options.quantization else []
    end = time.monotonic() + options.limit_s
    own = {"drafter": options.drafter, "end": end}
    names = list(dict.fromkeys(options.only.split(",")))
    (folder / "left").mkdir(parents=True, exist_ok=True)
    servers = start(names, Settings(options.target, folder=folder, words=[*words, *options.passed], **own))
    found = dict(zip(names, servers, strict=True))
    if options.quantization:
        words += ["--speculative-draft-model-quantization", "unquant", *options.passed]
        (last,) = start(names[-1:], Settings(options.target, folder=folder / "left", words=words, **own))
        found[f"{names[-1]}, {LEFT}"] = last
    return found


def _prompts(target: str, count: int) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(target)
    asked = [[{"role": "user", "content": prompt.prompt}] for prompt in load_prompts(count)]
    if tokenizer.chat_template is None:
        return [list(tokenizer(chat[0]["content"])["input_ids"]) for chat in asked]
    return [list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)) for chat in asked]


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--target", required=True)
    made.add_argument("--drafter", required=True)
    made.add_argument("--out", type=Path, required=True, help="the JSON that is written")
    made.add_argument("--quantization", default="fp8", help='SGLang\'s name of it; "": as the checkpoint says')
    made.add_argument("--only", default=ONLY, help=f"servers, plain among them, default {ONLY}")
    made.add_argument("--dtype", default="float16", choices=("float16", "bfloat16", "float32"))
    made.add_argument("--prompts", type=int, default=16)
    made.add_argument("--max-tokens", type=int, default=96)
    made.add_argument("--memory", type=float, default=0.5, help="--mem-fraction-static; neighbours' memory counts")
    made.add_argument("--start-s", type=float, default=240, help="for a server to come up")
    made.add_argument("--limit-s", type=float, default=480, help="for all of it")
    made.add_argument("passed", nargs="*", help="after --: options for every server")
    options = made.parse_args()
    if "plain" not in options.only.split(","):
        made.error("--only: plain must be among the servers, since it judges the others")
    return options


if __name__ == "__main__":
    main()
