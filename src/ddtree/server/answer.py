"""One request between the event loop that waits for it and the engine's thread that works on it."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ddtree.config import SamplingParams, Speculation
from ddtree.server.context import RequestNote, current

if TYPE_CHECKING:
    from ddtree.engine import Chunk, Generation


class EngineStopped(Exception):
    """The engine takes no request any more, or gave this one up: the server stops, or its thread has died."""

    def __init__(self, message: str, code: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after  # seconds after which another try may succeed; None: nobody knows


class QueueFull(Exception):
    """As many requests wait already as may wait."""

    def __init__(self, limit: int, retry_after: int) -> None:
        super().__init__(
            f"{limit} requests are waiting already, and no more are queued: try again in about {retry_after} s"
        )
        self.retry_after = retry_after  # seconds


class EngineFailed(Exception):
    """The engine raised something that is no fault of the caller's."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"the engine failed while generating ({type(cause).__name__}): the server's log says where")


class Answer:
    """One request on its way: filled by the engine's thread, read by the event loop that it was made in.

    Its last chunk carries the generation; after that there is nothing to read. Reading raises what went wrong:
    a `DDTreeError` that the caller can mend, `EngineFailed` or `EngineStopped`.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        speculation: Speculation | None = None,
        on_cancel: "Callable[[Answer], None] | None" = None,
    ) -> None:
        self.prompt = prompt
        self.params = params
        self.speculation = speculation
        self.loop = asyncio.get_running_loop()
        self.submitted = time.monotonic()
        self.token_time: float | None = None  # when its newest token came; the engine's thread writes it
        self.note = current.get() or RequestNote("-")
        self.retried = False  # whether it was queued again after a failure that was not its own
        self._items: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        self._closed = threading.Event()  # nothing more is put: cancelled, or ended
        self._on_cancel = on_cancel

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the rest, or there is none."""
        return self._closed.is_set()

    def cancel(self) -> None:
        """Gives the rest up: the engine drops the request, or stops within a round. Never too late, never blocks."""
        if not self._closed.is_set():
            self._closed.set()
            if self._on_cancel is not None:
                self._on_cancel(self)

    def deliver(self, item: "Chunk | Exception") -> None:
        """Takes the next chunk, or the error that ends the answer. In the event loop only."""
        self._items.put_nowait(item)

    def close(self) -> None:
        """The engine has nothing more to do for it: a later `cancel` is without effect."""
        self._closed.set()

    def fail(self, error: Exception) -> None:
        """Ends the answer with an error, and the work for it. From any thread."""
        if self.cancelled:
            return
        self.cancel()
        post(self.loop, [(self, error)])

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


def post(loop: asyncio.AbstractEventLoop, items: "Sequence[tuple[Answer, Chunk | Exception]]") -> None:
    """Hands items to answers of one event loop, which is woken once for all of them. From any thread."""
    try:
        loop.call_soon_threadsafe(_deliver, items)
    except RuntimeError:  # the loop is closed: nobody reads
        for answer, _ in items:
            answer.cancel()


def _deliver(items: "Sequence[tuple[Answer, Chunk | Exception]]") -> None:
    for answer, item in items:
        answer.deliver(item)
