"""The one thread that runs the engine, and the way its chunks take to the event loop.

The thread takes orders (add, abort, drop what is kept for reuse) between the steps of the engine's scheduler, which
decides what runs and what waits. Each step's chunks go to the event loop in one call, however many requests share it.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddtree.config import SamplingParams
from ddtree.errors import DDTreeError
from ddtree.server.answer import Answer, EngineFailed, EngineStopped, post
from ddtree.server.watcher import Unwatched, Watcher

if TYPE_CHECKING:
    from ddtree.engine import Chunk, Engine
    from ddtree.engine.request import Request

log = logging.getLogger("ddtree.server")

SMOOTHING = 0.1  # weight of the newest request in the mean duration


class EngineThread:
    """The thread's own half of `EngineWorker`, which hands it orders; and what the two share."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._stats = self._scheduler.stats()  # as the engine's thread last saw them
        self._orders: deque[Callable[[], None]] = deque()
        self._open: set[Answer] = set()  # submitted, and somebody waits for the rest
        self._ended: EngineStopped | None = None  # why nothing more is taken
        self._changed = threading.Condition()  # guards what is above, but for the engine and its numbers
        # The engine's thread's own: what the scheduler has, in the order it came.
        self._sequences: dict[Answer, Request] = {}
        self._answers: dict[Request, Answer] = {}
        self._seconds = 1.0  # a request takes that long inside the scheduler's slots, by the newest ones
        self.watcher: Watcher = Unwatched()
        self._thread = threading.Thread(target=self._run, name="ddtree-engine", daemon=True)

    def _fail_all(self, error: Exception) -> None:
        with self._changed:
            left = list(self._open)
        for answer in left:
            answer.fail(error)

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
