"""SGLang's plain decoding, its DFLASH and the plug-in's modes: tokens, acceptance and speed, in one run.

python benchmarks/sglang_modes.py --target DIR --drafter DIR --output results.json \
    -- --dtype float16 --mem-fraction-static 0.1 --max-total-tokens 65536 --cuda-graph-max-bs-decode 32

Needs the environment of docs/sglang.md. All servers run side by side and are measured one at a time, in turns, so that
a busy moment meets all of them; idle servers still share the host. What follows -- goes to every server. With --regret,
transformers computes the target in float32, and each token's distance to its best one is told.
"""

import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import finish, machine, parser
from ddtree.bench.suite import load_prompts

START_S, ANSWER_S = 900, 900


@dataclass
class Server:
    """One server and what was seen of it."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    answers: list[dict[str, Any]] = field(default_factory=list)  # one for each prompt, alone
    rates: dict[int, list[float]] = field(default_factory=dict)  # level -> tokens per second, by turn
    steps: list[float] = field(default_factory=list)  # ms of a round at level 1, by turn

    def generate(self, ids: list[int], tokens: int) -> dict[str, Any]:
        """Greedy, and exactly `tokens` of them."""
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": params}
        answer = httpx.post(f"http://127.0.0.1:{self.port}/generate", json=body, timeout=ANSWER_S)
        answer.raise_for_status()
        return dict(answer.json())

    def measure(self, prompts: list[list[int]], level: int, tokens: int) -> None:
        """One turn: every prompt once, `level` at a time."""
        started = time.perf_counter()
        with ThreadPoolExecutor(level) as pool:
            answers = list(pool.map(lambda ids: self.generate(ids, tokens), prompts))
        seconds = time.perf_counter() - started
        self.rates.setdefault(level, []).append(tokens * len(prompts) / seconds)
        if level == 1:
            rounds = sum(answer["meta_info"].get("spec_verify_ct") or tokens for answer in answers)
            self.steps.append(1000 * seconds / rounds)


def arguments(name: str, drafter: str, block: int | None) -> list[str]:
    """A server's own: plain, dflash, linear, shadow-linear@31 or tree@31."""
    if name == "plain":
        return []
    words = ["--speculative-draft-model-path", drafter]
    words += [] if block is None else ["--speculative-num-draft-tokens", str(block)]
    if name == "dflash":
        return [*words, "--speculative-algorithm", "DFLASH"]
    mode, _, budget = name.partition("@")
    words += ["--speculative-algorithm", "DDTREE", "--speculative-ddtree-mode", mode]
    return [*words, *(["--speculative-ddtree-budget", budget] if budget else [])]


def start(name: str, target: str, words: list[str], folder: Path) -> Server:
    """Begin to start a server; its log is NAME.log."""
    while True:  # below the range from which the system gives ports to SGLang's own sockets
        port = random.randrange(20000, 30000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                break
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", target, "--port", str(port)]
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen([*command, *words], stdout=log, stderr=log, start_new_session=True)
    return Server(name, port, process)


def wait(server: Server, folder: Path) -> None:
    """Until it answers. Raises SystemExit with the end of its log where it does not."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and server.process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{server.port}/health", timeout=5).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise SystemExit(f"{server.name} did not start:\n{(folder / f'{server.name}.log').read_text()[-4000:]}")


def regrets(target: str, prompts: list[list[int]], servers: list[Server]) -> dict[str, dict[str, Any]]:
    """By server: the largest distance of a token to the float32 argmax, in logits, and how many prompts have one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).to(device).eval()
    told = {}
    for server in servers:
        worst = []
        for ids, answer in zip(prompts, server.answers, strict=True):
            said = answer["output_ids"]
            with torch.inference_mode():
                logits = model(torch.tensor([ids + said], device=device)).logits[0, len(ids) - 1 : -1].float()
            chosen = logits.gather(1, torch.tensor(said, device=device).unsqueeze(1)).squeeze(1)
            worst.append(float((logits.amax(-1) - chosen).max()))
        told[server.name] = {"largest": max(worst), "prompts_off_argmax": sum(value > 0 for value in worst)}
    return told


def interval(values: list[float]) -> list[float]:
    """Median, and the 95% interval of medians of resampled turns."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return [round(x, 4) for x in (statistics.median(values), medians[50], medians[-51])]


def figures(server: Server, servers: list[Server]) -> dict[str, Any]:
    """One server's part of the report. Ratios are paired by turn."""
    by_name = {other.name: other for other in servers}
    meta = [answer["meta_info"] for answer in server.answers]
    rounds = [(m["spec_num_correct_drafts"], m["spec_verify_ct"]) for m in meta if m.get("spec_verify_ct")]
    found: dict[str, Any] = {  # tokens a round; SGLang's own spec_accept_length counts the prompt's first token too
        "acceptance_length": [round(1 + drafts / count, 3) for drafts, count in rounds],
        "shadow_tree_length": [round(m["spec_cap_length"], 3) for m in meta if "spec_cap_length" in m],
        "tok_s": {level: interval(rates) for level, rates in server.rates.items()},
        "step_ms": interval(server.steps) if server.steps else None,
    }
    for base in ("plain", "dflash", "linear"):
        if base not in by_name or base == server.name:
            continue
        other = by_name[base]
        same = [a["output_ids"] == b["output_ids"] for a, b in zip(server.answers, other.answers, strict=True)]
        found[f"same_ids_as_{base}"] = sum(same)
        found[f"tok_s_over_{base}"] = {
            level: interval([a / b for a, b in zip(rates, other.rates[level], strict=True)])
            for level, rates in server.rates.items()
        }
        if server.steps and other.steps:
            found[f"step_over_{base}"] = interval([a / b for a, b in zip(server.steps, other.steps, strict=True)])
    return found


def main() -> None:
    """See the top of the file."""
    made = parser(__doc__)
    made.add_argument("--target", required=True)
    made.add_argument("--drafter", required=True)
    made.add_argument("--servers", default="plain,dflash,linear,shadow-linear@31,tree@15,tree@31")
    made.add_argument("--block", type=int, help="the drafter's block; default: as its configuration says")
    made.add_argument("--limit", type=int, default=40, help="prompts of the suite")
    made.add_argument("--max-tokens", type=int, default=128)
    made.add_argument("--levels", default="1,8,32", help="requests at once")
    made.add_argument("--turns", type=int, default=5)
    made.add_argument("--regret", action="store_true")
    made.add_argument("passed", nargs="*", help="after --: options for every server")
    options = made.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    prompts = []
    for prompt in load_prompts(options.limit):
        chat = [{"role": "user", "content": prompt.prompt}]
        if tokenizer.chat_template is None:
            prompts.append(list(tokenizer(prompt.prompt)["input_ids"]))
        else:
            prompts.append(list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)))
    levels = [int(level) for level in options.levels.split(",")]
    names = options.servers.split(",")
    servers: list[Server] = []
    with tempfile.TemporaryDirectory() as logs:
        folder = Path(logs)
        try:
            for name in names:
                words = [*arguments(name, options.drafter, options.block), *options.passed]
                servers.append(start(name, options.target, words, folder))
            for server in servers:
                wait(server, folder)
            for server in servers:  # also what compiles and warms up
                server.answers = [server.generate(ids, options.max_tokens) for ids in prompts]
            for turn in range(options.turns):
                for level in levels:
                    order = servers[turn % len(servers) :] + servers[: turn % len(servers)]
                    for server in order:
                        server.measure(prompts, level, options.max_tokens)
        finally:
            for server in servers:
                os.killpg(server.process.pid, signal.SIGKILL)
    report = machine() | {"prompts": len(prompts), "max_tokens": options.max_tokens, "passed": options.passed}
    report["servers"] = {server.name: figures(server, servers) for server in servers}
    if options.regret:
        report["float32_regret"] = regrets(options.target, prompts, servers)
    finish(report, options.output)


if __name__ == "__main__":
    main()
