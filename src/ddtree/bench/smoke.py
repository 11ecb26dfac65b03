"""One chat request to any server that speaks OpenAI's HTTP dialect, and what came of it as one flat record."""

import ipaddress
import time
from typing import Any

import httpx

PROMPT = "Write a Python function fibonacci(n) using iteration. Return only code."
MAX_TOKENS = 128
TIMEOUT_S = 300.0
SNIPPET_CHARS = 120


class SmokeError(Exception):
    """The server could not be reached, refused, or answered with something that is no answer."""


def smoke(
    url: str,
    *,
    label: str | None = None,
    model: str | None = None,
    api_key: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """Ask the server at `url` (with or without /v1) for 128 tokens at temperature 0.

    Returns `label`, `seconds` (of the chat request alone), `completion_tokens`, `tok_s`, `finish` and `snippet`, each
    None where unknown; `acceptance_length` and `mode` only where the server gives them; and on any failure `error`,
    a line of text. Never raises for what a server does.
    """
    report: dict[str, Any] = {"label": label or url}
    report |= dict.fromkeys(("seconds", "completion_tokens", "tok_s", "finish", "snippet"))
    try:
        base = _base_url(url)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A proxy of the environment is for the outside: it cannot reach a server on this machine.
        client = httpx.Client(
            timeout=timeout_s, headers=headers, trust_env=not _is_loopback(base.host), follow_redirects=True
        )
        with client:
            body: dict[str, Any] = {
                "messages": [{"role": "user", "content": PROMPT}],
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
            }
            body |= {"model": model} if model else _model_fields(_json(client, "GET", f"{base}/models"))
            start = time.perf_counter()
            answer = _json(client, "POST", f"{base}/chat/completions", body)
            report["seconds"] = round(time.perf_counter() - start, 4)
        report |= _read_answer(answer, report["seconds"])
        if not report["snippet"]:
            raise SmokeError("the answer holds no text, neither in content nor in reasoning_content")
    except SmokeError as error:
        report["error"] = str(error)
    return report


def _base_url(url: str) -> httpx.URL:
    """`url` with a scheme and ending in /v1, so that http://host:port, host:port and http://host:port/v1/ all work."""
    text = url.strip().rstrip("/")
    text = text if "://" in text else f"http://{text}"
    text = text if text.endswith("/v1") else f"{text}/v1"
    try:
        parsed = httpx.URL(text)
    except (httpx.InvalidURL, UnicodeError) as error:
        raise SmokeError(f"{url!r} is no URL ({error}): give one such as http://127.0.0.1:30000") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise SmokeError(f"{url!r} is no HTTP address: give one such as http://127.0.0.1:30000")
    return parsed


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _json(client: httpx.Client, method: str, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object that the server answers with; anything else is a `SmokeError` that says what it was."""
    try:
        response = client.request(method, url, json=body)
    except httpx.TimeoutException as error:
        raise SmokeError(f"{url} did not answer within {client.timeout.read:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise SmokeError(f"{url} cannot be reached: {error or type(error).__name__}") from error
    if response.status_code != httpx.codes.OK:
        raise SmokeError(f"{url} answered {response.status_code}: {_error_text(response)}")
    try:
        answer = response.json()
    except ValueError as error:
        raise SmokeError(
            f"{url} answered with something that is not JSON: {response.text[:SNIPPET_CHARS]!r}"
        ) from error
    if not isinstance(answer, dict):
        raise SmokeError(f"{url} answered with JSON that is no object: {response.text[:SNIPPET_CHARS]!r}")
    return answer


def _error_text(response: httpx.Response) -> str:
    """The server's own words: `error.message` in OpenAI's shape, `message` or `detail` in others, else the text."""
    try:
        found = (
            _dig(response.json(), "error", "message")
            or _dig(response.json(), "message")
            or _dig(response.json(), "detail")
        )
    except ValueError:
        found = None
    return " ".join(str(found or response.text or response.reason_phrase).split())[:500]


def _model_fields(listing: dict[str, Any]) -> dict[str, Any]:
    """The request fields that follow from /v1/models: the first model's id."""
    models = listing.get("data")
    first = models[0] if isinstance(models, list) and models else None
    name = _dig(first, "id")
    if not isinstance(name, str) or not name:
        raise SmokeError("/v1/models lists no model: name one with --model")
    fields: dict[str, Any] = {"model": name}
    if _dig(first, "owned_by") == "sglang":
        fields["return_meta_info"] = True  # SGLang gives its acceptance length in a chat answer only when asked
    return fields


def _read_answer(answer: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The record's fields from a `chat.completion` object of ddtree, vLLM, SGLang or another server."""
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = _dig(choice, "message")
    if not isinstance(message, dict):
        raise SmokeError("the answer has no choices[0].message")
    parts = (message.get(field) for field in ("content", "reasoning_content", "reasoning"))
    text = next((part for part in parts if isinstance(part, str) and part.strip()), "")
    tokens = _dig(answer, "usage", "completion_tokens")
    fields: dict[str, Any] = {
        "completion_tokens": tokens,
        "tok_s": round(tokens / seconds, 2) if isinstance(tokens, int) and seconds > 0 else None,
        "finish": _dig(choice, "finish_reason"),
        "snippet": text[:SNIPPET_CHARS],
    }
    places = (
        (answer, "ddtree", "acceptance_length"),
        (answer, "metrics", "speculative_decoding", "mean_acceptance_length"),
        (choice, "meta_info", "spec_accept_length"),  # SGLang: counts prefill's token too, so a little high
        (answer, "meta_info", "spec_accept_length"),
    )
    acceptance = next((value for place in places if (value := _dig(*place)) is not None), None)
    mode = _dig(answer, "ddtree", "mode")
    fields |= {} if acceptance is None else {"acceptance_length": acceptance}
    fields |= {} if mode is None else {"mode": mode}
    return fields


def _dig(value: Any, *keys: str) -> Any:
    """`value[key]...` where every step is an object that has the key, else None."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value
