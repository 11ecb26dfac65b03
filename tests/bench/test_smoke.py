"""The smoke request against servers of every flavour, and against every way to fail; all run in this process."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ddtree.bench.smoke import PROMPT, smoke
from ddtree.cli import app

TEXT = "def fibonacci(n):\n    a, b = 0, 1\n" + "    # step\n" * 20
KEYS = {"label", "seconds", "completion_tokens", "tok_s", "finish", "snippet"}


def chat(
    message: dict[str, Any], root: dict[str, Any] | None = None, choice: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A `chat.completion` object with fields of a server's own at its root and in its choice."""
    choices = [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "length", **(choice or {})}]
    usage = {"prompt_tokens": 20, "completion_tokens": 128, "total_tokens": 148}
    return {"id": "1", "object": "chat.completion", "choices": choices, "usage": usage, **(root or {})}


class Server:
    """Answers with `answer` under /v1, and remembers what it was sent."""

    def __init__(self) -> None:
        self.answer: Any = chat({"content": TEXT})
        self.status = 200
        self.models: Any = {"object": "list", "data": [{"id": "m-1", "owned_by": "vllm"}]}
        self.delay_s = 0.0
        self.requests: list[tuple[str, str | None, Any]] = []  # path, authorization, body
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(200, outer.models if self.path == "/v1/models" else None)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append((self.path, self.headers.get("Authorization"), body))
                time.sleep(outer.delay_s)
                self.reply(outer.status, outer.answer if self.path == "/v1/chat/completions" else None)

            def reply(self, status: int, answer: Any) -> None:
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(404 if answer is None else status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with suppress(BrokenPipeError):  # the client did not wait
                    self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.http.shutdown()
    running.http.server_close()


def test_the_request_and_the_record(server: Server) -> None:
    report = smoke(server.url)
    assert set(report) == KEYS, "no field that the server did not give"
    assert report["label"] == server.url
    assert report["completion_tokens"] == 128
    assert report["tok_s"] == pytest.approx(128 / report["seconds"], rel=0.05)
    assert report["finish"] == "length"
    assert report["snippet"] == TEXT[:120]
    path, key, body = server.requests[0]
    assert (path, key) == ("/v1/chat/completions", None)
    assert body == {
        "model": "m-1", "max_tokens": 128, "temperature": 0, "messages": [{"role": "user", "content": PROMPT}],
    }  # fmt: skip
    assert PROMPT == "Write a Python function fibonacci(n) using iteration. Return only code."


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        pytest.param(
            chat({"content": TEXT}, {"ddtree": {"mode": "tree", "acceptance_length": 3.25, "rounds": 40}}),
            {"mode": "tree", "acceptance_length": 3.25},
            id="ddtree",
        ),
        pytest.param(
            chat({"content": TEXT}, {"ddtree": {"mode": "ar", "acceptance_length": None}}),
            {"mode": "ar"},
            id="ddtree-ar",
        ),
        pytest.param(
            chat({"content": TEXT}, {"metrics": {"speculative_decoding": {"mean_acceptance_length": 2.5}}}),
            {"acceptance_length": 2.5},
            id="vllm",
        ),
        pytest.param(chat({"content": TEXT}, {"metrics": None}), {}, id="vllm-without-metrics"),
        pytest.param(
            chat({"content": TEXT}, choice={"meta_info": {"spec_accept_length": 4.5}}),
            {"acceptance_length": 4.5},
            id="sglang-choice",
        ),
        pytest.param(
            chat({"content": TEXT}, {"meta_info": {"spec_accept_length": 4.5}}),
            {"acceptance_length": 4.5},
            id="sglang-root",
        ),
        pytest.param(chat({"content": None, "reasoning_content": TEXT}), {}, id="reasoning-only"),
        pytest.param(chat({"content": "", "reasoning": TEXT}), {}, id="reasoning-by-its-newer-name"),
        pytest.param(chat({"content": TEXT, "reasoning_content": "hmm"}), {}, id="content-before-reasoning"),
    ],
)
def test_flavours(server: Server, answer: dict[str, Any], expected: dict[str, Any]) -> None:
    server.answer = answer
    report = smoke(server.url)
    assert "error" not in report
    assert report["snippet"] == TEXT[:120]
    assert {key: report[key] for key in set(report) - KEYS} == expected


def test_sglang_is_asked_for_its_meta_info(server: Server) -> None:
    server.models = {"data": [{"id": "m-1", "owned_by": "sglang"}]}
    smoke(server.url)
    assert server.requests[0][2]["return_meta_info"] is True


def test_a_server_without_usage(server: Server) -> None:
    del server.answer["usage"]
    report = smoke(server.url)
    assert "error" not in report
    assert (report["completion_tokens"], report["tok_s"]) == (None, None)


@pytest.mark.parametrize("shape", ["{}", "{}/", "{}/v1", "{}/v1/", " {} "])
def test_spellings_of_the_url(server: Server, shape: str) -> None:
    assert "error" not in smoke(shape.format(server.url))
    assert "error" not in smoke(shape.format(server.url).replace("http://", ""))


def test_a_proxy_of_the_environment_is_not_used_for_this_machine(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    assert "error" not in smoke(server.url)


def test_model_and_key_and_label(server: Server) -> None:
    server.models = None
    report = smoke(server.url, label="ours", model="m-2", api_key="secret")
    assert (report["label"], "error" in report) == ("ours", False)
    assert server.requests[0][1] == "Bearer secret"
    assert server.requests[0][2]["model"] == "m-2"


def break_with(**fields: Any) -> Callable[[Server], None]:
    return lambda server: server.__dict__.update(fields)


@pytest.mark.parametrize(
    ("breakage", "words"),
    [
        pytest.param(
            break_with(status=500, answer={"error": {"message": "out of\nmemory"}}), "500: out of memory", id="500"
        ),
        pytest.param(break_with(status=401, answer={"error": {"message": "wrong key"}}), "401: wrong key", id="401"),
        pytest.param(break_with(status=422, answer={"detail": "no such field"}), "422: no such field", id="detail"),
        pytest.param(break_with(status=503, answer=b"<h1>busy</h1>"), "503: <h1>busy</h1>", id="html"),
        pytest.param(break_with(answer=b"hello"), "not JSON", id="not-json"),
        pytest.param(break_with(answer=[1]), "no object", id="list"),
        pytest.param(break_with(answer={}), "choices[0].message", id="empty-object"),
        pytest.param(break_with(answer={"choices": []}), "choices[0].message", id="no-choice"),
        pytest.param(break_with(answer=chat({"content": None})), "no text", id="no-text"),
        pytest.param(break_with(models={"data": []}), "--model", id="no-model"),
        pytest.param(break_with(models=None), "404", id="no-models-page"),
        pytest.param(break_with(delay_s=1.0), "did not answer within 0.3 s", id="slow"),
    ],
)
def test_failures_are_told_in_the_record(server: Server, breakage: Callable[[Server], None], words: str) -> None:
    breakage(server)
    report = smoke(server.url, timeout_s=0.3)
    assert set(report) == KEYS | {"error"}
    assert words in report["error"]
    assert "\n" not in report["error"]


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "ftp://127.0.0.1", "http://", "", "http://[::1", "http://a b", "127.0.0.1:x"]
)
def test_addresses_that_lead_nowhere(url: str) -> None:
    report = smoke(url, timeout_s=2)
    assert report["error"]
    assert report["seconds"] is None


def run_cli(*args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        app(["smoke", *args])
    return int(ended.value.code or 0)


def test_command_succeeds(server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    assert run_cli(server.url, "--label", "ours") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["label"] == "ours"
    assert server.requests[0][1] == "Bearer from-environment"


def test_command_fails_and_still_prints_the_record(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.status = 500
    assert run_cli(server.url) == 1
    seen = capsys.readouterr()
    assert "500" in json.loads(seen.out.splitlines()[-1])["error"]
    assert seen.err.startswith("error: ")
