"""What a benchmark asks its servers: every prompt alone, every prompt in company, and turns of several loads."""

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import sglang_judge as judge
from sglang_run import Run
from sglang_servers import Server, each


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


def company(run: Run, level: int, server: Server) -> None:
    """Every prompt again, `level` at once: what other rows in a batch do to an answer."""
    with ThreadPoolExecutor(level) as pool:
        found = list(
            pool.map(lambda ids: list(server.generate(ids, run.options.max_tokens)["output_ids"]), run.prompts)
        )
    alone = run.report["servers"][server.name]["ids"]
    told = run.report["servers"][server.name].get("company", {})
    same = sum(a == b for a, b in zip(found, alone, strict=True))
    run.note(server.name, company=told | {str(level): {"ids": found, "same_as_alone": same}})
    run.say(server.name, level, "at once, same as alone", same)


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
