"""Answers on the wire: whole, or as server-sent events. Shapes are OpenAI's, plus a `ddtree` block."""

import dataclasses
import json
import math
import time
import uuid
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ddtree.errors import DDTreeError
from ddtree.server.problems import as_api_error
from ddtree.server.worker import Answer, EngineFailed, EngineStopped

if TYPE_CHECKING:
    from ddtree.engine import Chunk, Generation

DONE = "data: [DONE]\n\n"


class Reply:
    """What all bodies of one answer share: id, time (seconds since 1970) and model."""

    def __init__(self, model: str) -> None:
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, generation: "Generation") -> dict[str, Any]:
        """A `chat.completion`."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": generation.text},
            "logprobs": None,
            "finish_reason": generation.finish_reason,
        }
        return self._body("chat.completion", [choice], usage=usage(generation), ddtree=speculation(generation))

    def delta(self, delta: dict[str, str], finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
        """A `chat.completion.chunk` with a piece of the message, and `more` at its root."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._body("chat.completion.chunk", [choice], **more)

    def usage(self, generation: "Generation") -> dict[str, Any]:
        """The `chat.completion.chunk` that carries usage alone."""
        return self._body("chat.completion.chunk", [], usage=usage(generation))

    def _body(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": choices, **more}


def usage(generation: "Generation") -> dict[str, int]:
    """Token counts; an end-of-text token counts, what followed it inside its round does not."""
    completion = len(generation.token_ids)
    prompt = generation.prompt_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def speculation(generation: "Generation") -> dict[str, Any]:
    """How the answer was decoded: the mode that really ran, and what its rounds accepted."""
    shadow = generation.shadow
    block = {
        "mode": generation.mode,
        "acceptance_length": generation.acceptance_length,
        "rounds": generation.rounds,
        "tok_s": generation.tok_s,
        "shadow": None if shadow is None else _finite(dataclasses.asdict(shadow)),
    }
    return _finite(block)


def _finite(block: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity, and a clock too coarse for a tiny answer gives one: null instead."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in block.items()
    }


def event(body: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"


async def events(reply: Reply, first: "Chunk", answer: Answer, include_usage: bool) -> AsyncIterator[str]:
    """An answer as server-sent events; `first` is its first chunk, read already.

    An error after this point has no status code left to travel in: it becomes an event, as OpenAI's clients expect.
    """
    more: dict[str, Any] = {"usage": None} if include_usage else {}
    try:
        yield event(reply.delta({"role": "assistant", "content": ""}, **more))
        chunk = first
        while True:
            if chunk.text:
                yield event(reply.delta({"content": chunk.text}, **more))
            if (generation := chunk.generation) is not None:
                break
            chunk = await answer.next()
        yield event(reply.delta({}, generation.finish_reason, ddtree=speculation(generation), **more))
        if include_usage:
            yield event(reply.usage(generation))
    except (DDTreeError, EngineFailed, EngineStopped) as error:
        yield event(as_api_error(error).body())
    yield DONE


class EventStream(StreamingResponse):
    """Sends server-sent events; however that ends, the engine is told that nobody reads any more."""

    def __init__(self, answer: Answer, content: AsyncIterator[str]) -> None:
        # The last header keeps proxies from collecting the stream before they pass it on.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(content, headers=headers, media_type="text/event-stream")
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.cancel()
