"""The one thread that runs the engine, and the way its chunks take to the event loop.

The thread takes orders (add, abort, drop what is kept for reuse) between the steps of the engine's scheduler, which
decides what runs and what waits. Each step's chunks go to the event loop in one call, however many requests share it.
"""

import asyncio
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ddtree.config import SamplingParams, Speculation
from ddtree.errors import DDTreeError, InvalidOption
from ddtree.server.answer import Answer, EngineFailed, EngineStopped, QueueFull, post
from ddtree.server.watcher import Unwatched, Watcher

if TYPE_CHECKING:
    from ddtree.engine import Chunk, Engine
    from ddtree.engine.observer import Observer
    from ddtree.engine.request import Request
    from ddtree.engine.scheduler import SchedulerStats

__all__ = ["Answer", "EngineFailed", "EngineStopped", "EngineWorker", "QueueFull"]

log = logging.getLogger("ddtree.server")
T = TypeVar("T")

CUT_SECONDS = 2.0  # how long a stop waits for the round in flight, after the requests were told
RETRY_SECONDS = (1, 60)  # the bounds of what a client is told to wait
RESTART_SECONDS = 10  # what a client is told when the server stops: a restart takes about that long
SMOOTHING = 0.1  # weight of the newest request in the mean duration


class EngineWorker:
    """Runs an engine for event loops: any number of requests, as many at once as the scheduler has slots.

    Its thread starts with the first request and ends with `stop`, or when the engine proves unusable; then
    `check` says why.
    """

    def __init__(self, engine: "Engine", max_queue: int = 256) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._max_queue = max_queue
        self.rejected = 0  # requests that found the queue full
        self._stats = self._scheduler.stats()  # as the engine's thread last saw them
        self._orders: deque[Callable[[], None]] = deque()
        self._open: set[Answer] = set()  # submitted, and somebody waits for the rest
        self._ended: EngineStopped | None = None  # why nothing more is taken
        self._changed = threading.Condition()  # guards what is above, but for the engine and its numbers
        # The engine's thread's own: what the scheduler has, in the order it came.
        self._sequences: dict[Answer, Request] = {}
        self._answers: dict[Request, Answer] = {}
        self._seconds = 1.0  # a request takes that long inside the scheduler's slots, by the newest ones
        self._stopping = False
        self.watcher: Watcher = Unwatched()
        self._thread = threading.Thread(target=self._run, name="ddtree-engine", daemon=True)
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

    def _fail_all(self, error: Exception) -> None:
        with self._changed:
            left = list(self._open)
        for answer in left:
            answer.fail(error)

    # From here on: the engine's thread.

    def _run(self) -> None:
        """The thread. Whatever ends it, nobody is left waiting."""
        try:
            while self._next():
                self._step()
        except BaseException as error:
            log.critical("the engine's thread has died: restart the server", exc_info=True)
            why = EngineStopped("the engine has died: the server must be restarted", "engine_dead")
            with self._changed:
                self._ended = why  # also over a stop: it tells more
            for answer in list(self._sequences):
                answer.fail(EngineFailed(error))
            self._sequences.clear()
            self._answers.clear()
            self._fail_all(why)

    def _next(self) -> bool:
        """Carries out the orders that came, waits for one where nothing runs. False when the thread has no more to do.

        Once the worker is ended, requests that wait are told, and those that run go on.
        """
        while True:
            self._stats = self._scheduler.stats()
            with self._changed:
                while not self._orders and not self._sequences and self._ended is None:
                    self._changed.wait()
                orders, ended = list(self._orders), self._ended
                self._orders.clear()
            for order in orders:
                order()
            if ended is not None:
                for answer in self._waiting():
                    answer.fail(ended)
                    self._abort(answer)
                return bool(self._sequences)
            if self._sequences:
                return True

    def _waiting(self) -> list[Answer]:
        """Those that the scheduler has not begun: it takes them in their order, so they are the last ones."""
        return list(self._sequences)[self._scheduler.stats().running :]

    def _add(self, answer: Answer) -> None:
        if answer.cancelled:
            return
        if self._ended is not None:
            answer.fail(self._ended)
            return
        try:
            sequence = self._scheduler.add(answer.prompt, answer.params, answer.speculation or self._engine.speculation)
        except DDTreeError as error:
            self._finish(answer)
            post(answer.loop, [(answer, error)])
        except Exception as error:
            log.exception(
                "request %s: the engine failed to take its %d tokens", answer.note.request_id, len(answer.prompt)
            )
            self.watcher.dropped(answer, "error")
            self._finish(answer)
            post(answer.loop, [(answer, EngineFailed(error))])
        else:
            self._sequences[answer] = sequence
            self._answers[sequence] = answer

    def _abort(self, answer: Answer) -> None:
        sequence = self._sequences.pop(answer, None)
        if sequence is not None:
            del self._answers[sequence]
            self._scheduler.abort(sequence)
            self.watcher.dropped(answer, "abort")

    def _finish(self, answer: Answer) -> None:
        """Nothing more is done for it."""
        sequence = self._sequences.pop(answer, None)
        if sequence is not None:
            del self._answers[sequence]
        answer.close()
        with self._changed:
            self._open.discard(answer)

    def _step(self) -> None:
        try:
            chunks = self._scheduler.step()
        except Exception as error:
            self._recover(error)
            return
        items: dict[asyncio.AbstractEventLoop, list[tuple[Answer, Chunk | Exception]]] = {}
        for sequence, chunk in chunks:
            answer = self._answers.get(sequence)
            if answer is None or answer.cancelled:
                continue
            self.watcher.chunk(answer, chunk)
            items.setdefault(answer.loop, []).append((answer, self._item(answer, chunk)))
        for loop, batch in items.items():
            post(loop, batch)

    def _item(self, answer: Answer, chunk: "Chunk") -> "Chunk | Exception":
        """What the answer gets for a chunk."""
        if chunk.error is not None:
            self._finish(answer)
            self.watcher.dropped(answer, "error")
            if isinstance(chunk.error, DDTreeError):
                return chunk.error
            log.error("request %s: the engine failed", answer.note.request_id, exc_info=chunk.error)
            return EngineFailed(chunk.error)
        if chunk.generation is not None:
            done, note = chunk.generation, answer.note
            self._seconds += SMOOTHING * (done.prefill_seconds + done.decode_seconds - self._seconds)
            note.completion_tokens += len(done.token_ids)  # an HTTP request may have several answers
            self._finish(answer)
        return chunk

    def _recover(self, error: Exception) -> None:
        """After a step that failed: everyone inside is told, the engine starts afresh and shows that it still can.

        Requests that waited are queued again, once: the fault is hardly theirs. What this raises ends the thread, so
        that `/health` does not call an engine well whose device is lost.
        """
        inside = ", ".join(answer.note.request_id for answer in self._sequences)
        log.error("the engine failed with these requests inside: %s", inside, exc_info=error)
        waiting = [answer for answer in self._waiting() if not answer.retried]
        if len(waiting) == len(self._sequences):  # it failed before anything ran: one of these may be the reason
            waiting = []
        kept = set(waiting)
        for answer in list(self._sequences):
            if answer not in kept:
                answer.fail(EngineFailed(error))
                self.watcher.dropped(answer, "error")
        self._sequences.clear()
        self._answers.clear()
        self._scheduler.reset()
        self._probe()
        for answer in waiting:
            answer.retried = True
            self._add(answer)

    def _probe(self) -> None:
        """Generates one token. Raises what the engine raises."""
        probe = self._scheduler.add(
            self._engine.text.encode("a"), SamplingParams(max_tokens=1), self._engine.speculation
        )
        while True:
            for sequence, chunk in self._scheduler.step():
                if sequence is probe and chunk.error is not None:
                    raise chunk.error
                if sequence is probe and chunk.generation is not None:
                    return
            if not self._scheduler.has_work:
                raise RuntimeError("the engine's scheduler dropped its probe")
