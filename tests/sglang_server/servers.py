"""SGLang servers on the CPU, and what is asked of them."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CONTEXT = 96
START_S, ANSWER_S = 300, 240  # limits; a start takes half a minute on an idle machine
PROMPTS = [[10, 20, 30, 40, 50], [7, 99, 123, 45, 300, 6, 77], [200, 201, 5, 9], [33, 34, 35, 36, 37, 38, 39, 40]]
LONG = [11 + 3 * i for i in range(CONTEXT - 20)]
TOKENS, PENALISED = 16, 32
MODELS = {"__init__", "registry", "utils", "qwen3", "dflash"}  # modules of sglang.srt.models
REGEX = "(yes|no), [a-z]{3,8}!"
SAMPLED = {"temperature": 1.0, "sampling_seed": 7}
FEW = {str(token): 60.0 for token in range(17, 65, 4)}  # nothing else is said, so that every penalty matters
BIASES: list[dict[str, Any]] = [{"logit_bias": FEW}, {"logit_bias": FEW}, {}, {"logit_bias": FEW | {"0": 66.0}}]
# One for each prompt. A repetition penalty is never with others: plain SGLang without overlap applies them in the order
# of a set of classes, which differs from start to start.
PENALTIES: list[dict[str, Any]] = [
    {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"repetition_penalty": 1.8},
    {},
    {"frequency_penalty": 0.5, "presence_penalty": 2.0, "min_new_tokens": 6},
]


@dataclass
class Server:
    """One running server."""

    port: int
    log: Path

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer, or the error's."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            text = error.read().decode()
        return json.loads(text) if text.startswith(("{", "[")) else text

    def generate(self, ids: list[int], tokens: int = TOKENS, rid: str | None = None, **params: Any) -> Any:
        """Greedy unless told otherwise."""
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **params}
        return self.post("/generate", {"input_ids": ids, "sampling_params": params, **({"rid": rid} if rid else {})})

    def metrics(self) -> str:
        """What Prometheus would read."""
        return self._read("/metrics")

    def info(self) -> Any:
        """Its options and its schedulers' state."""
        return json.loads(self._read("/server_info"))

    def _read(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=ANSWER_S) as answer:
            return str(answer.read().decode())


@contextmanager
def serve(folder: Path, name: str, arguments: list[str], graphs: bool = False, ranks: int = 1) -> Iterator[Server]:
    """A server of the tiny model in `folder`, with the CPU's plug-in; its log lies there too.

    graphs: rounds end as captured graphs would end them, by the tails; a CPU has no graphs.
    ranks: processes that share the model, by tensor parallelism; each is bound to a core.
    """
    port, log = _free_port(), folder / f"{name}.log"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder / "target")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    command += [
        "--attention-backend",
        "torch_native",
        "--sampling-backend",
        "pytorch",
        "--grammar-backend",
        "llguidance",
    ]
    command += ["--context-length", str(CONTEXT), "--max-total-tokens", "2048", "--max-running-requests", "4"]
    command += ["--skip-server-warmup", "--enable-metrics", *arguments]
    if "--speculative-algorithm" not in arguments:  # with overlap plain SGLang's penalties come a token late
        command.append("--disable-overlap-schedule")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DDTREE_")}
    if ranks > 1:
        cores = sorted(os.sched_getaffinity(0))
        bound = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
        command, environment["SGLANG_CPU_OMP_THREADS_BIND"] = [*command, "--tp-size", str(ranks)], bound
    environment |= {
        "PYTHONPATH": os.pathsep.join(
            [str(HERE / "plugin"), str(HERE / "stubs"), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_other_models()),  # each process imports every other one
        "TORCHDYNAMO_DISABLE": "1",  # SGLang compiles its seeded sampling, which the interpreter cannot be part of
        "DDTREE_TEST_SCRIPT": str(folder / "script.json"),
        "DDTREE_TEST_LOG": str(folder / f"{name}.chains"),
        "DDTREE_TEST_GRAPHS": str(int(graphs)),
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        _await(process, port, log)
        yield Server(port, log)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass
class Answers:
    """What one server said to everything that the tests ask."""

    alone: list[Any] = field(default_factory=list)
    together: list[Any] = field(default_factory=list)
    continued: Any = None  # a prompt that ends within the first answer, whose cache a tree wrote
    limit: Any = None
    stopped: Any = None  # at a token of the first answer's middle, and so in the middle of a path
    sampled: list[Any] = field(default_factory=list)
    regex: Any = None
    biased: Any = None
    penalised: list[Any] = field(default_factory=list)  # each prompt by its penalties, alone
    penalised_together: list[Any] = field(default_factory=list)
    unpenalised: list[Any] = field(default_factory=list)  # the same without penalties
    least: Any = None  # wants to end at once, and is kept from it for four tokens
    aborted: Any = None
    after: Any = None  # the first prompt, once more, after all that
    metrics: str = ""
    requests: dict[str, Any] = field(default_factory=dict)  # what requests asked of the plug-in itself


def ask(server: Server, requests: dict[str, dict[str, Any]]) -> Answers:
    """Everything, in one order. requests: name -> custom_params of a further greedy request."""
    found = Answers()
    found.alone = [server.generate(ids) for ids in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        found.together = list(pool.map(server.generate, PROMPTS))
    first = PROMPTS[0] + found.alone[0]["output_ids"][: TOKENS // 2]
    found.continued = server.generate(first, TOKENS // 2)
    found.limit = server.generate(LONG, CONTEXT - len(LONG))
    stop = {"ignore_eos": False, "stop_token_ids": [found.alone[0]["output_ids"][TOKENS // 2]]}
    found.stopped = server.generate(PROMPTS[0], **stop)
    filters: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.8}]
    found.sampled = [server.generate(PROMPTS[1], **SAMPLED, **filtered) for filtered in filters]
    found.regex = server.generate(PROMPTS[2], regex=REGEX, ignore_eos=False)
    found.biased = server.generate(PROMPTS[0], logit_bias={"17": 60.0})
    asked = [(ids, bias | penalties) for ids, bias, penalties in zip(PROMPTS, BIASES, PENALTIES, strict=True)]
    found.penalised = [server.generate(ids, PENALISED, **penalties) for ids, penalties in asked]
    found.unpenalised = [server.generate(ids, PENALISED, **bias) for ids, bias in zip(PROMPTS, BIASES, strict=True)]
    with ThreadPoolExecutor(len(asked)) as pool:
        found.penalised_together = list(pool.map(lambda one: server.generate(one[0], PENALISED, **one[1]), asked))
    found.least = server.generate(PROMPTS[0], ignore_eos=False, logit_bias={"0": 90.0}, min_new_tokens=4)
    found.aborted = _aborted(server)
    found.after = server.generate(PROMPTS[0])
    found.requests = {name: server.generate(PROMPTS[0], custom_params=asked) for name, asked in requests.items()}
    found.metrics = server.metrics()
    return found


def _aborted(server: Server) -> Any:
    """What a request says that is cut while it runs."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.generate, PROMPTS[3], CONTEXT - 20, "to-be-cut")
        while not re.search(r"num_running_reqs\{[^}]*\} [1-9]", server.metrics()) and not answer.done():
            time.sleep(0.05)
        server.post("/abort_request", {"rid": "to-be-cut"})
        return answer.result()


def _other_models() -> list[str]:
    """Modules of SGLang's models that a Qwen3 and its drafter do without."""
    spec = find_spec("sglang")
    assert spec is not None
    (root,) = spec.submodule_search_locations or []
    return sorted({path.stem for path in Path(root).glob("srt/models/*.py")} - MODELS)


def _free_port() -> int:
    """Below the range from which the system gives ports to SGLang's own sockets."""
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def _await(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise AssertionError(f"the server did not start:\n{log.read_text()[-5000:]}")
