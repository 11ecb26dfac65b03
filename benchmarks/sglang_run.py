"""One run of servers: its options, its prompts, its report."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from common import machine
from ddtree.bench.suite import load_prompts
from sglang_servers import Server, Settings
from sglang_start import bring_up

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
