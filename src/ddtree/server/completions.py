"""`POST /v1/completions`: text goes on, without a chat template."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response

from ddtree.config import Grammar
from ddtree.errors import DDTreeError
from ddtree.server.choices import Choices, Order, Service, unless_gone
from ddtree.server.logprobs import LegacyLogprobs, joined
from ddtree.server.problems import as_api_error
from ddtree.server.schemas import CompletionRequest
from ddtree.server.schemas.base import invalid
from ddtree.server.schemas.responses import SUCCESS_TEXT
from ddtree.server.stream import Head, Reports, respond
from ddtree.server.tools import ToolPlan, answer_grammar

if TYPE_CHECKING:
    from ddtree.engine import Chunk, Generation

KIND = "text_completion"  # of whole answers and of chunks alike, as OpenAI has it


def add_completion_route(app: FastAPI, service: Service) -> None:
    """Adds the route to `app`."""

    @app.post("/v1/completions", response_model=None, responses=SUCCESS_TEXT)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continues texts, whole or as a stream of server-sent events."""
        service.check_model(body.model)
        for prompt in body.prompts:
            if isinstance(prompt, str):
                service.check_length(len(prompt), "prompt")
        _check_count(service, len(body.prompts), body.n or 1)
        order, shown = await unless_gone(request, service.worker.in_text_thread(lambda: _order(service, body)))
        choices = Choices.ask(service.worker, order)
        return await respond(request, CompletionWriter(service, body, choices, shown), choices, bool(body.stream))


def _check_count(service: Service, prompts: int, n: int) -> None:
    """Raises `ApiError` for more answers than fit slots and queue at any time: to try again would not help."""
    most = service.worker.stats().slots + service.options.max_queue
    if prompts * n > most:
        asks = f"`prompt` times `n` asks for {prompts * n} answers" if prompts > 1 else f"`n` asks for {n} answers"
        said = f"{asks}, but this server takes at most {most}: ask for fewer"
        raise invalid(said, "prompt" if prompts > 1 else "n")


def _order(service: Service, body: CompletionRequest) -> tuple[Order, list[str]]:
    """What the engine is asked for; and the text of each prompt, where answers are to begin with it."""
    engine, text = service.engine, service.engine.text
    ids = [text.encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts]
    try:
        params = body.sampling(service.options.default_seed, _grammar(body))
        order = Order(ids, params, body.speculation(engine.speculation), body.n or 1).check(engine)
    except DDTreeError as error:
        raise as_api_error(error, form=body.form) from error
    if not body.echo:
        return order, []
    return order, [prompt if isinstance(prompt, str) else text.decode(prompt) for prompt in body.prompts]


def _grammar(body: CompletionRequest) -> Grammar | None:
    """What the answers must follow."""
    return answer_grammar(ToolPlan(), body.plain_format, structure=body.plain_structure)


class CompletionWriter:
    """Bodies of text completions, whole and streamed."""

    def __init__(self, service: Service, body: CompletionRequest, choices: Choices, shown: Sequence[str]) -> None:
        """shown: the text of each prompt, where answers begin with it; empty otherwise."""
        count, per_prompt = len(choices), body.n or 1
        self._head = Head("cmpl", service.options.name)
        self._body, self._choices = body, choices
        self._echoes = [text for text in shown for _ in range(per_prompt)] or [""] * count
        self._logprobs = [LegacyLogprobs(service.spelling, service.end_ids) for _ in range(count)]
        self._reports = Reports(count, service.reports_metrics(body.metrics), body.include_usage)
        self._begun: set[int] = set()
        self._taken: list[list[tuple[str, dict[str, Any] | None]]] = [[] for _ in range(count)]
        self._ends: dict[int, Generation] = {}

    def start(self) -> list[dict[str, Any]]:
        """Nothing: a choice begins with its first text."""
        return []

    def write(self, index: int, chunk: "Chunk") -> list[dict[str, Any]]:
        """A body for the chunk's text, and one more for the end of the choice."""
        bodies = []
        text, logprobs = self._read(index, chunk)
        begins = index not in self._begun
        self._begun.add(index)
        if begins:
            text = self._echoes[index] + text
        show_ids = bool(self._body.return_token_ids)
        if text or logprobs is not None or (show_ids and (begins or chunk.token_ids)):
            choice: dict[str, Any] = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
            if show_ids and begins:
                choice["prompt_token_ids"] = list(self._choices.prompts[index])
            if show_ids:
                choice["token_ids"] = chunk.token_ids
            bodies.append(self._chunk([choice]))
        if (generation := chunk.generation) is not None:
            choice = {"index": index, "text": "", "logprobs": None, "finish_reason": generation.finish_reason}
            choice["stop_reason"] = generation.stop_reason
            root = self._reports.finish(choice, generation)
            bodies.append(self._chunk([choice], **root))
        return bodies

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        if self._body.continuous_usage:
            more["usage"] = self._choices.tally.usage()
        elif self._body.include_usage:
            more["usage"] = None
        return self._head.body(KIND, choices, **more)

    def end(self) -> list[dict[str, Any]]:
        """The chunk of usage, where it was asked for."""
        if not self._body.include_usage:
            return []
        return [self._head.body(KIND, [], usage=self._choices.tally.usage(), **self._reports.metrics())]

    def _read(self, index: int, chunk: "Chunk") -> tuple[str, dict[str, Any] | None]:
        if self._body.logprobs is None or not chunk.logprobs:
            return chunk.text, None
        return chunk.text, self._logprobs[index].push(chunk.logprobs)

    def take(self, index: int, chunk: "Chunk") -> None:
        """Keeps a chunk for the whole answer."""
        self._taken[index].append(self._read(index, chunk))
        if chunk.generation is not None:
            self._ends[index] = chunk.generation

    def whole(self) -> dict[str, Any]:
        """The whole answer."""
        root: dict[str, Any] = {}
        choices = [self._whole_choice(index, root) for index in range(len(self._choices))]
        return self._head.body(KIND, choices, usage=self._choices.tally.usage(), **root)

    def _whole_choice(self, index: int, root: dict[str, Any]) -> dict[str, Any]:
        generation, taken = self._ends[index], self._taken[index]
        choice: dict[str, Any] = {
            "index": index,
            "text": self._echoes[index] + "".join(text for text, _ in taken),
            "logprobs": joined(block for _, block in taken if block) or None,
            "finish_reason": generation.finish_reason,
            "stop_reason": generation.stop_reason,
        }
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = list(self._choices.prompts[index])
            choice["token_ids"] = generation.token_ids
        root.update(self._reports.finish(choice, generation))
        return choice
