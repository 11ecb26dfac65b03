"""Waits until a server says that it can answer: `python -m ddtree.deploy.health URL [SECONDS]`."""

import http.client
import sys
import time
import urllib.error
import urllib.request

PAUSE_SECONDS = 0.5
ANSWER_SECONDS = 5.0  # for one answer


def healthy(url: str, seconds: float = ANSWER_SECONDS) -> bool:
    """Whether the URL answers with 200 within `seconds`. No proxy of the environment is asked."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=seconds) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError, http.client.HTTPException):  # refused, 503 while it loads, no URL, or no HTTP
        return False


def wait(url: str, seconds: float) -> bool:
    """Asks again and again until it is healthy (True) or `seconds` are over (False). 0: asks once."""
    end = time.monotonic() + seconds
    while not healthy(url, ANSWER_SECONDS if seconds <= 0 else max(0.1, min(ANSWER_SECONDS, end - time.monotonic()))):
        if time.monotonic() + PAUSE_SECONDS > end:
            return False
        time.sleep(PAUSE_SECONDS)
    return True


def main() -> int:
    """Exit code 0: it is healthy; 1: it is not; 2: a wrong argument."""
    try:
        url, seconds = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    except (IndexError, ValueError):
        print("usage: python -m ddtree.deploy.health URL [SECONDS]", file=sys.stderr)
        return 2
    if wait(url, seconds):
        return 0
    print(f"{url} did not answer with 200 within {seconds:g} s", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
