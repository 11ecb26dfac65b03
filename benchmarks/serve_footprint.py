"""How soon `ddtree serve` is ready with the model in the cache, and how much memory it takes at most.

python benchmarks/serve_footprint.py --output benchmarks/results/serve_footprint.json
"""

import json
import re
import time
import urllib.request

from common import finish, machine, parser
from serving import served


def peak_mib(pid: int) -> float:
    """The largest resident memory of a process so far (Linux)."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as status:
        return int(re.search(r"VmHWM:\s+(\d+)", status.read()).group(1)) / 1024


def ask(url: str, content: str, max_tokens: int) -> dict:
    """One chat request."""
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("args", nargs="*", help="more options for ddtree serve, behind --")
    args = options.parse_args()
    started = time.perf_counter()
    with served(*args.args) as (url, server):
        ready = time.perf_counter() - started
        at_start = peak_mib(server.pid)
        answers = [ask(url, text, 128) for text in ("Hello!", "Tell me about the sea. " * 150)]
        report = {
            "ready_seconds": round(ready, 2),
            "peak_mib_ready": round(at_start),
            "peak_mib_after_requests": round(peak_mib(server.pid)),
            "requests": [answer["usage"] for answer in answers],
            **machine(),
        }
    finish(report, args.output)


if __name__ == "__main__":
    main()
