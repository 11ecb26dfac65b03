"""`POST /v1/chat/completions`: messages through the model's chat template."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response

from ddtree.errors import DDTreeError
from ddtree.server.choices import Choices, Order, Service, unless_gone
from ddtree.server.deltas import ChatPlan, ChoiceReader
from ddtree.server.logprobs import chat_logprobs, joined
from ddtree.server.problems import as_api_error
from ddtree.server.schemas import ChatRequest
from ddtree.server.schemas.responses import SUCCESS_CHAT
from ddtree.server.stream import Head, Reports, respond

if TYPE_CHECKING:
    from ddtree.engine import Chunk

WHOLE, CHUNK = "chat.completion", "chat.completion.chunk"


def add_chat_route(app: FastAPI, service: Service) -> None:
    """Adds the route to `app`."""

    @app.post("/v1/chat/completions", response_model=None, responses=SUCCESS_CHAT)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answers a chat, whole or as a stream of server-sent events."""
        service.check_model(body.model)
        messages = body.for_template()
        _check_length(service, body, messages)
        order, reader = await unless_gone(
            request, service.worker.in_text_thread(lambda: _order(service, body, messages))
        )
        choices = Choices.ask(service.worker, order)
        return await respond(request, ChatWriter(service, body, choices, reader), choices, bool(body.stream))


def _order(
    service: Service, body: ChatRequest, messages: list[dict[str, Any]]
) -> tuple[Order, Callable[[], ChoiceReader]]:
    """What the engine is asked for, and what makes a reader of a choice."""
    engine = service.engine
    plan = ChatPlan(service, body)
    prompt = plan.encode(messages)
    try:
        params = body.sampling(service.options.default_seed, plan.grammar())
        order = Order([prompt], params, body.speculation(engine.speculation), body.n or 1).check(engine)
    except DDTreeError as error:
        raise as_api_error(error, prompt="messages", form=body.form) from error
    return order, plan.reader()


def _check_length(service: Service, body: ChatRequest, messages: list[dict[str, Any]]) -> None:
    """Raises `ContextLengthExceeded` for a chat that cannot fit the context, before any work is put into it."""
    service.check_length(sum(len(message["content"]) for message in messages), "messages")
    if body.tools:
        service.check_length(len(json.dumps(body.plain_tools)), "tools")


class ChatWriter:
    """Bodies of chat completions, whole and streamed."""

    def __init__(
        self, service: Service, body: ChatRequest, choices: Choices, reader: Callable[[], ChoiceReader]
    ) -> None:
        """reader: makes what turns the chunks of one choice into deltas."""
        self._head = Head("chatcmpl", service.options.name)
        self._spelling = service.spelling
        self._body, self._choices = body, choices
        self._readers = [reader() for _ in range(len(choices))]
        self._logprobs: list[list[dict[str, Any]]] = [[] for _ in range(len(choices))]
        self._reports = Reports(len(choices), service.reports_metrics(body.metrics), body.include_usage)

    def start(self) -> list[dict[str, Any]]:
        """The role, for each choice; with the first the prompt's ids, where they were asked for."""
        delta = {"role": "assistant", "content": ""}
        bodies = [self._chunk(self._choice(index, delta)) for index in range(len(self._choices))]
        if self._body.return_token_ids:
            bodies[0]["prompt_token_ids"] = list(self._choices.prompts[0])
        return bodies

    def write(self, index: int, chunk: "Chunk") -> list[dict[str, Any]]:
        """A body for what the chunk adds, and one more for the end of the choice."""
        bodies, reader = [], self._readers[index]
        delta, logprobs = self._read(index, chunk)
        show_ids = bool(self._body.return_token_ids and chunk.token_ids)
        if delta or logprobs is not None or show_ids:
            choice = self._choice(index, delta or {"content": ""})
            choice["logprobs"] = logprobs
            if show_ids:
                choice["token_ids"] = chunk.token_ids
            bodies.append(self._chunk(choice))
        if (generation := chunk.generation) is not None:
            choice = self._choice(index, {}, reader.finish_reason)
            choice["stop_reason"] = generation.stop_reason
            bodies.append(self._chunk(choice, **self._reports.finish(choice, generation)))
        return bodies

    def _choice(self, index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def _chunk(self, choice: dict[str, Any], **more: Any) -> dict[str, Any]:
        if self._body.continuous_usage:
            more["usage"] = self._choices.tally.usage()
        elif self._body.include_usage:
            more["usage"] = None
        return self._head.body(CHUNK, [choice], **more)

    def end(self) -> list[dict[str, Any]]:
        """The chunk of usage, where it was asked for."""
        if not self._body.include_usage:
            return []
        return [self._head.body(CHUNK, [], usage=self._choices.tally.usage(), **self._reports.metrics())]

    def _read(self, index: int, chunk: "Chunk") -> tuple[dict[str, Any], dict[str, Any] | None]:
        reader = self._readers[index]
        delta = reader.push(chunk)
        self._choices.tally.thought(index, reader.reasoning_tokens)
        asked = self._body.logprobs and chunk.logprobs
        return delta, chat_logprobs(self._spelling, chunk.logprobs) if asked else None

    def take(self, index: int, chunk: "Chunk") -> None:
        """Keeps a chunk for the whole answer."""
        delta, logprobs = self._read(index, chunk)
        self._readers[index].keep(delta)
        if logprobs is not None:
            self._logprobs[index].append(logprobs)

    def whole(self) -> dict[str, Any]:
        """The whole answer."""
        root: dict[str, Any] = {}
        choices = [self._whole_choice(index, root) for index in range(len(self._choices))]
        if self._body.return_token_ids:
            root["prompt_token_ids"] = list(self._choices.prompts[0])
        return self._head.body(WHOLE, choices, usage=self._choices.tally.usage(), **root)

    def _whole_choice(self, index: int, root: dict[str, Any]) -> dict[str, Any]:
        reader = self._readers[index]
        generation = reader.generation
        choice: dict[str, Any] = {
            "index": index,
            "message": reader.message(),
            "logprobs": joined(self._logprobs[index]) or None,
            "finish_reason": reader.finish_reason,
            "stop_reason": generation.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = generation.token_ids
        root.update(self._reports.finish(choice, generation))
        return choice
