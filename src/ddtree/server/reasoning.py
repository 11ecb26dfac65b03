"""Thinking apart from the answer: `<think> ... </think>`, however a stream was cut."""

from collections.abc import Sequence

from ddtree.errors import InvalidOption

OPEN, CLOSE = "<think>", "</think>"
# deepseek_r1: an answer begins with thinking, whether it says so or not. qwen3: where it or the prompt says so.
REASONING_PARSERS = ("deepseek_r1", "qwen3")


def parser_name(name: str) -> str:
    """The parser's name as `REASONING_PARSERS` has it; hyphens are accepted. Raises InvalidOption."""
    plain = name.replace("-", "_")
    if plain not in REASONING_PARSERS:
        raise InvalidOption(
            f"reasoning parser {name!r} is unknown: choose one of {', '.join(REASONING_PARSERS)}",
            param="reasoning_parser",
        )
    return plain


def begins_inside(parser: str, prompt: str, continued: str | None = None) -> bool:
    """Whether an answer begins inside the thinking part.

    Args:
        prompt: the prompt as text, or the end of it: templates close it with `<think>`, or with an empty thinking part.
        continued: the message that is gone on with, where one is: it may have opened thinking anywhere.
    Raises InvalidOption for an unknown parser.
    """
    parser = parser_name(parser)
    if continued:
        return continued.rfind(OPEN) > continued.rfind(CLOSE)
    prompt = prompt.rstrip()
    return prompt.endswith(OPEN) or (parser == "deepseek_r1" and not prompt.endswith(CLOSE))


def begun(text: str, marker: str) -> int:
    """Characters at the end of `text` that may be the beginning of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


class ReasoningSplitter:
    """Splits one answer. The pieces joined do not depend on how the text was cut.

    Nothing but the two markers (and white space before the first) is left out; a thinking part that never ends is all
    reasoning.
    """

    def __init__(self, parser: str, opened: bool) -> None:
        """opened: the answer begins inside the thinking part (`begins_inside`). Raises InvalidOption."""
        parser_name(parser)
        self._held = ""  # what is not yet known to be one or the other
        self._begun = False  # past the place where an opening marker may stand
        self._inside, self._closed = opened, False
        self._counter = _Counter()

    @property
    def reasoning_tokens(self) -> int:
        """Tokens pushed so far that are thinking, those of the markers included."""
        return self._counter.count if self._inside or self._closed else 0

    def push(self, text: str, tokens: int | Sequence[bytes] = 0) -> tuple[str, str]:
        """Takes a piece of the answer. Returns what it adds to (reasoning, content).

        tokens: the piece's tokens, each as its bytes (`Text.token_bytes`): counted up to the one that completes
        `</think>`. Or only how many they are: then all of a push count that began before the closing.
        """
        self._counter.add(tokens, self._closed)
        self._held += text
        if not self._begun and not self._begin():
            return "", ""
        if not self._inside:
            return "", self._release(len(self._held))
        end = self._held.find(CLOSE)
        if end < 0:
            return self._release(len(self._held) - begun(self._held, CLOSE)), ""
        self._inside, self._closed = False, True
        reasoning = self._release(end)
        self._release(len(CLOSE))
        return reasoning, self._release(len(self._held))

    def flush(self) -> tuple[str, str]:
        """The rest, at the end of the answer: (reasoning, content)."""
        rest = self._release(len(self._held))
        return (rest, "") if self._inside else ("", rest)

    def _begin(self) -> bool:
        """Reads an opening marker at the beginning of the text; false while there may yet be one."""
        start = self._held.lstrip()
        if len(start) < len(OPEN) and OPEN.startswith(start):
            return False
        self._begun = True
        if start.startswith(OPEN):
            self._inside = True
            self._held = start[len(OPEN) :]
        return True

    def _release(self, length: int) -> str:
        piece, self._held = self._held[:length], self._held[length:]
        return piece


class _Counter:
    """Counts the tokens up to the one that completes `</think>`."""

    def __init__(self) -> None:
        self.count = 0
        self._tail, self._done = b"", False

    def add(self, tokens: int | Sequence[bytes], closed: bool) -> None:
        if isinstance(tokens, int):
            self.count += 0 if closed else tokens
            return
        close = CLOSE.encode()
        for token in tokens:
            if self._done:
                return
            self.count += 1
            seen = self._tail + token
            self._done = close in seen
            self._tail = seen[-(len(close) - 1) :]
