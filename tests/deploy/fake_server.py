"""A server that starts at once: what `ddtree deploy` needs of one, and faults on demand. Standard library alone.

It stands where a unit names the interpreter, so it gets the words `-m ddtree serve --port ...`. FAKE in its environment
names a fault: dies, never (healthy), wrong (tokens), slow, poor (drafts), silent (no answers), disagree, gainless.
"""

import json
import os
import signal
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FAULT = os.environ.get("FAKE", "")
TOKENS_S = float(os.environ.get("FAKE_TOKENS_S", "2000"))


def option(name: str, default: str) -> str:
    """The value of an option in the command."""
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


MODE = option("--mode", "tree")
LENGTHS = {"ar": 1.0, "linear": 2.0, "shadow-linear": 2.0, "tree": 2.5}


class Counts:
    """What /metrics tells."""

    lock = threading.Lock()
    running = answers = rounds = accepted = shadow_tree = 0


class Handler(BaseHTTPRequestHandler):
    """The routes."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        """Health, information, models, metrics."""
        if self.path == "/health":
            self._send({"status": "ok"}, 503 if FAULT == "never" else 200)
        elif self.path == "/server_info":
            self._send({
                "served_model_names": ["fake"], "model": "fake", "dtype": os.environ.get("FAKE_DTYPE", "float32"),
                "numerics": "plain", "device": "cpu", "speculation": {"mode": MODE}, "pid": os.getpid(),
            })  # fmt: skip
        elif self.path == "/v1/models":
            self._send({"data": [{"id": "fake", "owned_by": "ddtree"}]})
        elif self.path == "/metrics":
            self._metrics()
        else:
            self._send({"error": {"message": "not found"}}, 404)

    def do_POST(self) -> None:
        """A chat, whole or as a stream of words."""
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}")
        if self.path != "/v1/chat/completions":
            self._send({"status": "ok"})
            return
        with Counts.lock:
            Counts.running += 1
        try:
            self._chat(body)
        finally:
            with Counts.lock:
                Counts.running -= 1

    def _chat(self, body: dict[str, Any]) -> None:
        if FAULT == "silent":
            self._send({"error": {"message": "the drafter gave NaN"}}, 500)
            return
        count = body.get("max_tokens", 8)
        time.sleep(count / TOKENS_S * (5 if FAULT == "slow" else 1))
        seed = sum(map(ord, body["messages"][0]["content"])) + (1 if FAULT == "wrong" else 0)
        ids = [(seed * 31 + n) % 1000 for n in range(count)]
        acceptance = 1.0 if FAULT == "poor" else LENGTHS[MODE]
        rounds = max(1, round(count / acceptance))
        with Counts.lock:
            Counts.answers += 1
            Counts.rounds += rounds
            Counts.accepted += round(rounds * (acceptance - 1))
            Counts.shadow_tree += round(rounds * 1.5)
        shadow = None
        if MODE == "shadow-linear":
            tree = 2.0 if FAULT == "gainless" else 2.5
            shadow = {
                "linear_acceptance_length": 2.0, "tree_acceptance_length": tree, "agree": FAULT != "disagree",
            }  # fmt: skip
        if body.get("stream"):
            self._stream(ids)
            return
        choice = {
            "message": {"role": "assistant", "content": " ".join(map(str, ids))}, "finish_reason": "length",
            "token_ids": ids,
        }  # fmt: skip
        block = {"mode": MODE, "acceptance_length": acceptance, "rounds": rounds, "shadow": shadow}
        self._send({"choices": [choice], "usage": {"completion_tokens": count}, "ddtree": block, "pid": os.getpid()})

    def _stream(self, ids: list[int]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for token in ids:
            self.wfile.write(f"data: {json.dumps({'choices': [{'delta': {'content': str(token)}}]})}\n\n".encode())
            self.wfile.flush()
            time.sleep(0.02)
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _metrics(self) -> None:
        lines = [
            "# HELP ddtree_requests_running Requests in a slot.",
            f"ddtree_requests_running {Counts.running}",
            "ddtree_requests_waiting 0",
            f'ddtree_mode_rounds_total{{mode="{MODE}"}} {Counts.rounds}',
            f'ddtree_mode_accepted_tokens_total{{mode="{MODE}"}} {Counts.accepted}',
            f"ddtree_shadow_rounds_total {Counts.rounds if MODE == 'shadow-linear' else 0}",
            f"ddtree_shadow_chain_tokens_total {Counts.accepted}",
            f"ddtree_shadow_accepted_tokens_total {Counts.shadow_tree}",
            f"ddtree_shadow_disagreements_total {Counts.answers if FAULT == 'disagree' else 0}",
        ]
        self._send_bytes("\n".join(lines).encode(), "text/plain", 200)

    def _send(self, value: Any, status: int = 200) -> None:
        self._send_bytes(json.dumps(value).encode(), "application/json", status)

    def _send_bytes(self, text: bytes, kind: str, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


class Server(ThreadingHTTPServer):
    """Threads end with their answers."""

    daemon_threads = True
    allow_reuse_address = True


def main() -> None:
    """Serves until SIGTERM; running answers end first."""
    if "ddtree.deploy.health" in sys.argv:  # ExecStartPost of the unit
        until = time.monotonic() + float(sys.argv[-1])
        while time.monotonic() < until:
            try:
                urllib.request.urlopen(sys.argv[-2], timeout=1).close()
                return
            except OSError:
                time.sleep(0.1)
        raise SystemExit(1)
    if FAULT == "dies":
        print("error: the drafter cannot be read: model.safetensors is truncated", file=sys.stderr, flush=True)
        raise SystemExit(1)
    server = Server((option("--host", "127.0.0.1"), int(option("--port", "0"))), Handler)
    print(f"fake ready on {server.server_port}, mode {MODE}", flush=True)

    def stop(*_: Any) -> None:
        if FAULT != "deaf":
            threading.Thread(target=server.shutdown, daemon=True).start()

    signal.signal(signal.SIGTERM, stop)
    server.serve_forever(poll_interval=0.02)
    until = time.monotonic() + 5
    while Counts.running and time.monotonic() < until:
        time.sleep(0.01)


if __name__ == "__main__":
    main()
