"""The HTTP routes: they translate between OpenAI's API and an engine, and decide nothing about decoding."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ddtree import __version__
from ddtree.errors import ContextLengthExceeded, DDTreeError
from ddtree.server.body import BodyGuard
from ddtree.server.problems import ApiError, ErrorBody, as_api_error, echo, from_unreadable, from_validation
from ddtree.server.schemas import ChatRequest
from ddtree.server.stream import EventStream, Reply, events
from ddtree.server.worker import EngineFailed, EngineStopped, EngineWorker

if TYPE_CHECKING:
    from ddtree.engine import Engine

T = TypeVar("T")
SHUTDOWN_SECONDS = 3.0  # how long a running answer may go on after the server was told to stop
# Tokenizing holds Python's lock, so a text that cannot fit is refused by its length alone. Tokens are rarely longer
# than 16 characters: a longer text fits only if its tokens average over 32, as in long runs of spaces alone.
MAX_CHARACTERS_PER_TOKEN = 32


class ClientGone(Exception):
    """The client closed the connection before it had an answer."""


def create_app(engine: "Engine", served_model_name: str, *, default_seed: int | None = None) -> FastAPI:
    """An OpenAI-compatible API for a loaded engine, which the app then has for itself.

    `default_seed` is the seed of every request that sends none; None: a fresh one for each.
    The app keeps its `EngineWorker` as `app.state.worker`; the thread starts with the first request.
    """
    worker = EngineWorker(engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await worker.stop(SHUTDOWN_SECONDS)

    refusals: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}
    # No /docs pages: they load scripts from elsewhere. /openapi.json is served.
    app = FastAPI(
        title="ddtree",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect's body is empty, and clients of an API do not follow it
        lifespan=lifespan,
        responses=refusals,
    )
    app.state.worker = worker
    app.add_middleware(BodyGuard)
    _add_error_handlers(app)
    _add_model_routes(app, engine, worker, served_model_name)
    _add_chat_route(app, worker, served_model_name, default_seed, engine.max_model_len)
    return app


def _add_model_routes(app: FastAPI, engine: "Engine", worker: EngineWorker, name: str) -> None:
    card = {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "ddtree",
        "root": str(engine.info()["model"]),
        "parent": None,
        "max_model_len": engine.max_model_len,
    }

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> dict[str, str]:
        """200 when the engine can generate, else 503."""
        worker.check()
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{model:path}")
    async def model_card(model: str) -> dict[str, Any]:
        """One model by its name."""
        _check_model(model, name)
        return card


def _add_chat_route(app: FastAPI, worker: EngineWorker, name: str, default_seed: int | None, context: int) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answers a chat, whole or as a stream of server-sent events."""
        _check_model(body.model, name)
        params = body.sampling(default_seed)
        messages = [message.for_template() for message in body.messages]
        _check_length(messages, context)
        prompt = await _unless_gone(request, worker.encode(messages))
        answer = worker.submit(prompt, params)
        try:
            if not body.stream:
                return JSONResponse(Reply(name).whole(await _unless_gone(request, answer.whole())))
            # The first chunk is awaited before any header is sent, so that a refusal still gets its status code.
            first = await _unless_gone(request, answer.next())
        except BaseException:
            answer.cancel()
            raise
        return EventStream(answer, events(Reply(name), first, answer, body.include_usage))


def _check_model(asked: str | None, served: str) -> None:
    if asked is not None and asked != served:
        message = f"the model {echo(asked)} is not served here: ask for {echo(served)}, or leave `model` out"
        raise ApiError(message, status=404, param="model", code="model_not_found")


def _check_length(messages: Sequence[Mapping[str, str]], context: int) -> None:
    """Raises `ContextLengthExceeded` for a chat that cannot fit `context` tokens, before any work is put into it."""
    if len(messages) > context:  # templates spend tokens on each message, an empty one too
        said = f"{len(messages)} messages do not fit the context of {context} tokens: send fewer"
        raise ContextLengthExceeded(said, param="messages")
    characters = sum(len(message["content"]) for message in messages)
    if characters > context * MAX_CHARACTERS_PER_TOKEN:
        said = f"the messages' {characters} characters are too many for the context of {context} tokens"
        raise ContextLengthExceeded(f"{said}: shorten them", param="messages")


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, whose request's body is read already. Raises `ClientGone` when the client hangs up first."""

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(hung_up())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def _add_error_handlers(app: FastAPI) -> None:
    def answer(error: ApiError, headers: Any = None) -> JSONResponse:
        return JSONResponse(error.body(), status_code=error.status, headers=headers)

    async def any_error(request: Request, error: Exception) -> Response:
        return answer(as_api_error(error))

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer(from_validation(error.errors()))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 400 and error.__cause__ is not None:  # FastAPI's word for JSON that cannot be read
            return answer(from_unreadable(error.__cause__))
        message = f"{error.detail}: {request.method} {request.url.path}"
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return answer(ApiError(message, status=error.status_code, code=code), error.headers)

    async def client_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # read by nobody; the number is the one that proxies log

    for kind in (ApiError, DDTreeError, EngineFailed, EngineStopped, Exception):
        app.add_exception_handler(kind, any_error)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientGone, client_gone)
