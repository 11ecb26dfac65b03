"""SGLang servers of a benchmark: their commands, what they are asked, their ends. sglang_start.py waits for them."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

NAME = re.compile(r"(?P<mode>plain|dflash|linear|shadow|tree)(?P<budget>\d*)(?P<extras>(@\w+)*)")
NUMBERED = {  # modifier -> SGLang's flag
    "graph": "--cuda-graph-max-bs-decode",
    "tokens": "--max-total-tokens",
    "context": "--context-length",
    "optimism": "--schedule-conservativeness",  # in hundredths: the lower, the more requests are let in at once
    "block": "--speculative-num-draft-tokens",
    "log": "--decode-log-interval",
}
FIXED = {
    "triton": ["--attention-backend", "triton"],
    "flashinfer": ["--attention-backend", "flashinfer"],
    "float16": ["--dtype", "float16"],
    "bfloat16": ["--dtype", "bfloat16"],
    "metrics": ["--enable-metrics"],
    "eager": ["--cuda-graph-backend-decode", "disabled"],
    "nooverlap": ["--disable-overlap-schedule"],
    "deterministic": ["--enable-deterministic-inference"],  # products and attention that no neighbour changes
    "nopairwise": ["--speculative-ddtree-pairwise", "off"],  # trees by the candidates' own scores alone
}
ENVIRONMENT = {
    "nopdl": {"DDTREE_OVERLAP": "0"},  # our kernels without programmatic dependent launch
    "notails": {"DDTREE_SGLANG_TAILS": "0"},  # rounds end outside SGLang's graphs
}
SEVERAL = [  # for more than one GPU: NCCL alone; what SGLang turns on beside it hung where servers started together
    "--disable-custom-all-reduce",  # its own buffers, opened in the other process by CUDA IPC
    # FlashInfer's all-reduce: symmetric memory with multicast, which SGLang turns on by itself for Qwen3-Next on SM90
    # and SM100 (arg_groups/overrides.py). The other three, --enable-symm-mem, --enable-torch-symm-mem and
    # --enable-mscclpp, are off unless they are named.
    "--enforce-disable-flashinfer-allreduce-fusion",
    *("--dist-timeout", "120", "--watchdog-timeout", "120"),  # seconds: what waits longer ends, and says where
]
# Of a machine with several GPUs. Multicast over NVLink is left alone by NCCL, PyTorch and NVSHMEM: where GPUs of a host
# are shared, a program that fails in it can take them all out of service.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
LINES = 60  # of a dead server's log
BROKEN = ("Scheduler hit an exception", "SIGQUIT received")  # SGLang then takes a minute to end, and answers nothing
MODES = {"linear": "linear", "shadow": "shadow-linear", "tree": "tree"}


class Ended(Exception):
    """The time for the whole run is over."""


@dataclass(frozen=True)
class Settings:
    """What all servers of a run share."""

    target: str
    drafter: str
    folder: Path  # of the logs
    words: Sequence[str]  # options for every server
    tp: int = 1
    gpus: Sequence[str] = ()  # indices; none: as CUDA_VISIBLE_DEVICES is
    answer_s: float = 120
    environment: Mapping[str, str] = field(default_factory=dict)  # beside the session's own
    end: float = float("inf")  # time.monotonic() of the whole run's end

    def left(self, most: float) -> float:
        """Seconds that something may take. Raises Ended where there are none."""
        seconds = min(most, self.end - time.monotonic())
        if seconds <= 0:
            raise Ended
        return seconds


@dataclass
class Server:
    """One server and its state."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path
    settings: Settings
    started: float = field(default_factory=time.monotonic)
    up_s: float | None = None
    problem: str | None = None  # why it is asked no more

    @property
    def flashinfer(self) -> bool:
        """Whether it compiles FlashInfer's kernels, the last of them in its first request."""
        words, _ = words_of(self.name, self.settings)
        found = [after for flag, after in pairwise(words) if flag == "--attention-backend"]
        return found[-1:] == ["flashinfer"]

    @property
    def mode(self) -> str:
        """plain, dflash, linear, shadow or tree."""
        return parts(self.name)[0]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer. Raises RuntimeError with the body of an HTTP error."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(self._url(path), data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.settings.left(self.settings.answer_s)) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"HTTP {error.code}: {error.read().decode(errors='replace')[:500]}") from error
        except TimeoutError:
            self.settings.left(1)  # Ended, where it was the run's time that was over
            raise

    def generate(self, ids: Sequence[int], tokens: int, **params: Any) -> dict[str, Any]:
        """Greedy and without an end unless told otherwise; `seconds` is how long it took."""
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **params}
        started = time.perf_counter()
        found = self.post("/generate", {"input_ids": list(ids), "sampling_params": params})
        return {**found, "seconds": time.perf_counter() - started}

    def metrics(self) -> str:
        """What Prometheus would read."""
        with urllib.request.urlopen(self._url("/metrics"), timeout=20) as answer:
            return str(answer.read().decode())

    def pairwise(self) -> str | None:
        """Whether its trees go by the drafter's pairwise head, on or off; None: it grows none."""
        if self.mode not in MODES:
            return None
        with urllib.request.urlopen(self._url("/server_info"), timeout=20) as answer:
            return str(json.load(answer)["internal_states"][0]["ddtree"]["pairwise"])

    def healthy(self) -> bool:
        """Whether it answers."""
        try:
            with urllib.request.urlopen(self._url("/health"), timeout=3):
                return True
        except OSError:
            return False

    def fail(self, reason: str) -> None:
        """Ask it no more, end it, and show the end of its log."""
        self.problem = reason
        self.stop()
        print(f"---- {self.name}: {reason}; the last {LINES} lines of {self.log}:", flush=True)
        lines = self.log.read_text(errors="replace").splitlines()
        end = next((at for at, line in enumerate(lines) if "SIGQUIT received" in line), len(lines))
        print("\n".join(lines[max(end - LINES, 0) : end]), flush=True)  # what comes behind is SGLang's own ending
        print(f"---- end of {self.name}", flush=True)

    def trace(self) -> None:
        """Let its processes write down where they are, into the log; it does not live on."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGABRT)
            time.sleep(2)

    def watch(self) -> None:
        """Until it ends: end it as soon as its log says that it is broken, so that nobody waits for answers."""
        while self.process.poll() is None:
            if any(words in self.log.read_text(errors="replace") for words in BROKEN):
                time.sleep(2)  # for the rest of the traceback
                self.stop()
            time.sleep(1)

    def stop(self) -> None:
        """End it with all its processes."""
        if self.process.poll() is None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                return
            self.process.wait(20)

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"


def parts(name: str) -> tuple[str, int | None, list[str]]:
    """Mode, budget and modifiers of a name such as tree31@flashinfer@graph4. Raises ValueError."""
    found = NAME.fullmatch(name)
    if found is None:
        raise ValueError(
            f"{name!r}: write plain, dflash, linear, shadow or tree, a budget, and modifiers from "
            f"@{', @'.join([*FIXED, *ENVIRONMENT, *(f'{key}N' for key in NUMBERED), 'tpN'])}"
        )
    extras = [word for word in found["extras"].split("@") if word]
    for word in extras:
        if (
            word not in FIXED
            and word not in ENVIRONMENT
            and not re.fullmatch(f"({'|'.join([*NUMBERED, 'tp'])})\\d+", word)
        ):
            raise ValueError(f"{name!r}: @{word} is unknown")
    return found["mode"], int(found["budget"]) if found["budget"] else None, extras


def words_of(name: str, settings: Settings) -> tuple[list[str], int]:
    """The options of one server, and how many GPUs it takes."""
    mode, budget, extras = parts(name)
    words, gpus = [*settings.words], settings.tp
    if mode != "plain":
        words += ["--speculative-draft-model-path", settings.drafter, "--speculative-algorithm"]
        words += ["DFLASH"] if mode == "dflash" else ["DDTREE", "--speculative-ddtree-mode", MODES[mode]]
    if budget is not None:
        words += ["--speculative-ddtree-budget", str(budget)]
    for extra in extras:
        key = extra.rstrip("0123456789")
        number = extra.removeprefix(key)
        if extra in FIXED:
            words += FIXED[extra]
        elif key == "tp":
            gpus = int(number)
        elif extra not in ENVIRONMENT and (key != "block" or mode != "plain"):
            words += [NUMBERED[key], str(int(number) / 100) if key == "optimism" else number]
    return [*words, "--tp-size", str(gpus), *(SEVERAL if gpus > 1 else [])], gpus


def start(names: Sequence[str], settings: Settings) -> list[Server]:
    """Begin to start all of them, on the GPUs in turn."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DDTREE_SGLANG_")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), plug_in(settings.folder)]))
    cards, servers = cycle(settings.gpus), []
    made = [(name, *words_of(name, settings)) for name in names]  # a name that is unknown is told before any starts
    for name, words, count in made:
        mine = list(islice(cards, count))
        port, log = free_port(), settings.folder / f"{name.replace('@', '-')}.log"
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", settings.target]
        command += ["--host", "127.0.0.1", "--port", str(port), *words]
        with log.open("w") as output:
            output.write(f"{command}\n")
            output.flush()
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment
                | {"PYTHONFAULTHANDLER": "1"}
                | (NO_MULTICAST if count > 1 else {})
                | dict(settings.environment)
                | ({"CUDA_VISIBLE_DEVICES": ",".join(mine)} if mine else {})
                | {k: v for extra in parts(name)[2] for k, v in ENVIRONMENT.get(extra, {}).items()},
                start_new_session=True,
            )
        servers.append(Server(name, port, process, log, settings))
        threading.Thread(target=servers[-1].watch, daemon=True).start()
    return servers


def end_in_order() -> None:
    """At SIGTERM, as `timeout` sends it: the servers, which are sessions of their own, would outlive this process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))


def each(servers: Sequence[Server], action: Callable[[Server], Any]) -> dict[str, Any]:
    """action of every server that is well, one after another; one that fails is ended, and the others go on."""
    found = {}
    for server in servers:
        if server.problem is not None:
            continue
        try:
            found[server.name] = action(server)
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            server.fail(f"{type(error).__name__}: {error}")
    return found


def plug_in(folder: Path) -> str | None:
    """A folder for PYTHONPATH whose metadata lets SGLang find the plug-in; None where ddtree is installed."""
    if any(point.name == "ddtree" for point in entry_points(group="sglang.srt.plugins")):
        return None
    info = folder / "plugin" / "ddtree_sglang-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ddtree-sglang\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nddtree = ddtree.sglang.plugin:register\n")
    return str(info.parent.resolve())


def free_port() -> int:
    """Below the range from which the system gives ports to SGLang's own sockets."""
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
