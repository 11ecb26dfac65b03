"""Answers on the wire: what whole ones and server-sent events have in common. Shapes are OpenAI's and vLLM's."""

import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ddtree.errors import DDTreeError
from ddtree.server.choices import Choices, unless_gone
from ddtree.server.problems import as_api_error
from ddtree.server.usage import metrics, speculation
from ddtree.server.worker import EngineFailed, EngineStopped

if TYPE_CHECKING:
    from ddtree.engine import Chunk, Generation

log = logging.getLogger("ddtree.server")

DONE = "data: [DONE]\n\n"


class Head:
    """What all bodies of one answer share: id, time (seconds since 1970) and model."""

    def __init__(self, prefix: str, model: str) -> None:
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def body(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A body of `object` kind, with `more` at its root."""
        return {**self._head, "object": kind, "choices": choices, **more}


class Writer(Protocol):
    """Turns the chunks of a request's choices into bodies of one of OpenAI's APIs."""

    def start(self) -> list[dict[str, Any]]:
        """What a stream begins with."""

    def write(self, index: int, chunk: "Chunk") -> list[dict[str, Any]]:
        """The bodies that a chunk of choice `index` becomes: often one, none where it shows nothing."""

    def end(self) -> list[dict[str, Any]]:
        """What a stream ends with."""

    def take(self, index: int, chunk: "Chunk") -> None:
        """Keeps a chunk for the whole answer."""

    def whole(self) -> dict[str, Any]:
        """The whole answer, after the last chunk was taken."""


class Reports:
    """Where an answer's `ddtree` block and its `metrics` go.

    Both are at the root where there is one choice. Several choices have a `ddtree` block each, and metrics together.
    """

    def __init__(self, choices: int, metrics: bool, include_usage: bool = False) -> None:
        self._several = choices > 1
        self._metrics = metrics
        self._left = choices
        self._include_usage = include_usage
        self._generations: list[Generation] = []

    def finish(self, choice: dict[str, Any], generation: "Generation") -> dict[str, Any]:
        """Puts a finished choice's block into it, or returns it for the root of the chunk that ends the choice."""
        self._generations.append(generation)
        self._left -= 1
        root: dict[str, Any] = {}
        (choice if self._several else root)["ddtree"] = speculation(generation)
        if not self._include_usage and not self._left:  # no chunk comes after this one
            root.update(self.metrics())
        return root

    def metrics(self) -> dict[str, Any]:
        """`{"metrics": ...}` over all choices, where it was asked for: for the last body."""
        return {"metrics": metrics(self._generations)} if self._metrics else {}


def event(body: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"


async def events(
    writer: Writer, first: "tuple[int, Chunk]", rest: "AsyncIterator[tuple[int, Chunk]]"
) -> AsyncGenerator[str, None]:
    """An answer as server-sent events; `first` is its first chunk, read already.

    An error after this point has no status code left to travel in: it becomes an event, as OpenAI's clients expect.
    """
    try:
        yield _joined(writer.start() + writer.write(*first))
        async for index, chunk in rest:
            if bodies := writer.write(index, chunk):
                yield _joined(bodies)
        yield _joined(writer.end()) + DONE
        return
    except (DDTreeError, EngineFailed, EngineStopped) as error:
        said = as_api_error(error)
    except Exception as error:
        log.exception("the server failed while it streamed an answer")
        said = as_api_error(error)
    yield event(said.body()) + DONE


def _joined(bodies: Sequence[dict[str, Any]]) -> str:
    return "".join(map(event, bodies))


async def respond(request: Request, writer: Writer, choices: Choices, stream: bool) -> Response:
    """Reads the choices to their end and answers, whole or as a stream. Raises what they raise, and `ClientGone`."""
    chunks = choices.chunks()
    try:
        if not stream:
            return JSONResponse(await unless_gone(request, _whole(writer, chunks)))
        # The first chunk is awaited before any header is sent, so that a refusal still gets its status code.
        first = await unless_gone(request, anext(chunks))
    except BaseException:
        choices.cancel()
        raise
    return EventStream(choices, events(writer, first, chunks))


async def _whole(writer: Writer, chunks: "AsyncIterator[tuple[int, Chunk]]") -> dict[str, Any]:
    async for index, chunk in chunks:
        writer.take(index, chunk)
    return writer.whole()


class EventStream(StreamingResponse):
    """Sends server-sent events; however that ends, the engine is told that nobody reads any more."""

    def __init__(self, choices: Choices, content: AsyncGenerator[str, None]) -> None:
        # The last header keeps proxies from collecting the stream before they pass it on.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(content, headers=headers, media_type="text/event-stream")
        self._choices, self._content = choices, content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._content):
                await super().__call__(scope, receive, send)
        finally:
            self._choices.cancel()
