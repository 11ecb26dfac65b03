"""From committed tokens to a request's text: whole characters, stop strings, one end for text and ids."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


class TokenStream(Protocol):
    """Turns ids into text one by one; text that is not a whole character yet is held back."""

    def push(self, token: int) -> str:
        """Text that this token completes; may be empty."""

    def flush(self) -> str:
        """What is still held back, at the end."""


@dataclass
class RequestOutput:
    """Collects one request's tokens and text.

    Tokens are taken one by one, whatever round they came in, so the end does not depend on how they were grouped: the
    request ends at the token that completes a stop string, and the text before the stop. Of several stops completed by
    one token, the one that begins first in the text counts.
    """

    stream: TokenStream
    stops: Sequence[str]
    end_ids: frozenset[int]
    stop_ids: frozenset[int] = frozenset()  # those of end_ids that the request named itself
    min_tokens: int = 0  # stop strings that earlier tokens complete do not count
    token_ids: list[int] = field(default_factory=list)
    text: str = ""  # everything that may be shown
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or the stop id that ended it; None for an end of sequence
    _held: str = ""  # text that may be the beginning of a stop string

    @property
    def finished(self) -> bool:
        """Whether the request has ended."""
        return self.finish_reason is not None

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens; returns the text that may be shown now. After an end, further tokens are ignored."""
        before = len(self.text)
        for token in tokens:
            if self.finished:
                break
            self.token_ids.append(token)
            if token in self.end_ids:
                self.stop_reason = token if token in self.stop_ids else None
                self._finish("stop", self.stream.flush())
            else:
                self._take(self.stream.push(token))
        return self.text[before:]

    def finish(self, reason: str) -> str:
        """End here for another reason (length); returns the rest of the text."""
        before = len(self.text)
        if not self.finished:
            self._finish(reason, self.stream.flush())
        return self.text[before:]

    def _take(self, piece: str) -> None:
        pending = self._held + piece
        if len(self.token_ids) >= self.min_tokens and self._find(pending) is not None:
            self._finish("stop", piece)
            return
        keep = self._possible_stop(pending)
        self.text += pending[: len(pending) - keep]
        self._held = pending[len(pending) - keep :]

    def _finish(self, reason: str, piece: str) -> None:
        """End with the last text `piece`, unless it completes a stop string: then before that."""
        tail, found = self._held + piece, self._find(self._held + piece)
        if found is not None:
            reason, (place, self.stop_reason) = "stop", found
            tail = tail[:place]
        self.text += tail
        self._held = ""
        self.finish_reason = reason

    def _find(self, pending: str) -> tuple[int, str] | None:
        """Where the first stop string begins that ends behind the held text, and which it is.

        A whole stop string lies in the held text only where it was completed before `min_tokens`, and does not count.
        """
        held = len(self._held)
        found = ((pending.find(stop, max(0, held - len(stop) + 1)), stop) for stop in self.stops)
        return min(((place, stop) for place, stop in found if place >= 0), default=None)

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = max(map(len, self.stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self.stops):
                return size
        return 0
