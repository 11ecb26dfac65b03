"""Reading request bodies: no larger and no slower than a chat can honestly be."""

import asyncio

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ddtree.server.problems import ApiError, echo

BODY_SECONDS = 30.0  # from the end of the head to the end of the body


class BodyGuard:
    """ASGI middleware: the app sees a request once its body is whole; larger and slower ones are refused here.

    Raises nothing: refusals are answers in OpenAI's shape, 413, 415 and 408.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await asyncio.wait_for(_read(Headers(scope=scope), receive, self._max_bytes), BODY_SECONDS)
        except TimeoutError:
            message = f"the body did not arrive within {BODY_SECONDS:g} s: send the request again"
            late = ApiError(message, status=408, code="request_timeout")
            # Nobody knows where on this connection the next request would begin.
            await JSONResponse(late.body(), 408, {"Connection": "close"})(scope, receive, send)
        except ApiError as error:
            # Not closed: most clients read the answer only after they sent everything, which uvicorn throws away.
            await JSONResponse(error.body(), error.status)(scope, receive, send)
        else:
            if body is not None:
                await self._app(scope, _again(body, receive), send)


async def _read(headers: Headers, receive: Receive, limit: int) -> bytes | None:
    """The whole body; None when the client hangs up first. Raises `ApiError` above `limit` bytes."""
    told = headers.get("content-length", "")
    if told.isdecimal() and int(told[:20]) > limit:
        raise _too_large(told[:20], limit)
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > limit:  # a chunked body tells no size beforehand
            raise _too_large(f"at least {size}", limit)
        if not message.get("more_body", False):
            if size:
                _check_encoding(headers.get("content-encoding", "identity"))
            return b"".join(parts)


def _check_encoding(encoding: str) -> None:
    """Raises `ApiError` for a compressed body: a small one may hold gigabytes."""
    if encoding.strip().lower() not in ("", "identity"):
        said = f"bodies with Content-Encoding {echo(encoding)} are not read: send plain JSON without that header"
        raise ApiError(said, status=415, code="unsupported_content_encoding")


def _too_large(size: str, limit: int) -> ApiError:
    message = f"the body has {size} bytes, but at most {limit} are read: send a shorter conversation"
    return ApiError(message, status=413, code="request_too_large")


def _again(body: bytes, receive: Receive) -> Receive:
    """What the app reads instead of `receive`: the body in one piece, then what comes after it."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
