"""What the benchmark scripts of the server share: a server of their own, and requests whose streams are timed."""

import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

READY = re.compile(r"ddtree ready: (http://\S+)/v1")
TIMEOUT = 600.0


@contextmanager
def served(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`ddtree serve` on a free port with these options: its address and its process, stopped at the end."""
    command = [str(Path(sys.executable).with_name("ddtree")), "serve", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            for line in server.stdout:
                if found := READY.search(line):
                    break
            else:
                raise SystemExit(f"the server ended with {server.wait()} before it was ready")
            yield found[1], server
        finally:
            server.terminate()


@dataclass
class Streamed:
    """One streamed answer, with the moments at which its pieces came (seconds of time.perf_counter)."""

    status: int
    started: float
    text: str = ""
    times: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    ddtree: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None

    @property
    def first(self) -> float:
        """Seconds until the first piece."""
        return self.times[0] - self.started

    @property
    def seconds(self) -> float:
        """Seconds until the last piece."""
        return self.times[-1] - self.started


async def stream_chat(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Streamed:
    """Send a chat and read its stream to the end."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    answer = Streamed(0, time.perf_counter())
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT) as response:
        answer.status = response.status_code
        if response.status_code != httpx.codes.OK:
            answer.error = json.loads(await response.aread())
            return answer
        async for event in _events(response):
            _read(event, answer)
    return answer


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _read(event: dict[str, Any], answer: Streamed) -> None:
    answer.error = event.get("error", answer.error)
    answer.usage = event.get("usage") or answer.usage
    answer.ddtree = event.get("ddtree") or answer.ddtree
    for choice in event.get("choices", []):
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        if piece := choice["delta"].get("content"):
            answer.text += piece
            answer.times.append(time.perf_counter())


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the sorted values lie."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
