"""All answers of one request: asked for together, read as they come, given up together."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request

from ddtree.config import MAX_SEED, SamplingParams, Speculation
from ddtree.errors import ContextLengthExceeded
from ddtree.server.logprobs import Spelling
from ddtree.server.options import ServerOptions
from ddtree.server.problems import ApiError, echo
from ddtree.server.usage import Tally
from ddtree.server.worker import Answer, EngineWorker

if TYPE_CHECKING:
    from ddtree.engine import Chunk, Engine

T = TypeVar("T")
SHOWN_NAMES = 5  # of the served models, in the message about one that is not
# Tokenizing holds Python's lock, so a text that cannot fit is refused by its length alone. Tokens are rarely longer
# than 16 characters: a longer text fits only if its tokens average over 32, as in long runs of spaces alone.
MAX_CHARACTERS_PER_TOKEN = 32


class ClientGone(Exception):
    """The client closed the connection before it had an answer."""


@dataclass(frozen=True)
class Service:
    """What every route works with."""

    engine: "Engine"
    worker: EngineWorker
    options: ServerOptions
    spelling: Spelling

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text and are no part of it."""
        end = self.engine.text.end_id
        return frozenset(() if end is None else (end,))

    def reports_metrics(self, asked: bool) -> bool:
        """Whether an answer carries vLLM's block of acceptance figures: its request or the operator wants it."""
        return asked or self.options.spec_decode_metrics == "summary"

    def check_model(self, asked: str | None) -> None:
        """Raises `ApiError` for a model that is not served here."""
        names = self.options.served_model_names
        if asked is not None and asked not in names:
            shown = [echo(name) for name in names[:SHOWN_NAMES]]
            more = f" (/v1/models lists all {len(names)})" if len(names) > SHOWN_NAMES else ""
            known = " or ".join([*([", ".join(shown[:-1])] if shown[1:] else []), shown[-1]])
            message = f"the model {echo(asked)} is not served here: ask for {known}{more}, or leave `model` out"
            raise ApiError(message, status=404, param="model", code="model_not_found")

    def check_length(self, characters: int, param: str) -> None:
        """Raises `ContextLengthExceeded` for texts that cannot fit the context, before any work is put into them."""
        context = self.engine.max_model_len
        if characters > context * MAX_CHARACTERS_PER_TOKEN:
            said = f"`{param}` has {characters} characters, too many for the context of {context} tokens: shorten it"
            raise ContextLengthExceeded(said, param=param)


@dataclass(frozen=True)
class Order:
    """What a request asks of the engine: `n` answers to each of its prompts."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    speculation: Speculation | None  # None: the engine's own
    n: int

    def check(self, engine: "Engine") -> "Order":
        """Itself. Raises what is wrong with it; compiles its grammar, which may take a second or two."""
        for prompt in self.prompts:
            engine.check(prompt, self.params, self.speculation)
        return self


class Choices:
    """The answers of one request: `n` for each of its prompts, in their order. Closing is `cancel`."""

    def __init__(self, answers: Sequence[Answer], per_prompt: int) -> None:
        self._answers = answers
        prompts = [answer.prompt for answer in answers[::per_prompt]]
        self.tally = Tally(sum(map(len, prompts)), len(answers), range(0, len(answers), per_prompt))
        self.prompts = [prompt for prompt in prompts for _ in range(per_prompt)]

    @classmethod
    def ask(cls, worker: EngineWorker, order: "Order") -> "Choices":
        """Submits all of them, or none. Raises what the worker raises."""
        params = order.params
        every = [replace(params, seed=_nth_seed(params.seed, number)) for number in range(order.n)]
        answers: list[Answer] = []
        try:
            for prompt in order.prompts:
                answers += worker.submit_all(prompt, every, order.speculation)
        except BaseException:
            for answer in answers:
                answer.cancel()
            raise
        return cls(answers, len(every))

    def __len__(self) -> int:
        return len(self._answers)

    def cancel(self) -> None:
        """Gives up what is not finished."""
        for answer in self._answers:
            answer.cancel()

    async def chunks(self) -> "AsyncIterator[tuple[int, Chunk]]":
        """Every chunk with the number of its choice, as they come. Raises what the first failure raises.

        A request that lost a choice cannot be answered any more, so the rest is for the caller to cancel.
        """
        if len(self._answers) == 1:  # without the cost of tasks
            while True:
                chunk = await self._answers[0].next()
                self.tally.add(0, chunk)
                yield 0, chunk
                if chunk.generation is not None:
                    return
        waits = {asyncio.ensure_future(answer.next()): index for index, answer in enumerate(self._answers)}
        try:
            while waits:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=waits.__getitem__):
                    index, chunk = waits.pop(task), task.result()
                    self.tally.add(index, chunk)
                    yield index, chunk
                    if chunk.generation is None:
                        waits[asyncio.ensure_future(self._answers[index].next())] = index
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)


def _nth_seed(seed: int | None, number: int) -> int | None:
    """The seed of a prompt's choice: the choices of one prompt must differ, and those of the same request not."""
    if seed is None:
        return None
    return (seed + number + MAX_SEED + 1) % (2 * (MAX_SEED + 1)) - MAX_SEED - 1


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
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
