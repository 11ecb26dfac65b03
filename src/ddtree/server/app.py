"""The HTTP app: its routes, and one shape for everything that goes wrong."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ddtree import __version__
from ddtree.errors import DDTreeError
from ddtree.server.chat import add_chat_route
from ddtree.server.choices import ClientGone, Service
from ddtree.server.completions import add_completion_route
from ddtree.server.logprobs import Spelling
from ddtree.server.operation import add_operation
from ddtree.server.options import ServerOptions
from ddtree.server.problems import ApiError, ErrorBody, as_api_error, from_unreadable, from_validation, shorten
from ddtree.server.reading import BodyRoute
from ddtree.server.schemas.responses import ModelCard, ModelList
from ddtree.server.worker import EngineFailed, EngineStopped, EngineWorker, QueueFull

if TYPE_CHECKING:
    from ddtree.engine import Engine

NOT_FOUND = {404: "not_found", 405: "method_not_allowed"}


def create_app(engine: "Engine", options: ServerOptions) -> FastAPI:
    """An OpenAI-compatible API for a loaded engine, which the app then has for itself.

    The app keeps its `EngineWorker` as `app.state.worker`; the thread starts with the first request.
    """
    worker = EngineWorker(engine, options.max_queue)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await worker.stop(options.shutdown_timeout)

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
    app.state.max_model_len = engine.max_model_len
    app.router.route_class = BodyRoute
    service = Service(engine, worker, options, Spelling(engine.text))
    _add_error_handlers(app)
    _add_model_routes(app, service)
    add_chat_route(app, service)
    add_completion_route(app, service)
    add_operation(app, engine, worker, options)
    return app


def _add_model_routes(app: FastAPI, service: Service) -> None:
    created, engine = int(time.time()), service.engine
    cards = {
        name: {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "ddtree",
            "root": str(engine.info()["model"]),
            "parent": None,
            "max_model_len": engine.max_model_len,
        }
        for name in service.options.served_model_names
    }

    @app.head("/v1/models", include_in_schema=False)
    @app.get("/v1/models", response_model=ModelList)
    async def models() -> Response:
        """The served names; all stand for one model."""
        return JSONResponse({"object": "list", "data": list(cards.values())})

    @app.head("/v1/models/{model:path}", include_in_schema=False)
    @app.get("/v1/models/{model:path}", response_model=ModelCard)
    async def model_card(model: str) -> Response:
        """One of them."""
        service.check_model(model)
        return JSONResponse(cards[model])


def _add_error_handlers(app: FastAPI) -> None:
    def answer(error: ApiError, headers: Any = None) -> JSONResponse:
        return JSONResponse(error.body(), status_code=error.status, headers={**error.headers, **(headers or {})})

    async def any_error(request: Request, error: Exception) -> Response:
        return answer(as_api_error(error))

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer(from_validation(error.errors()))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 400 and error.__cause__ is not None:  # FastAPI's word for JSON that cannot be read
            return answer(from_unreadable(error.__cause__))
        message = f"{error.detail}: {shorten(request.method)} {shorten(request.url.path)}"
        said = ApiError(message, status=error.status_code, code=NOT_FOUND.get(error.status_code))
        return answer(said, error.headers)

    async def client_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # read by nobody; the number is the one that proxies log

    for kind in (ApiError, DDTreeError, EngineFailed, EngineStopped, QueueFull, Exception):
        app.add_exception_handler(kind, any_error)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientGone, client_gone)
