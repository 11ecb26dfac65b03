"""Two embedded replicas behind nginx, changed under load by `ddtree deploy`: not one request may fail.

python benchmarks/deploy_live.py --output benchmarks/results/deploy-live.json

On a CPU machine with nginx: apply; a rollout of linear to tree, a rollback; the same rollout by the shadow, refused
where too much gain is asked for, then promoted; then rollouts of broken drafters (cut off, of another shape, all NaN),
each of which must go back by itself. Clients keep sending meanwhile, whole and streamed; every answer must be the one
that its prompt had first (float32, greedy). Ends with code 1 where a request failed, an answer differed, or a command
did not end as it should. About a quarter of an hour on two cores that others use too.
"""

import argparse
import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file

import ddtree
from common import finish, machine, parser
from ddtree.bench.suite import load_prompts
from ddtree.models import resolve_drafter
from serving import percentile

WORDS = [prompt.prompt for prompt in load_prompts(7)]
TIMEOUT = 120.0


@dataclass
class Phase:
    """One command, and the traffic while it ran."""

    name: str
    command: list[str]
    exit_code: int = -1
    expected: int = 0
    seconds: float = 0.0
    requests: int = 0
    streams: int = 0
    failures: list[str] = field(default_factory=list)  # of requests
    unexpected: str | None = None  # where the command did not end as it should
    differing: int = 0
    modes: list[str] = field(default_factory=list)  # of the replicas, afterwards
    served_by: dict[str, int] = field(default_factory=dict)  # answers by mode
    slowest_s: float = 0.0
    p50_s: float = 0.0
    said: list[str] = field(default_factory=list)  # the command's last lines


class Load:
    """Clients that keep sending; what they saw since `since` was called."""

    def __init__(self, url: str, clients: int, max_tokens: int) -> None:
        self._url, self._clients, self._max_tokens = url, clients, max_tokens
        self._answers: dict[str, str] = {}  # prompt -> the first answer
        self._stop = asyncio.Event()
        self.clear()

    def clear(self) -> None:
        """A new phase begins."""
        self.times: list[float] = []
        self.failures: list[str] = []
        self.modes: Counter[str] = Counter()
        self.streams = self.differing = 0

    async def run(self) -> None:
        """Until `stop`."""
        async with httpx.AsyncClient(timeout=TIMEOUT, trust_env=False) as client:
            await asyncio.gather(*(self._client(client, number) for number in range(self._clients)))

    def stop(self) -> None:
        """Lets the requests under way end."""
        self._stop.set()

    async def _client(self, client: httpx.AsyncClient, number: int) -> None:
        turn = number
        while not self._stop.is_set():
            prompt = WORDS[turn % len(WORDS)]
            streamed = bool((turn + number) % 2)
            began = time.perf_counter()
            try:
                text, mode = await (self._streamed(client, prompt) if streamed else self._whole(client, prompt))
            except (httpx.HTTPError, ValueError, KeyError, AssertionError) as error:
                self.failures.append(f"{'stream' if streamed else 'whole'}: {type(error).__name__} {error}"[:300])
            else:
                self.modes[mode] += 1
                self.streams += streamed
                self.differing += self._answers.setdefault(prompt, text) != text
            self.times.append(time.perf_counter() - began)
            turn += 1

    def _body(self, prompt: str) -> dict[str, Any]:
        return {
            "messages": [{"role": "user", "content": prompt}], "max_tokens": self._max_tokens, "temperature": 0,
        }  # fmt: skip

    async def _whole(self, client: httpx.AsyncClient, prompt: str) -> tuple[str, str]:
        response = await client.post(f"{self._url}/v1/chat/completions", json=self._body(prompt))
        assert response.status_code == httpx.codes.OK, f"{response.status_code} {response.text[:200]}"
        answer = response.json()
        return answer["choices"][0]["message"]["content"], answer["ddtree"]["mode"]

    async def _streamed(self, client: httpx.AsyncClient, prompt: str) -> tuple[str, str]:
        text, mode, last = "", "", ""
        body = self._body(prompt) | {"stream": True}
        async with client.stream("POST", f"{self._url}/v1/chat/completions", json=body) as response:
            assert response.status_code == httpx.codes.OK, f"{response.status_code}"
            async for line in response.aiter_lines():
                last = line or last
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, str(event["error"])
                mode = (event.get("ddtree") or {}).get("mode", mode)
                text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        assert last == "data: [DONE]", f"the stream ended with {last[:100]!r}"
        return text, mode


def free_ports(count: int) -> int:
    """The first of `count` free ports in a row."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            first = int(probe.getsockname()[1])
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
            return first
        except (OSError, OverflowError):
            continue


def specification(folder: Path, port: int) -> Path:
    """The deployment's file: two replicas on the CPU, one thread each, in mode linear."""
    place = Path(ddtree.__file__).parent.parent
    text = f"""\
name = "live"
mode = "linear"
gpus = "none"
cpu_replicas = 2
port = {port}
folder = "{folder / "place"}"
args = ["--dtype", "float32", "--max-model-len", "1024", "--max-running-requests", "4", "--tree-budget", "15"]
start_seconds = 300

[environment]
OMP_NUM_THREADS = "1"
PYTHONPATH = "{place}"

[router]
kind = "nginx"
port = {port + 2}
"""
    path = folder / "live.toml"
    path.write_text(text, encoding="utf-8")
    return path


def broken_drafters(folder: Path) -> dict[str, Path]:
    """The bundled drafter cut off, with a tensor of another shape, and all NaN."""
    sound = resolve_drafter("auto", "smollm2-135m")
    assert sound is not None
    made = {}
    for name in ("truncated", "shape", "nan"):
        made[name] = folder / name
        shutil.copytree(sound, made[name])
        path = made[name] / "model.safetensors"
        if name == "truncated":
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size // 2)
            continue
        tensors = load_file(path)
        if name == "nan":
            tensors = {key: torch.full_like(tensor, float("nan")) for key, tensor in tensors.items()}
        else:
            key = max(tensors, key=lambda key: tensors[key].numel())
            tensors[key] = tensors[key][: tensors[key].shape[0] // 2].contiguous()
        save_file(tensors, path, metadata={"format": "pt"})
    return made


async def phase(
    load: Load, port: int, name: str, words: list[str], expected: int, modes: list[str], rest: float
) -> Phase:
    """Runs one command under load, and looks at what runs afterwards."""
    load.clear()
    command = [sys.executable, "-m", "ddtree", "deploy", *words]
    print(f"--- {name}", file=sys.stderr, flush=True)
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output, _ = await process.communicate()
    seconds = time.perf_counter() - began
    await asyncio.sleep(rest)  # the traffic after it counts too
    lines = output.decode(errors="replace").splitlines()
    print("\n".join(lines), file=sys.stderr, flush=True)
    found = Phase(name, ["ddtree", "deploy", *words], process.returncode or 0, expected, round(seconds, 1))
    found.requests, found.streams, found.failures = len(load.times), load.streams, list(load.failures)
    found.differing, found.served_by = load.differing, dict(load.modes)
    if load.times:
        found.slowest_s, found.p50_s = round(max(load.times), 2), round(percentile(load.times, 0.5), 2)
    found.said = [line for line in lines if line and not line.startswith((" ", "+", "-", "@"))][-8:]
    async with httpx.AsyncClient(trust_env=False) as client:
        for index in range(2):
            info = (await client.get(f"http://127.0.0.1:{port + index}/server_info")).json()
            found.modes.append(info["speculation"]["mode"])
    if found.exit_code != expected or found.modes != modes:
        found.unexpected = f"ended with {found.exit_code} and {found.modes}, expected {expected} and {modes}"
        print(f"{name}: {found.unexpected}", file=sys.stderr)
    return found


async def run(args: argparse.Namespace, folder: Path) -> list[Phase]:
    """All phases."""
    port = free_ports(3)
    path, drafters = str(specification(folder, port)), broken_drafters(folder)
    common = ["--yes", "--manager", args.manager]
    # Half of the speed: two cores are shared by both replicas, the clients and nginx, so speed says little here.
    rollout = ["rollout", path, *common, "--min-speed", "0.4", "--prompts", "2", "--max-tokens", "16"]
    tree = ["--set", "mode=tree"]
    plan = [
        ("linear to tree", [*rollout, *tree], 0, "tree"),
        ("rollback", ["rollback", path, *common], 0, "linear"),
        ("shadow that gains too little", [*rollout, *tree, "--shadow-first", "--min-gain", "3"], 1, "linear"),
        ("linear to tree, in the shadow first", [*rollout, *tree, "--shadow-first", "--min-gain", "1.02"], 0, "tree"),
        ("drafter cut off", [*rollout, *tree, "--set", f"drafter={drafters['truncated']}"], 1, "tree"),
        ("drafter of another shape", [*rollout, *tree, "--set", f"drafter={drafters['shape']}"], 1, "tree"),
        ("drafter all NaN", [*rollout, *tree, "--set", f"drafter={drafters['nan']}"], 1, "tree"),
    ]  # fmt: skip
    subprocess.run([sys.executable, "-m", "ddtree", "deploy", "apply", path, *common], check=True, stdout=sys.stderr)
    load = Load(f"http://127.0.0.1:{port + 2}", args.clients, args.max_tokens)
    traffic = asyncio.create_task(load.run())
    phases = []
    try:
        await asyncio.sleep(args.rest)
        for name, words, expected, mode in plan:
            if args.only is None or args.only in name:
                phases.append(await phase(load, port, name, words, expected, [mode, mode], args.rest))
    finally:
        load.stop()
        await traffic
        subprocess.run([sys.executable, "-m", "ddtree", "deploy", "status", path, "--manager", args.manager],
                       stdout=sys.stderr)  # fmt: skip
        subprocess.run([sys.executable, "-m", "ddtree", "deploy", "remove", path, *common], stdout=sys.stderr)
    return phases


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--manager", default="auto", help="as for ddtree deploy")
    options.add_argument("--clients", type=int, default=2, help="requests at once")
    options.add_argument("--max-tokens", type=int, default=16, help="of each answer")
    options.add_argument("--rest", type=float, default=5.0, help="seconds of traffic behind each command")
    options.add_argument("--only", help="run the phases whose names hold this")
    args = options.parse_args()
    if shutil.which("nginx") is None and not Path("/usr/sbin/nginx").exists():
        raise SystemExit("nginx is not installed: apt-get install nginx-light")
    os.environ["PYTHONPATH"] = str(Path(ddtree.__file__).parent.parent)
    with tempfile.TemporaryDirectory(prefix="ddtree-live-") as folder:
        phases = asyncio.run(run(args, Path(folder)))
        text = json.dumps([asdict(one) for one in phases]).replace(folder, "FOLDER").replace(sys.executable, "python")
    nginx = subprocess.run(["/usr/sbin/nginx", "-v"], capture_output=True, text=True).stderr.strip()
    report = {
        "requests": sum(one.requests for one in phases),
        "failed": sum(len(one.failures) for one in phases),
        "unexpected": [f"{one.name}: {one.unexpected}" for one in phases if one.unexpected],
        "differing": sum(one.differing for one in phases),
        "clients": args.clients,
        "max_tokens": args.max_tokens,
        "nginx": nginx,
        "phases": json.loads(text),
        **machine(),
    }
    finish(report, args.output)
    if report["failed"] or report["differing"] or report["unexpected"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
