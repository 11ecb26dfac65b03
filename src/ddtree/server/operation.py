"""What an operator needs around the API: health, metrics, facts about the server, keys, request ids, the access log."""

import hashlib
import hmac
import logging
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ddtree import __version__
from ddtree.config import MODES
from ddtree.server.body import BodyGuard
from ddtree.server.context import RequestNote, choose_request_id, current
from ddtree.server.exposition import Exposition
from ddtree.server.logs import RoundLog
from ddtree.server.metrics import Metrics
from ddtree.server.options import ServerOptions
from ddtree.server.problems import ApiError, as_api_error
from ddtree.server.worker import EngineWorker

if TYPE_CHECKING:
    from ddtree.engine import Engine

log = logging.getLogger("ddtree.server")
access = logging.getLogger("ddtree.access")

MAX_LOGGED = 200  # characters of a path in the access log
POLLED = ("/health", "/metrics")  # asked for every few seconds: their answers would bury the others in the log
CLIENT_LEFT = 499  # a number that proxies log, too: no answer was sent, since nobody was there


def add_operation(app: FastAPI, engine: "Engine", worker: EngineWorker, options: ServerOptions) -> Metrics:
    """Adds the routes of operators, and everything that stands between the socket and all routes.

    Returns what is counted. The worker and the engine's scheduler report to it from now on.
    """
    metrics = Metrics()
    worker.watcher = metrics
    worker.observe(RoundLog(metrics) if options.log_level == "debug" else metrics)
    app.add_middleware(BodyGuard, max_bytes=options.max_body_bytes)
    app.add_middleware(Doorman, worker=worker, metrics=metrics, options=options)
    if options.allowed_origins:  # outermost: a browser asks beforehand, without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    _add_health(app, worker)
    _add_metrics(app, Exposition(metrics, worker, options.name, options.vllm_metrics))
    _add_server_info(app, engine, worker, options)
    _add_reset(app, worker)
    return metrics


def _add_health(app: FastAPI, worker: EngineWorker) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> dict[str, str]:
        """200 when the engine can generate; 503 while the server stops, and when the engine is lost."""
        worker.check()
        return {"status": "ok"}


def _add_metrics(app: FastAPI, exposition: Exposition) -> None:
    forms: dict[int | str, dict[str, Any]] = {
        200: {
            "description": "Prometheus' exposition format",
            "content": {"text/plain": {}, "application/openmetrics-text": {}},
        }
    }

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics", response_class=Response, responses=forms)
    async def metrics(request: Request) -> Response:
        """What the server counted since its start, for Prometheus."""
        text, content_type = exposition.text(request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})


def _add_server_info(app: FastAPI, engine: "Engine", worker: EngineWorker, options: ServerOptions) -> None:
    started = time.monotonic()
    speculation = engine.speculation
    info = engine.info()
    facts = {
        "version": __version__,
        "served_model_names": list(options.served_model_names),
        **info,
        "speculation": {
            "mode": speculation.mode,
            "tree_budget": speculation.tree_budget,
            "tree_top_k": speculation.tree_top_k,
            "tree_spine": speculation.tree_spine,
            "tree_context": speculation.tree_context,
        },
        "limits": {
            "max_model_len": engine.max_model_len,
            "max_running_requests": worker.stats().slots,
            "max_queue": options.max_queue,
            "max_body_bytes": options.max_body_bytes,
            "shutdown_timeout": options.shutdown_timeout,
            "kv_tokens": worker.stats().kv_tokens_capacity,
        },
        "capabilities": {
            "modes": list(MODES) if info.get("drafter") else ["ar"],
            "reasoning_parser": options.reasoning_parser,
            "tool_call_parser": options.tool_call_parser,
            "default_seed": options.default_seed,
            "api_key": bool(options.api_keys),  # whether one is needed; never the key
            "vllm_metrics": options.vllm_metrics,
        },
    }

    @app.head("/server_info", include_in_schema=False)
    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        """What is served, on what, and within which limits."""
        return {**facts, "uptime_seconds": round(time.monotonic() - started, 3)}


def _add_reset(app: FastAPI, worker: EngineWorker) -> None:
    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(reset_running_requests: bool = False, reset_external: bool = False) -> dict[str, str]:
        """Drops what finished requests left for reuse (vLLM's route): later requests compute their prompts anew."""
        if reset_running_requests:
            said = "`reset_running_requests` is not supported by this server: a running request keeps its context"
            raise ApiError(said, param="reset_running_requests", code="unknown_parameter")
        if reset_external:
            said = "`reset_external` is not supported by this server: there is no cache outside of it"
            raise ApiError(said, param="reset_external", code="unknown_parameter")
        worker.drop_prefixes()
        return {"status": "ok"}


class Doorman:
    """ASGI middleware around everything else: gives each request its id, checks its key, counts and logs its answer.

    A bug in what it surrounds becomes an answer in OpenAI's shape, under the request's id.
    """

    def __init__(self, app: ASGIApp, worker: EngineWorker, metrics: Metrics, options: ServerOptions) -> None:
        self._app, self._worker, self._metrics = app, worker, metrics
        self._keys = [_digest(key) for key in options.api_keys]
        self._logs = options.access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        note = RequestNote(choose_request_id(Headers(scope=scope).get("x-request-id")))
        reply = _Reply(send, note, self._worker)
        outside = current.set(note)
        try:
            await self._answer(scope, receive, reply)
        finally:
            route = getattr(scope.get("route"), "path", "other")  # a path's pattern: of paths there is no end
            status = reply.status or CLIENT_LEFT
            self._metrics.response(route, status)
            if self._logs:
                _log_access(scope, note, reply, time.monotonic() - began)
            current.reset(outside)

    async def _answer(self, scope: Scope, receive: Receive, reply: "_Reply") -> None:
        try:
            if self._keys and _is_locked(scope["path"]):
                self._check_key(Headers(scope=scope).get("authorization", ""))
            await self._app(scope, receive, reply.send)
        except Exception as error:
            if reply.status is not None:  # the head is gone already: the connection must break
                raise
            if not isinstance(error, ApiError):
                log.exception("a bug in the server")
            problem = as_api_error(error)
            await JSONResponse(problem.body(), problem.status, problem.headers)(scope, receive, reply.send)

    def _check_key(self, header: str) -> None:
        """Raises `ApiError` (401). Takes the same time whichever key was tried, and however much of it is right."""
        scheme, _, key = header.partition(" ")
        tried, right = _digest(key.strip()), False
        for digest in self._keys:
            right |= hmac.compare_digest(digest, tried)
        if scheme.lower() == "bearer" and right:
            return
        said = "this API key is not known here" if header else "no API key was sent"
        problem = ApiError(f"{said}: send `Authorization: Bearer KEY`", status=401, code="invalid_api_key")
        problem.headers["WWW-Authenticate"] = "Bearer"
        raise problem


class _Reply:
    """The sending side of one request: adds headers, and remembers what was sent."""

    def __init__(self, send: Send, note: RequestNote, worker: EngineWorker) -> None:
        self._send, self._note, self._worker = send, note, worker
        self.status: int | None = None
        self.complete = False

    async def send(self, message: Message) -> None:
        """Passes a message on."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = self._note.request_id
            if self._worker.stopping:
                headers["Connection"] = "close"
        elif message["type"] == "http.response.body":
            self.complete = not message.get("more_body", False)
        await self._send(message)


def _is_locked(path: str) -> bool:
    """Whether a key opens this path: the API, and what changes the server. Who only watches holds no key."""
    return path in ("/v1", "/reset_prefix_cache") or path.startswith("/v1/")


def _digest(key: str) -> bytes:
    """Of equal length for every key, so that comparing tells nothing of it."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _log_access(scope: Scope, note: RequestNote, reply: _Reply, seconds: float) -> None:
    path = quote(scope["path"], safe="/:@!$&'()*+,;=~", errors="backslashreplace")[:MAX_LOGGED]
    tokens = f" {note.prompt_tokens}+{note.completion_tokens} tokens" if note.completion_tokens else ""
    left = "" if reply.complete else " (the client left)"
    status = reply.status or CLIENT_LEFT
    level = logging.DEBUG if status == 200 and scope["path"] in POLLED else logging.INFO
    # The id is in every line's head, put there by the formatter.
    access.log(level, "%s %s %d %.3f s%s%s", scope["method"][:20], path, status, seconds, tokens, left)
