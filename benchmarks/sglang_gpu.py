"""The plug-in inside SGLang on a GPU: tokens, acceptance and speed of its modes against plain decoding and DFLASH.

python benchmarks/sglang_gpu.py --target DIR --drafter DIR --out FILE.json --smoke   first: does everything start?
python benchmarks/sglang_gpu.py --target DIR --drafter DIR --out FILE.json --limit-s 420 --prompts 12 --timed 8 \
    --only plain,dflash,linear,shadow31,tree15,tree31          one step and tokens per second, in seven minutes
python benchmarks/sglang_gpu.py --target DIR --drafter DIR --out FILE.json --turns 0 \
    --only plain,shadow31,tree31 --checks context,radix,retract,above-graph,regex,json,penalties,sampled

Servers run side by side and are measured one at a time, in turns of all loads, so that a busy moment meets all; idle
ones sleep, but still share the host. What is written when the time is over has as many turns of every load, to one. A
name is plain, dflash, linear, shadow or tree, a budget, and modifiers: tree31@flashinfer, tree31@metrics (stage
seconds), tree31@tp2, @eager, @nooverlap, @bfloat16, @graph4, @notails, @nopairwise. A server that dies is told at once
with the end of its log, and the others go on; logs are kept in the folder FILE-logs, results are written as they come.
What follows -- goes to every server, and wins. Tokens are judged by float32 regret: how far each is below the argmax
of the target in float32 (transformers). Needs SGLang as in docs/sglang.md; ddtree may be on PYTHONPATH alone.
"""

import argparse
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import sglang_checks as checks
import sglang_judge as judge
from common import machine
from ddtree.bench.suite import load_prompts
from sglang_servers import MODES, Ended, Server, Settings, each, end_in_order, parts
from sglang_start import bring_up

ONLY = "plain,dflash,linear,shadow31,tree31"
SMOKE = (3, 32)  # prompts and tokens


class Run:
    """One run: its options, its prompts, and the report that is written after every step."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.began, self.load = options, time.monotonic(), os.getloadavg()[0]
        self.folder = options.out.with_name(f"{options.out.stem}-logs")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.settings = Settings(
            options.target,
            options.drafter,
            self.folder,
            _words(options),
            options.tp,
            options.gpus.split(",") if options.gpus else (),
            end=self.began + options.limit_s - (options.judge_s if options.judge and not options.smoke else 0),
        )
        self.prompts = _prompts(options.target, SMOKE[0] if options.smoke else options.prompts, options.more)
        self.report: dict[str, Any] = machine() | {"prompts": len(self.prompts), "servers": {}}

    def note(self, name: str, **found: Any) -> None:
        """Add to a server's part of the report, and write it."""
        self.report["servers"].setdefault(name, {}).update(found)
        self.write()

    def over(self) -> bool:
        """Whether the time for everything is over; said where it is."""
        late = time.monotonic() > self.began + self.options.limit_s
        if late:
            self.say(f"the time is over (--limit-s {self.options.limit_s}): the rest is left out")
        return late

    def write(self) -> None:
        """The report as it stands."""
        self.report["load"] = [self.load, os.getloadavg()[0]]  # processes that wanted a core, at the start and now
        self.report["seconds"] = round(time.monotonic() - self.began, 1)
        self.options.out.write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")

    def say(self, *words: Any) -> None:
        """A line of progress."""
        print(f"[{time.monotonic() - self.began:6.1f}]", *words, flush=True)

    def start(self, names: Sequence[str]) -> list[Server]:
        """Servers, those that came up and those that did not; all are in the report."""
        servers = bring_up(names, self.settings, self.options.start_s, self.options.flashinfer_start_s)
        for server in servers:
            self.note(server.name, up_s=server.up_s, problem=server.problem)
        return servers


def answers(run: Run, server: Server, tokens: int) -> list[list[int]]:
    """Every prompt alone, greedy; into the report with rounds and acceptance."""
    found = [server.generate(ids, tokens) for ids in run.prompts]
    meta = [answer["meta_info"] for answer in found]
    ids = [list(answer["output_ids"]) for answer in found]
    lengths = [judge.acceptance(one) for one in meta]
    rounds = [one.get("spec_verify_ct") for one in meta]
    told: dict[str, Any] = {"ids": ids, "rounds": rounds, "acceptance": lengths, "pairwise": server.pairwise()}
    if all(rounds):
        told["tokens_a_round"] = round(sum(map(len, ids)) / sum(rounds), 4)
        told["acceptance_length"] = round(1 + sum(m["spec_num_correct_drafts"] for m in meta) / sum(rounds), 4)
    if any("spec_cap_length" in one for one in meta):
        told["shadow_tree_length"] = [round(one.get("spec_cap_length", 0), 4) for one in meta]
    run.note(server.name, **told)
    run.say(server.name, "answered", told.get("acceptance_length", ""))
    return ids


def measure(run: Run, level: int, timed: int, rates: dict[str, dict[str, list[float]]], server: Server) -> None:
    """One turn of one server: tokens per second, and at one request the milliseconds of a round."""
    tokens = run.options.max_tokens
    prompts = [*run.prompts] * (1 + 2 * level // len(run.prompts))
    prompts = prompts[:timed] if level == 1 else prompts[: 2 * level]
    first = [server.generate(ids, 1)["seconds"] for ids in prompts] if level == 1 else []
    began = time.perf_counter()
    with ThreadPoolExecutor(level) as pool:
        found = list(pool.map(lambda ids: server.generate(ids, tokens), prompts))
    seconds = time.perf_counter() - began
    mine = rates.setdefault(server.name, {})
    mine.setdefault(str(level), []).append(sum(len(a["output_ids"]) for a in found) / seconds)
    if level == 1:
        rounds = [answer["meta_info"].get("spec_verify_ct") or tokens - 1 for answer in found]
        mine.setdefault("step_ms", []).append(judge.step_ms([a["seconds"] for a in found], first, rounds))
        mine.setdefault("first_ms", []).append(1000 * sum(first) / len(first))


def turns(run: Run, servers: Sequence[Server]) -> None:
    """All turns, each of all loads; the one before the first is not counted, since kernels are compiled in it."""
    rates: dict[str, dict[str, list[float]]] = {}
    for turn in range(-1, run.options.turns):
        for level in map(int, run.options.requests.split(",")):
            at = turn % max(len(servers), 1)
            order, timed = [*servers[at:], *servers[:at]], run.options.timed if turn >= 0 else 2
            try:
                each(order, partial(measure, run, level, timed, {} if turn < 0 else rates))
            finally:
                tell(run, rates)
        steps = {name: [f"{x:.3f}" for x in mine.get("step_ms", [])][-5:] for name, mine in rates.items()}
        run.say("turn", turn, steps)


def tell(run: Run, rates: dict[str, dict[str, list[float]]]) -> None:
    """Medians, intervals and paired ratios of the turns so far, into the report."""
    for name, mine in rates.items():
        told: dict[str, Any] = {key: judge.interval(values) for key, values in mine.items()}
        told["turns"] = {key: len(values) for key, values in mine.items()}
        for base in ("plain", "dflash", "linear"):
            if base in rates and base != name:
                told[f"over_{base}"] = judge.ratios(mine, rates[base])
        other = name.partition("@")[0]
        if other != name and other in rates:
            told["over_unmodified"] = judge.ratios(mine, rates[other])
        run.note(name, rates=told)


def stages(run: Run, servers: Sequence[Server]) -> None:
    """Mean milliseconds of the stages, of servers with metrics."""
    for server in servers:
        if "@metrics" in server.name and server.problem is None:
            lines = [line for line in server.metrics().splitlines() if line.startswith("ddtree_")]
            told = re.findall(r'stage_seconds_total\{[^}]*stage="(\w+)"[^}]*\} (\S+)', "\n".join(lines))
            seconds = {stage: float(value) for stage, value in told}
            rounds = run.report["servers"][server.name].get("rounds") or []
            run.note(server.name, stage_seconds=seconds, counters=lines, rounds_alone=sum(filter(None, rounds)))
            run.say(server.name, "stage seconds", {k: round(v, 3) for k, v in seconds.items()})


def check(run: Run, servers: Sequence[Server], names: Sequence[str], found: dict[str, list[list[int]]]) -> None:
    """The named checks of every server; plain first, since others are compared with it."""
    plain: dict[str, Any] = {}
    for server in sorted(servers, key=lambda server: server.mode != "plain"):
        alone = found.get(server.name) or found.get(server.name.split("@")[0]) or next(iter(found.values()), [])
        asked = checks.Asked(run.prompts, alone, run.options.context, run.prompts[0], plain)
        told: dict[str, Any] = {}
        own = [name for name, extra in checks.OWN.items() if server.name.endswith(extra)]
        for name in own or [name for name in names if name in checks.CHECKS]:
            if server.problem is not None:
                break
            action = checks.together if own else checks.CHECKS[name]
            try:
                told[name] = action(server, asked)
            except (OSError, RuntimeError, ValueError, KeyError) as error:
                told[name] = {"ok": False, "problem": f"{type(error).__name__}: {error}"}
                if server.problem is None and not server.healthy():
                    server.fail(f"check {name}: {error}")
            if server.mode == "plain":
                plain[name] = told[name]
            short = {k: v for k, v in told[name].items() if k not in ("judged", "drawn", "said")}
            run.say(server.name, name, "ok" if told[name]["ok"] else "NOT OK", short)
            run.note(server.name, checks=told, problem=server.problem)


def conclude(run: Run) -> None:
    """What needs no server: equal tokens, float32 regret, our engine on the same prompts."""
    servers = run.report["servers"]
    with_ids = {name: found for name, found in servers.items() if "ids" in found}
    for name, found in with_ids.items():
        for base in ("plain", "dflash"):
            if base in with_ids and base != name:
                same = sum(a == b for a, b in zip(found["ids"], with_ids[base]["ids"], strict=True))
                run.note(name, **{f"same_ids_as_{base}": same})
    judged = {name: list(zip(run.prompts, found["ids"], strict=True)) for name, found in with_ids.items()}
    for name, found in servers.items():
        for check_name, result in found.get("checks", {}).items():
            if "judged" in result:
                judged[f"{name}: {check_name}"] = [(p, a) for p, a in result.pop("judged")]
    run.report["float32_regret"] = {}
    for name, regret in judge.regrets(run.options.target, judged, "cuda" if torch.cuda.is_available() else "cpu"):
        run.report["float32_regret"][name] = regret
        run.write()
        run.say("regret", name, regret)
        if run.over():
            return
    if run.options.engine:
        beside_ours(run, with_ids)


def beside_ours(run: Run, servers: dict[str, Any]) -> None:
    """Acceptance in our own engine; what goes wrong there is told, and costs no other result."""
    wanted = (run.options.target, run.options.drafter, run.options.dtype)
    found = run.report["engine"] = {}
    try:
        for pairwise in ("off", "on"):
            named = _of_ours(servers, pairwise)
            for name, own in judge.ours(*wanted, pairwise, named, run.prompts, run.options.max_tokens):
                found[name] = judge.beside_ours(servers[name], own)
                run.say("our engine", name, found[name])
                run.write()
                if run.over():
                    return
    except Exception as error:
        traceback.print_exc()
        found["problem"] = f"{type(error).__name__}: {error}"


def _of_ours(servers: dict[str, Any], pairwise: str) -> dict[str, tuple[str, int]]:
    """Servers whose rounds our engine has too, with its mode and budget, where its pairwise head is to be on or off.

    With a head our chains go by it as well; a server's never do.
    """
    found = {}
    for name, told in servers.items():
        mode, budget, extras = parts(name)
        has = told.get("pairwise") if mode == "tree" else "off"
        if mode in MODES and {*extras} <= {"nopairwise"} and has == pairwise:
            found[name] = MODES[mode], budget or 31
    return found


def smoke(run: Run, servers: Sequence[Server]) -> None:
    """A line for each server."""
    found = each(servers, lambda server: answers(run, server, SMOKE[1]))
    plain = found.get("plain") or next(iter(found.values()), [])
    for server in servers:
        run.note(server.name, problem=server.problem)
        if server.problem is not None:
            run.say(f"{server.name}: DIED, {server.problem}, log {server.log}")
            continue
        same = sum(a == b for a, b in zip(found[server.name], plain, strict=True))
        length = run.report["servers"][server.name].get("acceptance_length")
        run.say(f"{server.name}: ok, up {server.up_s} s, acceptance {length}, as plain {same} of {len(plain)}")


def full(run: Run, servers: list[Server]) -> None:
    """Everything but the smoke test."""
    names = [name for name in run.options.checks.split(",") if name]
    unknown = {*names} - {*checks.CHECKS, *checks.OWN}
    if unknown:
        raise SystemExit(f"--checks {', '.join(unknown)}: choose from {', '.join([*checks.CHECKS, *checks.OWN])}")
    own = [server for server in servers if any(server.name.endswith(extra) for extra in checks.OWN.values())]
    usual = [server for server in servers if server not in own]
    found = each(usual, lambda server: answers(run, server, run.options.max_tokens))
    if run.options.turns:
        turns(run, usual)
    stages(run, usual)
    check(run, servers, names, found)


def stop(servers: Sequence[Server]) -> None:
    """End all of them."""
    for server in servers:
        server.stop()


def main() -> None:
    """See the top of the file."""
    end_in_order()
    run = Run(_options())
    names = run.options.only.split(",")
    for name in run.options.checks.split(","):
        if name in checks.OWN and not run.options.smoke:
            names += [f"{mode}{checks.OWN[name]}" for mode in ("plain", run.options.checked)]
    servers: list[Server] = []
    try:
        servers = run.start(names)
        (smoke if run.options.smoke else full)(run, servers)
    except Ended:
        run.say(f"the servers' time is over (--limit-s {run.options.limit_s} less --judge-s)")
    finally:
        for server in servers:
            run.note(server.name, problem=server.problem)
        stop(servers)
    if not run.options.smoke and run.options.judge:
        conclude(run)
    run.write()
    run.say("written to", run.options.out)
    sys.exit(any(found["problem"] for found in run.report["servers"].values()))


def _words(options: argparse.Namespace) -> list[str]:
    words = ["--context-length", str(options.context), "--mem-fraction-static", str(options.memory)]
    words += ["--max-total-tokens", str(options.tokens), "--max-running-requests", "48"]
    words += ["--cuda-graph-max-bs-decode", "32", "--cuda-graph-backend-prefill", "disabled", "--sleep-on-idle"]
    words += ["--sampling-backend", "pytorch", "--dtype", options.dtype, "--attention-backend", options.attention]
    return [*words, *options.passed]


def _prompts(target: str, count: int, more: str | None) -> list[list[int]]:
    """The first `count` of the suite's prompts and those of the file `more`; a conversation's first turn counts."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    texts = [prompt.prompt for prompt in load_prompts()]
    if more:
        lines = map(json.loads, Path(more).read_text(encoding="utf-8").splitlines())
        texts += [line["turns"][0] if "turns" in line else line["prompt"] for line in lines]
    if count > len(texts):
        sys.exit(f"--prompts {count}: the suite and --more have {len(texts)}")
    found = []
    for text in texts[:count]:
        chat = [{"role": "user", "content": text}]
        if tokenizer.chat_template is None:
            found.append(list(tokenizer(text)["input_ids"]))
        else:
            found.append(list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)))
    return found


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--target", required=True)
    made.add_argument("--drafter", required=True)
    made.add_argument("--out", type=Path, required=True, help="the JSON that is written")
    made.add_argument("--only", default=ONLY, help=f"servers, default {ONLY}")
    made.add_argument("--smoke", action="store_true", help="only start them and ask three prompts for 32 tokens")
    made.add_argument("--checks", default="", help=", ".join([*checks.CHECKS, *checks.OWN]))
    made.add_argument("--checked", default="tree31", help="whose servers retract and above-graph start")
    made.add_argument("--attention", default="triton", choices=("triton", "flashinfer"))
    made.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    made.add_argument("--tp", type=int, default=1)
    made.add_argument("--gpus", default="", help="indices, which the servers take in turn")
    made.add_argument("--requests", default="1,8,32", help="requests at once")
    made.add_argument("--prompts", type=int, default=28, help="of the suite and then of --more, answered and judged")
    made.add_argument("--more", help="a JSONL with `prompt` or `turns` in each line, for more prompts")
    made.add_argument("--timed", type=int, default=10, help="of them in a turn at one request")
    made.add_argument("--turns", type=int, default=5, help="0: no times")
    made.add_argument("--max-tokens", type=int, default=128)
    made.add_argument("--context", type=int, default=2048)
    made.add_argument(
        "--memory", type=float, default=0.5, help="--mem-fraction-static; neighbours' memory counts in it"
    )
    made.add_argument("--tokens", type=int, default=65536, help="--max-total-tokens of every server")
    made.add_argument("--start-s", type=float, default=240, help="for a server to come up")
    made.add_argument(
        "--flashinfer-start-s", type=float, default=420, help="for one that compiles FlashInfer's kernels"
    )
    made.add_argument("--limit-s", type=float, default=540, help="for everything")
    made.add_argument("--judge-s", type=float, default=45, help="of it, kept for judging without servers")
    made.add_argument("--engine", action="store_true", help="our own engine on the same prompts too: acceptance")
    made.add_argument("--no-judge", dest="judge", action="store_false", help="no float32 regret, no engine")
    made.add_argument("passed", nargs="*", help="after --: options for every server")
    return made.parse_args()


if __name__ == "__main__":
    main()
