"""The one thread that runs the engine, and the way its chunks take to the event loop.

Requests are answered one after another, in the order they came. This is the seam where a scheduler that batches
requests goes in: the rest of the server knows `encode`, `submit`, `check` and `stop` only.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any

from ddtree.config import SamplingParams
from ddtree.errors import DDTreeError

if TYPE_CHECKING:
    from ddtree.engine import Chunk, Engine, Generation

log = logging.getLogger("ddtree.server")

CUT_SECONDS = 2.0  # how long a stop waits for the round in flight, after the request was told


class EngineStopped(Exception):
    """The engine takes no request any more, or gave this one up: the server stops, or its thread has died."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class EngineFailed(Exception):
    """The engine raised something that is no fault of the caller's."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"the engine failed while generating ({type(cause).__name__}): the server's log says where")


class Answer:
    """One request on its way: filled by the engine's thread, read by the event loop that it was made in.

    Its last chunk carries the generation; after that there is nothing to read. Reading raises what went wrong:
    a `DDTreeError` that the caller can mend, `EngineFailed` or `EngineStopped`.
    """

    def __init__(self, prompt: list[int], params: SamplingParams) -> None:
        self.prompt = prompt
        self.params = params
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the rest."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Gives the rest up: the engine drops the request, or stops within a round. Never too late, never blocks."""
        self._cancelled.set()

    def put(self, item: "Chunk | Exception") -> None:
        """Hands over the next chunk, or the error that ends it. May be called from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
        except RuntimeError:  # the loop is closed: nobody reads
            self.cancel()

    def fail(self, error: Exception) -> None:
        """Ends the answer with an error, and the work for it."""
        self.put(error)
        self.cancel()

    async def next(self) -> "Chunk":
        """The next chunk, which may hold no text."""
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def whole(self) -> "Generation":
        """Reads to the end and returns the generation that the last chunk carries."""
        while (generation := (await self.next()).generation) is None:
            pass
        return generation


class EngineWorker:
    """Runs an engine for an event loop: first come, first served, one request at a time.

    Its thread starts with the first request and ends with `stop`, or when the engine proves unusable; then
    `check` says why.
    """

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._waiting: deque[Answer] = deque()
        self._running: Answer | None = None
        self._ended: EngineStopped | None = None  # why nothing more is taken
        self._changed = threading.Condition()  # guards the three above
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ddtree-engine", daemon=True)
        # Chat templates and tokenizing need no engine, so a bad prompt need not wait for its turn to be refused.
        self._text = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ddtree-text")

    @property
    def busy(self) -> bool:
        """Whether a request is inside the engine right now."""
        return self._running is not None

    def check(self) -> None:
        """Raises `EngineStopped` when the engine cannot generate."""
        if self._ended is not None:
            raise self._ended.with_traceback(None)  # else each raise would lengthen the one kept

    async def encode(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a chat, ready for the assistant's turn. Raises `DDTreeError` for messages that do not fit."""
        self.check()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._text, self._engine.text.chat, [dict(message) for message in messages])

    def submit(self, prompt: list[int], params: SamplingParams) -> Answer:
        """Queues a request behind all earlier ones. Raises `EngineStopped`."""
        answer = Answer(prompt, params)
        with self._changed:
            self.check()
            if self._thread.ident is None:
                self._thread.start()
            self._waiting.append(answer)
            self._changed.notify()
        return answer

    async def stop(self, grace: float) -> None:
        """Refuses what waits, lets the running request go on for `grace` seconds, then cuts it.

        A second call does nothing: a server calls it early, and its app again at its end.
        """
        if self._stopping:
            return
        self._stopping = True
        self._end(EngineStopped("the server is stopping: send the request again when it is back", "server_stopping"))
        self._text.shutdown(wait=False)
        if self._thread.ident is None:
            return
        await asyncio.to_thread(self._thread.join, grace)
        if (running := self._running) is not None:
            running.fail(EngineStopped("the server is stopping: this answer was cut", "server_stopping"))
            await asyncio.to_thread(self._thread.join, CUT_SECONDS)

    def _end(self, why: EngineStopped) -> None:
        """Takes nothing more, and tells everyone who waits."""
        with self._changed:
            self._ended = self._ended or why
            waiting = list(self._waiting)
            self._waiting.clear()
            self._changed.notify()
        for answer in waiting:
            answer.fail(why)

    def _run(self) -> None:
        """The thread. Whatever ends it, nobody is left waiting."""
        try:
            while (answer := self._next()) is not None:
                self._serve(answer)
                self._running = None
        except BaseException as error:
            log.critical("the engine's thread has died: restart the server", exc_info=True)
            why = EngineStopped("the engine has died: the server must be restarted", "engine_dead")
            self._end(why)
            if (running := self._running) is not None:
                running.fail(EngineFailed(error))
            self._running = None

    def _next(self) -> Answer | None:
        """Waits for a request that somebody still wants; None when there will be none."""
        with self._changed:
            while True:
                while not self._waiting and self._ended is None:
                    self._changed.wait()
                if self._ended is not None:
                    return None
                answer = self._waiting.popleft()
                if not answer.cancelled:
                    self._running = answer
                    return answer

    def _serve(self, answer: Answer) -> None:
        """Generates one answer, as far as it is wanted."""
        try:
            with closing(self._stream(answer.prompt, answer.params)) as chunks:
                for chunk in chunks:
                    if answer.cancelled:
                        return
                    answer.put(chunk)
                    if chunk.generation is not None:
                        return
            raise RuntimeError("the engine's stream ended without a generation")
        except DDTreeError as error:
            answer.put(error)
        except Exception as error:
            log.exception("the engine failed on a prompt of %d tokens", len(answer.prompt))
            answer.put(EngineFailed(error))
            self._probe()

    def _stream(self, prompt: list[int], params: SamplingParams) -> Any:
        return self._engine.stream(prompt, params)

    def _probe(self) -> None:
        """After a failure: can the engine still generate at all? What this raises ends the thread, so that
        `/health` does not call an engine well whose device is lost."""
        for _ in self._stream(self._engine.text.encode("a"), SamplingParams(max_tokens=1)):
            pass
