"""Every option of every command reaches the room that it is for; help and errors need no torch."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from fake_engine import Command, FakeEngine

import ddtree as package
from ddtree.cli import app
from ddtree.config import EngineConfig, SamplingParams, Speculation
from ddtree.engine import Engine
from ddtree.server import ServerOptions
from machines import sglang

LOADING: dict[str, list[str]] = {
    "model": ["--model", "/some/folder"],
    "drafter": ["--drafter", "/some/drafter"],
    "tree_budget": ["--tree-budget", "63"],
    "tree_top_k": ["--tree-top-k", "5"],
    "tree_spine": ["--tree-spine", "3"],
    "tree_context": ["--tree-context", "mix"],
    "device": ["--device", "cuda:1"],
    "dtype": ["--dtype", "bfloat16"],
    "max_model_len": ["--max-model-len", "777"],
    "cuda_graphs": ["--cuda-graphs", "off"],
    "draft_dtype": ["--draft-dtype", "int8"],
    "draft_vocab": ["--draft-vocab", "8192"],
    "draft_pairwise": ["--draft-pairwise", "off"],
    "numerics": ["--numerics", "fast"],
}
REQUEST = {"max_tokens": ["--max-tokens", "5"], "temperature": ["--temperature", "0.7"], "seed": ["--seed", "17"]}
OPTIONS: dict[str, dict[str, list[str]]] = {
    "generate": LOADING
    | REQUEST
    | {"mode": ["--mode", "linear"], "raw": ["--raw"], "stats": ["--stats"], "as_json": ["--json"], "prompt": []},
    "serve": LOADING
    | {
        "engine": ["--engine", "ddtree"],
        "mode": ["--mode", "linear"],
        "max_tree_budget": ["--max-tree-budget", "127"],
        "max_running_requests": ["--max-running-requests", "4"],
        "chunked_prefill_size": ["--chunked-prefill-size", "64"],
        "prefix_caching": ["--no-prefix-caching"],
        "seed": ["--seed", "17"],
        "host": ["--host", "::1"],
        "port": ["--port", "0"],
        "served_model_name": ["--served-model-name", "one", "--served-model-name", "two"],
        "api_key": ["--api-key", "first", "--api-key", "second"],
        "reasoning_parser": ["--reasoning-parser", "qwen3"],
        "tool_call_parser": ["--tool-call-parser", "hermes"],
        "max_queue": ["--max-queue", "3"],
        "max_body_mib": ["--max-body-mib", "0.5"],
        "shutdown_timeout": ["--shutdown-timeout", "1.5"],
        "allowed_origin": ["--allowed-origin", "https://one.example", "--allowed-origin", "https://two.example"],
        "per_request_spec_decode_metrics": ["--per-request-spec-decode-metrics", "summary"],
        "vllm_metrics": ["--vllm-metrics"],
        "access_log": ["--no-access-log"],
        "log_level": ["--log-level", "debug"],
    },
    "bench": LOADING
    | REQUEST
    | {
        "modes": ["--modes", "ar,linear"],
        "budgets": ["--budgets", "7"],
        "limit": ["--limit", "1"],
        "repeat": ["--repeat", "2"],
        "output": ["--output", "report.json"],
    },
    "smoke": {
        "label": ["--label", "ours"],
        "model": ["--model", "some-model"],
        "api_key": ["--api-key", "secret"],
        "url": [],
    },
    "models": {"as_json": ["--json"]},
    "train": {},  # a group: tests/training/test_train_cli.py has its commands
    "deploy": {},  # a group: tests/deploy/test_deploy_cli.py has its commands
    "doctor": {
        "engine": ["--engine", "embedded"],
        "model": ["--model", "/some/folder"],
        "drafter": ["--drafter", "/some/drafter"],
        "mode": ["--mode", "linear"],
        "port": ["--port", "30001"],
        "max_model_len": ["--max-model-len", "512"],
        "max_running_requests": ["--max-running-requests", "3"],
        "max_tree_budget": ["--max-tree-budget", "9"],
        "attention_backend": ["--attention-backend", "triton"],
        "grammar_backend": ["--grammar-backend", "none"],
        "rules": ["--rules", "own.toml"],
        "record": ["--record", "machine.json"],
        "replay": ["--replay", "machine.json"],
        "as_json": ["--json"],
    },
}
BASE = {
    "generate": ["Hi"],
    "serve": [],
    "bench": ["--limit", "2"],
    "smoke": ["http://localhost:1"],
    "models": [],
    "doctor": ["--engine", "sglang"],
}
OWN_RULE = """
[[rule]]
id = "own"
level = "warn"
when = [["system.cores", ">", 0]]
what = "it has {system.cores} cores"
seen = "counted"
mend = "none"
"""


@pytest.fixture
def observe(ddtree: Command, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs a command and returns all that anybody could see of it: calls, files and output."""
    seen: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ddtree.server.check_port", lambda *args: seen.append(args))
    monkeypatch.setattr("ddtree.server.serve", lambda engine, *args, **kwargs: seen.append((args, kwargs)))
    monkeypatch.setattr("ddtree.bench.smoke.smoke", lambda *args, **kwargs: seen.append((args, kwargs)) or {})

    monkeypatch.setattr(
        "ddtree.doctor.probe.probe", lambda *args: seen.append(args) or replace(sglang(), asked=args[0])
    )
    (tmp_path / "own.toml").write_text(OWN_RULE)

    def run(*args: str) -> Any:
        seen.clear()
        engines.clear()
        ran = ddtree(*args)
        assert ran.code == 0, ran.err
        out = "" if args[0] == "bench" else ran.out  # figures and dates differ from run to run
        calls = [
            (prompt, params, speculation, observer is None)
            for engine in engines
            for prompt, params, speculation, observer in engine.calls
        ]
        return [engine.config for engine in engines], calls, list(seen), out, sorted(tmp_path.iterdir())

    return run


EMBEDDED_ALONE = {("doctor", name) for name in ("max_model_len", "max_running_requests", "max_tree_budget")}
# Of the first only one value can be chosen so far, others are refused; an engine of another name is another command.
# The last goes with no other option (test_cli_doctor.py).
ONE_VALUE = {("serve", "tool_call_parser"), ("serve", "engine"), ("doctor", "replay")}


@pytest.mark.parametrize(
    ("command", "name"),
    [(command, name) for command in OPTIONS for name in OPTIONS[command] if (command, name) not in ONE_VALUE],
)
def test_no_option_is_accepted_and_ignored(observe: Any, command: str, name: str) -> None:
    base = [command, *BASE[command]]
    if (command, name) in EMBEDDED_ALONE:
        base = [command, "--engine", "embedded"]
    args = OPTIONS[command][name]
    changed = [*base, *args] if args else [command, "http://localhost:2"]
    assert observe(*base) != observe(*changed)


def test_the_list_above_is_complete() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # a group has commands
    for command, found in commands.items():
        if found.hidden:  # test_cli_serve_sglang.py
            continue
        assert {param.name for param in found.params if param.name != "help"} == set(OPTIONS[command]), command


def test_serve_passes_everything_on(
    ddtree: Command, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("ddtree.server.check_port", lambda *args: calls.append(("check", args, len(engines))))
    monkeypatch.setattr("ddtree.server.serve", lambda *args, **kwargs: calls.append((args, kwargs)))
    every = [word for name in OPTIONS["serve"] for word in OPTIONS["serve"][name]]
    assert ddtree("serve", *every).code == 0
    speculation = Speculation("linear", 63, 5, 3, "mix")
    assert engines[0].config == EngineConfig(
        "/some/folder", "/some/drafter", speculation, "cuda:1", "bfloat16", 777,
        max_running_requests=4, max_tree_budget=127, prefill_chunk=64, prefix_caching=False, cuda_graphs=False,
        draft_dtype="int8", draft_vocab="8192", draft_pairwise="off", numerics="fast",
    )  # fmt: skip
    assert calls[0] == ("check", ("::1", 0), 0), "the port is checked before the model loads"
    options = ServerOptions(
        served_model_names=("one", "two"),
        default_seed=17,
        api_keys=("first", "second"),
        max_queue=3,
        shutdown_timeout=1.5,
        reasoning_parser="qwen3",
        tool_call_parser="hermes",
        vllm_metrics=True,
        access_log=False,
        log_level="debug",
        max_body_mib=0.5,
        allowed_origins=("https://one.example", "https://two.example"),
        spec_decode_metrics="summary",
    )
    assert calls[1] == ((engines[0], "::1", 0, options), {})


def test_serve_defaults(ddtree: Command, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("ddtree.server.check_port", lambda *args: None)
    monkeypatch.setattr("ddtree.server.serve", lambda *args, **kwargs: calls.append((args, kwargs)))
    assert ddtree("serve").code == 0
    assert engines[0].config == EngineConfig()
    assert calls == [((engines[0], "127.0.0.1", 30000, ServerOptions((EngineConfig().model,))), {})]


def test_keys_from_the_environment(ddtree: Command, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("ddtree.server.check_port", lambda *args: None)
    monkeypatch.setattr("ddtree.server.serve", lambda *args: calls.append(args[-1].api_keys))
    monkeypatch.setenv("DDTREE_API_KEY", "one two")
    assert ddtree("serve").code == 0
    assert ddtree("serve", "--api-key", "three").code == 0
    assert calls == [("one", "two"), ("three",)]
    shown = ddtree("serve", "--help")
    assert "DDTREE_API_KEY" in shown.out
    assert "one two" not in shown.out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--max-queue", "-1"], "--max-queue must be from 0"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout must be from 0"),
        (["--shutdown-timeout", "nan"], "--shutdown-timeout must be from 0"),
        (["--max-body-mib", "0"], "--max-body-mib must be"),
        (["--max-body-mib", "inf"], "--max-body-mib must be"),
        (["--log-level", "loud"], "--log-level 'loud' is unknown"),
        (["--reasoning-parser", "gpt"], "--reasoning-parser 'gpt' is unknown"),
        (["--tool-call-parser", "pythonic"], "--tool-call-parser 'pythonic' is unknown"),
        (["--served-model-name", ""], "--served-model-name must not be empty"),
        (["--api-key", ""], "--api-key must be"),
        (["--api-key", "sch\u00f6n"], "--api-key must be"),
        (["--max-running-requests", "0"], "--max-running-requests must be"),
        (["--chunked-prefill-size", "0"], "--chunked-prefill-size must be"),
        (["--tree-budget", "9", "--max-tree-budget", "8"], "--max-tree-budget must be"),
        (["--max-tree-budget", "0"], "--max-tree-budget must be"),
        (["--tree-budget", "0"], "--tree-budget must be from 1"),
        (["--seed", str(2**64)], "--seed must be"),
    ],
    ids=str,
)
def test_serve_refuses_before_it_loads(ddtree: Command, engines: list[FakeEngine], args: list[str], words: str) -> None:
    ran = ddtree("serve", *args)
    assert ran.code == 1
    assert ran.err.startswith(f"error: {words}"), ran.err
    assert not engines


@pytest.mark.parametrize("command", ["generate", "serve", "bench"])
def test_trees_that_nobody_chose_follow_the_device(observe: Any, command: str) -> None:
    def settled(*args: str) -> tuple[int, int]:
        (config,) = observe(command, *BASE[command], *args)[0]
        speculation = config.speculation.settled("cuda")
        return speculation.tree_budget, speculation.tree_top_k

    assert settled() == (15, 16)
    assert settled("--tree-budget", "5") == (5, 16)
    assert settled("--tree-top-k", "8") == (15, 8)


@pytest.mark.parametrize("command", ["generate", "serve", "bench"])
def test_help_tells_the_defaults_of_trees(ddtree: Command, command: str) -> None:
    shown = " ".join(ddtree(command, "--help").out.split())
    assert "default: 5 on a CPU, 15 on a GPU" in shown
    assert "default: 8 on a CPU, 16 on a GPU" in shown


def test_port_in_use(ddtree: Command, engines: list[FakeEngine]) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ran = ddtree("serve", "--port", str(port))
    assert ran.code == 1
    assert ran.err.startswith("error: ")
    assert str(port) in ran.err
    assert "--port" in ran.err
    assert not engines


def test_generate_passes_the_request_on(ddtree: Command, engines: list[FakeEngine]) -> None:
    args = [word for name in REQUEST for word in REQUEST[name]]
    assert ddtree("generate", "Hi", *args).code == 0
    assert engines[0].calls[0][1] == replace(SamplingParams(), max_tokens=5, temperature=0.7, seed=17)


@pytest.mark.parametrize(
    "args",
    [
        ["generate"],
        ["generate", "Hi", "there"],
        ["generate", "Hi", "--tree-budget", "many"],
        ["generate", "Hi", "--no-such-option"],
        ["bench", "--mode", "ar,"],
        ["no-such-command"],
        ["smoke"],
    ],
)
def test_usage_errors(ddtree: Command, engines: list[FakeEngine], args: list[str]) -> None:
    ran = ddtree(*args)
    assert (ran.code, ran.out) == (2, "")
    assert "Traceback" not in ran.err


def test_version(ddtree: Command) -> None:
    ran = ddtree("--version")
    assert (ran.code, ran.out) == (0, f"ddtree {package.__version__}\n")


def test_models(ddtree: Command) -> None:
    table = ddtree("models")
    assert table.code == 0
    assert table.out.splitlines()[0].split() == ["name", "kind", "size", "licence", "source", "where"]
    listed = json.loads(ddtree("models", "--json").out)
    assert {"smollm2-135m", "smollm2-135m-dflash"} <= {entry["name"] for entry in listed}
    for entry in listed:
        assert {"name", "kind", "size", "licence", "source", "path"} <= set(entry)
        assert isinstance(entry["size"], int)
        assert entry["name"] in table.out


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["generate", "--help"],
        ["generate", "Hi", "--mode", "magic"],
        ["bench", "--limit", "0"],
        ["models"],
        ["doctor", "--replay", "not-there.json"],
    ],
)
def test_quick_commands_do_not_import_torch(args: list[str]) -> None:
    code = "import sys\nfrom ddtree.cli import main\ntry:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
    ran = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in ran.stderr
    assert ran.returncode in ((2,) if args[0] == "doctor" else (0, 1))


def test_a_bug_keeps_its_traceback(ddtree: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(config: object) -> Engine:
        raise ZeroDivisionError("a bug, not a user's mistake")

    monkeypatch.setattr(Engine, "load", load)
    with pytest.raises(ZeroDivisionError):
        app(["generate", "Hi"])


def test_a_served_engine_is_loaded_by_a_thread_that_is_gone(observe: Any, engines: list[FakeEngine]) -> None:
    """See `threads.in_passing_thread`: what loads leaves OpenMP threads behind as long as it lives."""
    observe("serve")
    assert not engines[0].loaded_by.is_alive()
    assert engines[0].warmed_by is engines[0].loaded_by, "before the server says that it is ready"


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_only_a_server_warms_up(observe: Any, engines: list[FakeEngine], command: str) -> None:
    observe(command, *BASE[command])
    assert engines[0].warmed_by is None
