"""What the worker tells to whoever watches it."""

from typing import TYPE_CHECKING, Protocol

from ddtree.server.answer import Answer

if TYPE_CHECKING:
    from ddtree.engine import Chunk


class Watcher(Protocol):
    """Sees what the worker does, in the engine's thread: each call must cost microseconds."""

    def chunk(self, answer: Answer, chunk: "Chunk") -> None:
        """A chunk is on its way to its answer; the last one has a generation or an error."""

    def dropped(self, answer: Answer, reason: str) -> None:
        """A request ended without a generation; `reason`: "abort" (given up) or "error"."""


class Unwatched:
    """The watcher that is there when nobody asked."""

    def chunk(self, answer: Answer, chunk: "Chunk") -> None:
        """Nothing."""

    def dropped(self, answer: Answer, reason: str) -> None:
        """Nothing."""
