"""What a running replica says of itself over HTTP: health, mode, load, counters, and answers to given prompts."""

import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from ddtree.deploy.failures import DeployFailed

SHORT_S = 5.0  # for what is answered from memory
FORGET_S = 10.0  # for a cache to be dropped
RUNNING = ("ddtree_requests_running", "ddtree_requests_waiting")
SGLANG_RUNNING = ("sglang:num_running_reqs", "sglang:num_queue_reqs")
MODE_FLAG = "speculative_ddtree_mode"


@dataclass(frozen=True)
class Answer:
    """One greedy answer."""

    text: str
    token_ids: tuple[int, ...] | None  # None where the server does not give them
    tokens: int
    seconds: float
    acceptance_length: float | None = None
    rounds: int = 0
    shadow: dict[str, Any] | None = None  # as the `ddtree` block has it


@dataclass(frozen=True)
class Endpoint:
    """A replica's address, and the key that opens it."""

    address: str  # host:port
    api_key: str | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """http://host:port"""
        return f"http://{self.address}"

    @property
    def _headers(self) -> dict[bytes, bytes]:
        """In bytes: of a key that is no ASCII the server itself says what is wrong."""
        return {b"Authorization": f"Bearer {self.api_key}".encode()} if self.api_key else {}

    def forget(self) -> None:
        """Lets the server drop cached prefixes: a replica that saw prompts before would answer them faster."""
        for path in ("/reset_prefix_cache", "/flush_cache"):  # ddtree's and vLLM's; SGLang's
            try:
                self._send("POST", path, seconds=FORGET_S)
            except httpx.HTTPError:
                time.sleep(0.1)  # it is said by the answers that follow

    def healthy(self) -> tuple[bool, str]:
        """Whether it can generate, and else what it said."""
        try:
            response = self._send("GET", "/health")
        except httpx.HTTPError as error:
            return False, type(error).__name__
        return response.status_code == httpx.codes.OK, f"/health answers {response.status_code}"

    def info(self) -> dict[str, Any]:
        """Its /server_info (ddtree's, or SGLang's); empty where there is none."""
        for path in ("/server_info", "/get_server_info"):
            try:
                response = self._send("GET", path)
                found = response.json() if response.status_code == httpx.codes.OK else None
            except (httpx.HTTPError, ValueError):
                continue
            if isinstance(found, dict):
                return found
        return {}

    def counters(self) -> dict[str, float]:
        """Its /metrics, every name's values added up over all labels; empty where there are none."""
        try:
            response = self._send("GET", "/metrics")
        except httpx.HTTPError:
            return {}
        sums: dict[str, float] = {}
        for line in response.text.splitlines() if response.status_code == httpx.codes.OK else ():
            name, _, value = line.rpartition(" ")
            if not line.startswith("#") and name:
                try:
                    key = name.partition("{")[0]
                    sums[key] = sums.get(key, 0.0) + float(value)
                except ValueError:
                    continue
        return sums

    def load(self) -> tuple[int, int] | None:
        """Requests running and waiting; None where it does not tell."""
        counters = self.counters()
        for running, waiting in (RUNNING, SGLANG_RUNNING):
            if running in counters:
                return int(counters[running]), int(counters.get(waiting, 0))
        return None

    def ask(self, prompt: str, max_tokens: int, seconds: float) -> Answer:
        """One greedy chat answer. Raises DeployFailed for anything that is none."""
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "temperature": 0,
        }  # fmt: skip
        info = self.info()
        if "served_model_names" in info:  # ddtree's own server: others refuse fields that they do not know
            body |= {"model": info["served_model_names"][0], "return_token_ids": True}
        else:
            body |= {"model": self._model(), "return_meta_info": True}
        began = time.perf_counter()
        found = self._json("POST", "/v1/chat/completions", body, seconds)
        return _answer(found, time.perf_counter() - began)

    def _model(self) -> str:
        listing = self._json("GET", "/v1/models", None, SHORT_S)
        try:
            return str(listing["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise DeployFailed(f"{self.url}/v1/models lists no model") from error

    def _json(self, method: str, path: str, body: Any, seconds: float) -> dict[str, Any]:
        try:
            response = self._send(method, path, body, seconds)
            found = response.json() if response.status_code == httpx.codes.OK else None
        except (httpx.HTTPError, ValueError) as error:
            raise DeployFailed(f"{self.url}{path}: {type(error).__name__} {error}".strip()) from error
        if not isinstance(found, dict):
            said = " ".join(response.text.split())[:300]
            raise DeployFailed(f"{self.url}{path} answered {response.status_code}: {said}")
        return found

    def _send(self, method: str, path: str, body: Any = None, seconds: float = SHORT_S) -> httpx.Response:
        """Asks the replica itself, past any proxy of the environment; a connection of its own each time."""
        # verify: nothing here is https, and certificates would be read anew for each request.
        return httpx.request(
            method, f"{self.url}{path}", json=body, headers=self._headers, timeout=seconds, trust_env=False,
            verify=False,
        )  # fmt: skip


def mode_of(info: dict[str, Any]) -> str | None:
    """The mode that a server's own information names."""
    speculation = info.get("speculation")
    if isinstance(speculation, dict) and speculation.get("mode"):
        return str(speculation["mode"])
    found = info.get(MODE_FLAG)
    return str(found) if found else None


def acceptance_of(counters: dict[str, float]) -> float | None:
    """Tokens a round since the server's start, from its counters; None before a round."""
    rounds = counters.get("ddtree_mode_rounds_total", 0.0)
    if rounds:
        return 1 + counters.get("ddtree_mode_accepted_tokens_total", 0.0) / rounds
    return counters.get("sglang:spec_accept_length") or None


def same_tokens_promised(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether two servers must give the same greedy tokens: one model, and numbers that no mode changes.

    float32 on one kind of device, or half precision whose rows do not depend on their company (docs/structure.md).
    """
    kept = all(old.get(key) is not None and old.get(key) == new.get(key) for key in ("model", "dtype", "numerics"))
    kind = {str(info.get("device")).partition(":")[0] for info in (old, new)}
    exact = new.get("dtype") == "float32" or new.get("numerics") == "invariant"
    return kept and len(kind) == 1 and exact


def _answer(found: dict[str, Any], seconds: float) -> Answer:
    try:
        choice = found["choices"][0]
        message, tokens = choice["message"], int(found["usage"]["completion_tokens"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise DeployFailed(f"an answer without choices and usage: {str(found)[:300]}") from error
    block, meta = found.get("ddtree") or {}, choice.get("meta_info") or {}
    ids = choice.get("token_ids")
    rounds = block.get("rounds", meta.get("spec_verify_ct", 0)) or 0
    shadow = block.get("shadow")
    if shadow is None and "spec_cap_length" in meta:  # SGLang's field, which holds what the tree would have committed
        linear = meta.get("spec_accept_length")
        shadow = {
            "linear_acceptance_length": linear, "tree_acceptance_length": meta["spec_cap_length"], "agree": None,
        }  # fmt: skip
    text = message.get("content") or message.get("reasoning_content") or ""
    length = block.get("acceptance_length", meta.get("spec_accept_length"))
    return Answer(text, tuple(ids) if ids is not None else None, tokens, seconds, length, int(rounds), shadow)
