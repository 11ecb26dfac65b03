"""Tool calls out of an answer's text, as it comes: OpenAI's deltas, whatever way the text was cut."""

import json
import re
import uuid
from dataclasses import dataclass
from typing import Any

from ddtree.server.reasoning import begun
from ddtree.server.tools import CALL, CALL_END

# What a call looks like up to its arguments, which then are passed on as they come.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)', re.DOTALL)
_CLOSED = re.compile(r"\s*\}\s*")
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class ContentDelta:
    """Text of the message."""

    text: str

    def as_openai(self) -> dict[str, Any]:
        """As a delta of a chunk has it."""
        return {"content": self.text}


@dataclass(frozen=True)
class CallStart:
    """A call begins."""

    index: int
    id: str
    name: str

    def as_openai(self) -> dict[str, Any]:
        """As a delta of a chunk has it: with empty arguments."""
        function = {"name": self.name, "arguments": ""}
        return {"tool_calls": [{"index": self.index, "id": self.id, "type": "function", "function": function}]}


@dataclass(frozen=True)
class ArgumentsDelta:
    """More of a call's arguments, exactly as the model wrote them."""

    index: int
    text: str

    def as_openai(self) -> dict[str, Any]:
        """As a delta of a chunk has it."""
        return {"tool_calls": [{"index": self.index, "function": {"arguments": self.text}}]}


Delta = ContentDelta | CallStart | ArgumentsDelta


class ToolSplitter:
    """Reads one answer. Its deltas, joined, do not depend on how the text was cut.

    What is no well-formed call is content, markers included. Only white space around calls is left out, where no
    content stands beside it.
    """

    def __init__(self) -> None:
        self._held = ""  # not read yet
        self._space = ""  # white space that is content only if content follows
        self._bare = True  # no content since the beginning, or since the last call
        self._state = self._text
        self._brackets = _Brackets()
        self._deltas: list[Delta] = []
        self._calls: list[dict[str, Any]] = []
        self.cut = False  # after `flush`: the answer ended inside a call, before its arguments did

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls so far, as the `tool_calls` of a whole message."""
        return [{**call, "function": dict(call["function"])} for call in self._calls]

    def push(self, text: str) -> list[Delta]:
        """Takes a piece of the answer. Returns what it adds, in order."""
        self._held += text
        while self._state():
            pass
        return self._taken()

    def flush(self) -> list[Delta]:
        """The rest, at the end of the answer: what began as a call and is none is content.

        Where a limit cut the marker behind complete arguments, its beginning is no part of the message.
        """
        self.cut = self._state in (self._head, self._arguments)
        if self._state == self._head:
            calls = len(self._calls)
            self._block(self._held, "")
            self.cut = len(self._calls) == calls  # a whole object, of which only the marker behind it is missing
        elif self._state == self._tail:
            self._surplus(self._held[: len(self._held) - begun(self._held, CALL_END)])
        elif self._state == self._arguments:
            self._pass_on(self._held)
        else:
            self._content(self._held)
        self._held = ""
        if not self._calls and self._space:
            self._deltas.append(ContentDelta(self._space))
            self._space = ""
        return self._taken()

    def _taken(self) -> list[Delta]:
        """The deltas to give out; neighbours of one kind as one."""
        taken: list[Delta] = []
        for delta in self._deltas:
            last = taken[-1] if taken else None
            if isinstance(delta, ContentDelta) and isinstance(last, ContentDelta):
                taken[-1] = ContentDelta(last.text + delta.text)
            else:
                taken.append(delta)
        self._deltas = []
        return taken

    def _text(self) -> bool:
        """Content, up to the marker of a call. This and the other states return whether there is more to read."""
        at = self._held.find(CALL)
        if at < 0:
            cut = len(self._held) - begun(self._held, CALL)
            self._content(self._held[:cut])
            self._held = self._held[cut:]
            return False
        self._content(self._held[:at])
        self._held = self._held[at + len(CALL) :]
        self._state = self._head
        return True

    def _head(self) -> bool:
        """Behind the marker: the name, up to the arguments; or a whole block of another shape."""
        head, end = _HEAD.match(self._held), self._held.find(CALL_END)
        if head is not None and (end < 0 or head.end() <= end) and (name := _string(head[1])) is not None:
            self._start(name)
            self._held = self._held[head.end() :]
            self._brackets = _Brackets()
            self._state = self._arguments
            return True
        if end < 0:
            return False
        block, self._held = self._held[:end], self._held[end + len(CALL_END) :]
        self._state = self._text
        self._block(block, CALL_END)
        return True

    def _arguments(self) -> bool:
        """Arguments, to the bracket that closes them; or to the end of the call, where none does."""
        length, closed = self._brackets.read(self._held)
        rest = self._held[length:]
        if not closed and rest.startswith(CALL_END):
            closed = True
        elif not closed and rest and not CALL_END.startswith(rest):  # a bracket that has no place in JSON
            length, rest = length + 1, rest[1:]
        self._pass_on(self._held[:length])
        self._held = rest
        if closed:
            self._state = self._tail
        return closed or (bool(rest) and not CALL_END.startswith(rest))

    def _tail(self) -> bool:
        """Behind the arguments: what closes the call."""
        end = self._held.find(CALL_END)
        if end < 0:
            return False
        rest, self._held = self._held[:end], self._held[end + len(CALL_END) :]
        self._state = self._text
        self._surplus(rest)
        return True

    def _surplus(self, rest: str) -> None:
        """What stood between the arguments and the end of the call: content, where it is more than a bracket."""
        self._bare, self._space = True, ""
        if rest.strip() and not _CLOSED.fullmatch(rest):
            self._content(rest)

    def _content(self, text: str) -> None:
        if not text:
            return
        if self._bare:
            start = _SPACE.match(text)
            assert start is not None
            self._space += start[0]
            text = text[start.end() :]
            if not text:
                return
            text, self._space, self._bare = self._space + text, "", False
        self._deltas.append(ContentDelta(text))

    def _start(self, name: str) -> None:
        call = CallStart(len(self._calls), f"call_{uuid.uuid4().hex[:24]}", name)
        self._calls.append({"id": call.id, "type": "function", "function": {"name": name, "arguments": ""}})
        self._deltas.append(call)
        self._bare, self._space = True, ""

    def _pass_on(self, text: str) -> None:
        if text:
            self._calls[-1]["function"]["arguments"] += text
            self._deltas.append(ArgumentsDelta(len(self._calls) - 1, text))

    def _block(self, block: str, end: str) -> None:
        """A whole block whose shape cannot be passed on as it comes: arguments before the name, or as a string."""
        members = _members(block)
        name = members.get("name", (None, ""))[0]
        arguments, spelled = members.get("arguments", ({}, "{}"))
        if not isinstance(name, str) or not isinstance(arguments, dict | str):
            self._content(CALL + block + end)
            return
        self._start(name)
        self._pass_on(arguments if isinstance(arguments, str) else spelled)


class _Brackets:
    """Finds where a JSON value that begins with a bracket ends."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False

    def read(self, text: str) -> tuple[int, bool]:
        """Reads on. Returns (characters read, whether the value ends there); stops before a `<` outside strings."""
        for place, letter in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif letter == "\\":
                    self._escaped = True
                elif letter == '"':
                    self._in_string = False
            elif letter == "<":
                return place, False
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1, True
        return len(text), False


def _string(spelled: str) -> str | None:
    """A JSON string's text; None where it is none, or half a character."""
    try:
        text = json.loads(spelled)
        text.encode()
    except ValueError:  # UnicodeEncodeError is one
        return None
    return str(text)


def _members(block: str) -> dict[str, tuple[Any, str]]:
    """The members of a JSON object, each with its value and how that is spelled; none where it is no object."""
    decoder, members = json.JSONDecoder(), {}
    try:
        value, end = decoder.raw_decode(text := block.strip())
        if not isinstance(value, dict) or end != len(text):
            return {}
        at = text.index("{") + 1
        for _ in value:
            key, at = decoder.raw_decode(text, _skip(text, at))
            at = _skip(text, _skip(text, at) + 1)  # the colon
            value, end = decoder.raw_decode(text, at)
            members[key] = (value, text[at:end])
            at = _skip(text, end) + 1  # the comma
    except (ValueError, RecursionError):
        return {}
    return members


def _skip(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    assert space is not None
    return space.end()
