"""The plug-in inside SGLang on a GPU: tokens, acceptance and speed of its modes against plain decoding and DFLASH.

python benchmarks/sglang_gpu.py --target DIR --drafter DIR --out FILE.json --smoke   first: does everything start?
python benchmarks/sglang_gpu.py --target DIR --drafter DIR --out FILE.json --limit-s 420 --prompts 12 --timed 8 \
    --only plain,dflash,linear,shadow31,tree15,tree31          one step and tokens per second, in seven minutes
python benchmarks/sglang_gpu.py --target DIR --drafter DIR --out FILE.json --turns 0 \
    --only plain,shadow31,tree31 --checks context,radix,retract,above-graph,regex,json,penalties,sampled

Servers run side by side and are measured one at a time, in turns of all loads, so that a busy moment meets all; idle
ones sleep, but still share the host. What is written when the time is over has as many turns of every load, to one. A
name is plain, dflash, linear, shadow or tree, a budget, and modifiers: tree31@flashinfer, tree31@metrics (stage
seconds), tree31@tp2, @eager, @nooverlap, @bfloat16, @graph4, @notails, @nopairwise, @deterministic. A server that dies
is told at once with the end of its log, and the others go on; logs are kept in the folder FILE-logs, results are
written as they come.
What follows -- goes to every server, and wins. Tokens are judged by float32 regret: how far each is below the argmax
of the target in float32 (transformers). Needs SGLang as in docs/sglang.md; ddtree may be on PYTHONPATH alone.
"""

import argparse
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import sglang_checks as checks
import sglang_judge as judge
from sglang_loads import answers, company, stages, turns
from sglang_run import SMOKE, Run
from sglang_servers import MODES, Ended, Server, each, end_in_order, parts

ONLY = "plain,dflash,linear,shadow31,tree31"


def check(run: Run, servers: Sequence[Server], names: Sequence[str], answered: dict[str, list[list[int]]]) -> None:
    """The named checks of every server; plain first, since others are compared with it."""
    plain: dict[str, Any] = {}
    for server in sorted(servers, key=lambda server: server.mode != "plain"):
        usual = answered.get(server.name) or answered.get(server.name.split("@")[0])
        alone = usual or next(iter(answered.values()), [])
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
            left = {"drawn"} if run.options.judge else {"drawn", "judged"}
            kept = {name: {k: v for k, v in found.items() if k not in left} for name, found in told.items()}
            run.note(server.name, checks=kept, problem=server.problem)


def conclude(run: Run) -> None:
    """What needs no server: equal tokens, float32 regret, our engine on the same prompts."""
    servers = run.report["servers"]
    with_ids = {name: found for name, found in servers.items() if "ids" in found}
    for name, found in with_ids.items():
        for base in ("plain", "dflash"):  # of the same type or backend, where there is one
            other = next((one for one in (base + name[len(name.partition("@")[0]) :], base) if one in with_ids), name)
            if other != name:
                same = sum(a == b for a, b in zip(found["ids"], with_ids[other]["ids"], strict=True))
                run.note(name, **{f"same_ids_as_{base}": same})
    judged = {name: list(zip(run.prompts, found["ids"], strict=True)) for name, found in with_ids.items()}
    for name, found in with_ids.items():
        for level, told in found.get("company", {}).items():
            judged[f"{name}: {level} at once"] = list(zip(run.prompts, told.pop("ids"), strict=True))
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
    for level in filter(None, run.options.company.split(",")):
        each(usual, partial(company, run, int(level)))
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
    made.add_argument("--company", default="", help="requests at once in which every prompt is answered again, as 8,32")
    made.add_argument("--engine", action="store_true", help="our own engine on the same prompts too: acceptance")
    made.add_argument("--no-judge", dest="judge", action="store_false", help="no float32 regret, no engine")
    made.add_argument("passed", nargs="*", help="after --: options for every server")
    return made.parse_args()


if __name__ == "__main__":
    main()
