"""What event loops have of the engine's thread: they submit requests and give them up, and stop it at the end."""

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ddtree.config import SamplingParams, Speculation
from ddtree.errors import InvalidOption
from ddtree.server.answer import Answer, EngineFailed, EngineStopped, QueueFull
from ddtree.server.thread import EngineThread

if TYPE_CHECKING:
    from ddtree.engine import Engine
    from ddtree.engine.observer import Observer
    from ddtree.engine.scheduler import SchedulerStats

__all__ = ["Answer", "EngineFailed", "EngineStopped", "EngineWorker", "QueueFull"]

T = TypeVar("T")

CUT_SECONDS = 2.0  # how long a stop waits for the round in flight, after the requests were told
RETRY_SECONDS = (1, 60)  # the bounds of what a client is told to wait
RESTART_SECONDS = 10  # what a client is told when the server stops: a restart takes about that long


class EngineWorker(EngineThread):
    """Runs an engine for event loops: any number of requests, as many at once as the scheduler has slots.

    Its thread starts with the first request and ends with `stop`, or when the engine proves unusable; then
    `check` says why.
    """

    def __init__(self, engine: "Engine", max_queue: int = 256) -> None:
        super().__init__(engine)
        self._max_queue = max_queue
        self.rejected = 0  # requests that found the queue full
        self._stopping = False
        # Chat templates, tokenizing and grammars need no engine, so a bad request need not wait for a round to be
        # refused. Two threads, so that a grammar that takes a second to compile does not hold everyone up.
        self._text = ThreadPoolExecutor(max_workers=2, thread_name_prefix="ddtree-text")

    @property
    def busy(self) -> int:
        """How many requests are inside the engine right now."""
        return min(len(self._sequences), self._stats.slots)  # in their order: the others wait for a slot

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping

    @property
    def unfinished(self) -> int:
        """Requests that somebody waits for."""
        return len(self._open)

    @property
    def waiting(self) -> int:
        """Of these, those that are in no slot."""
        return max(0, len(self._open) - self.busy)

    def stats(self) -> "SchedulerStats":
        """The scheduler's numbers, as they were after the newest step. From any thread."""
        return self._stats

    def observe(self, observer: "Observer") -> None:
        """Lets something look on at the engine's rounds and stages. Before the first request."""
        self._scheduler.observer = observer

    def check(self) -> None:
        """Raises `EngineStopped` when the engine cannot generate."""
        if self._ended is not None:
            raise self._ended.with_traceback(None)  # else each raise would lengthen the one kept

    async def in_text_thread(self, work: Callable[[], T]) -> T:
        """Runs work on texts beside the engine. Raises what it raises, or `EngineStopped`."""
        self.check()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._text, work)
        except RuntimeError:
            self.check()  # the executor was shut down in between
            raise

    def submit(self, prompt: Sequence[int], params: SamplingParams, speculation: Speculation | None = None) -> Answer:
        """Queues a request behind all earlier ones. Raises `EngineStopped` and `QueueFull`.

        What is wrong with the request itself is raised by the answer, within a round.
        """
        return self.submit_all(prompt, [params], speculation)[0]

    def submit_all(
        self, prompt: Sequence[int], params: Sequence[SamplingParams], speculation: Speculation | None = None
    ) -> list[Answer]:
        """Queues several requests with one prompt: all of them, or none. Raises as `submit`."""
        with self._changed:
            self.check()
            most = self._stats.slots + self._max_queue
            if len(params) > most:
                said = f"n = {len(params)} is more than this server takes: ask for at most {most}"
                raise InvalidOption(said, param="n")
            if len(self._open) + len(params) > most:
                self.rejected += 1
                raise QueueFull(self._max_queue, self._retry_after())
            answers = [Answer(prompt, one, speculation, self._cancelled) for one in params]
            if self._thread.ident is None:
                self._thread.start()
            answers[0].note.prompt_tokens += len(prompt)
            self._open.update(answers)
            self._orders.extend(partial(self._add, answer) for answer in answers)
            self._changed.notify()
        return answers

    def drop_prefixes(self) -> None:
        """Nothing that finished requests left is reused by later ones. Raises `EngineStopped`. From any thread.

        It is done within a round, and before any request that is submitted after this call.
        """
        with self._changed:
            self.check()
            if self._thread.ident is not None:  # else nothing is kept yet
                self._orders.append(self._scheduler.drop_prefixes)
                self._changed.notify()

    async def stop(self, grace: float) -> None:
        """Refuses what waits, lets running requests go on for `grace` seconds, then cuts them.

        A second call does nothing: a server calls it early, and its app again at its end.
        """
        if self._stopping:
            return
        self._stopping = True
        message = "the server is stopping: send the request again when it is back"
        self._refuse_waiting(EngineStopped(message, "server_stopping", RESTART_SECONDS))
        self._text.shutdown(wait=False)  # what was begun may end: it is told by `submit`
        if self._thread.ident is None:
            return
        await self._join(grace)
        self._fail_all(EngineStopped("the server is stopping: this answer was cut", "server_stopping", RESTART_SECONDS))
        if self._thread.is_alive():
            await self._join(CUT_SECONDS)

    async def _join(self, seconds: float) -> None:
        await asyncio.to_thread(self._thread.join, seconds)

    def _retry_after(self) -> int:
        """Seconds until the present queue will be worked off, by the newest requests' mean duration."""
        low, high = RETRY_SECONDS
        return max(low, min(high, math.ceil(self._seconds * len(self._open) / max(self._stats.slots, 1))))

    def _cancelled(self, answer: Answer) -> None:
        """An answer was given up, in whatever thread: the engine's thread drops it between two steps."""
        with self._changed:
            self._open.discard(answer)
            self._orders.append(partial(self._abort, answer))
            self._changed.notify()

    def _refuse_waiting(self, why: EngineStopped) -> None:
        """Takes nothing more, and tells those who wait; the thread ends with its running requests."""
        with self._changed:
            self._ended = self._ended or why
            begun = set(list(self._sequences)[: self._stats.slots])
            left = self._open - begun
            self._changed.notify()
        for answer in left:
            answer.fail(why)
