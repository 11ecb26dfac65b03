"""From the bytes of a body to a request, without holding up everyone else.

Reading JSON and checking it hold Python's lock, so a body that asks for too much of either is refused by cheap counts
beforehand, and a large one is read in a thread of its own.
"""

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from ddtree.errors import ContextLengthExceeded
from ddtree.server.problems import ApiError, as_api_error, echo, from_unreadable, from_validation, shorten

LARGE_BODY = 64 * 1024  # bytes; above, a body is read in another thread, which lets others in now and then
MAX_FIELDS = 128  # of the body itself; the APIs together know fewer
MAX_VALUES = 2**16  # in objects and lists of the body, token ids not counted
MAX_DEPTH = 100  # objects and lists inside each other; templates and grammars go down by recursion
# Marks of JSON, wherever they stand: they tell what reading costs. A text may hold as many as the context lets it.
MAX_BRACKETS, MAX_COLONS, MAX_COMMAS = 2**17, 2**16, 2**19
MARKS_PER_TOKEN = 4
MAX_FRACTIONS = 10_000  # numbers with a point or an exponent: slow to read, and no request needs many
HALF = re.compile(r"\\u[dD][89a-fA-F]")  # half a character as JSON spells it, perhaps with its other half


class BodyRoute(APIRoute):
    """A route whose body, where it has one, is read by `read` instead of FastAPI."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, given a request that reads itself."""
        handle = super().get_route_handler()
        model: Any = None if self.body_field is None else self.body_field.field_info.annotation
        if model is None:
            return handle

        async def handle_read(request: Request) -> Response:
            return await handle(_BodyRequest(request, model))

        return handle_read


class _BodyRequest(Request):
    """A request whose JSON is the model's object already, which FastAPI then takes as it is."""

    def __init__(self, request: Request, model: type[BaseModel]) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model

    async def json(self) -> Any:
        """Raises `ApiError`."""
        body = await self.body()
        work = partial(read, body, self._model, self.app.state.max_model_len)
        return await asyncio.to_thread(work) if len(body) > LARGE_BODY else work()


def read(body: bytes, model: type[BaseModel], context: int) -> BaseModel:
    """The request that a body holds. context: the most tokens of a prompt and its answer. Raises `ApiError`."""
    _check_marks(body, context)
    try:
        text = body.decode(json.detect_encoding(body))  # strictly: `json.loads` would let half characters through
        value = json.loads(text, parse_float=_Fractions())
    except json.JSONDecodeError as error:
        raise ApiError(f"the body is not JSON: {error.msg}", code="invalid_json") from error
    except (ValueError, RecursionError) as error:
        raise from_unreadable(error) from error
    if isinstance(value, dict):
        try:
            _look_over(value, context)
        except ContextLengthExceeded as error:
            raise as_api_error(error) from error
        if HALF.search(text):
            _check_halves(value, "")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False)) from error


class _Fractions:
    """Reads the numbers of one body that are not whole. Raises `ApiError` for too many."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, spelled: str) -> float:
        self._count += 1
        if self._count > MAX_FRACTIONS:
            said = f"the body holds more than {MAX_FRACTIONS} numbers that are not whole: send fewer"
            raise ApiError(said, status=413, code="request_too_large")
        return float(spelled)


def _check_marks(body: bytes, context: int) -> None:
    """Raises `ApiError` (413) for JSON that would take long to read, by its brackets, colons and commas."""
    least = context * MARKS_PER_TOKEN
    for marks, own in (("[{", MAX_BRACKETS), (":", MAX_COLONS), (",", MAX_COMMAS)):
        count, most = sum(body.count(mark.encode()) for mark in marks), max(own, least)
        if count > most:
            shown = " and ".join(f"`{mark}`" for mark in marks)
            said = f"the body has {count} times {shown}, but at most {most} are read: send fewer values"
            raise ApiError(said, status=413, code="request_too_large")


def _look_over(body: Mapping[str, Any], context: int) -> None:
    """Raises `ApiError` and `ContextLengthExceeded` for more than it would be worth to look at closely."""
    if len(body) > MAX_FIELDS:
        unknown = f"the body has {len(body)} fields, but no request has more than {MAX_FIELDS}: leave the others out"
        raise ApiError(unknown, code="unknown_parameter")
    messages = body.get("messages")
    if isinstance(messages, list) and len(messages) > context:  # templates spend tokens on an empty one, too
        said = f"{len(messages)} messages do not fit the context of {context} tokens: send fewer"
        raise ContextLengthExceeded(said, param="messages")
    left = MAX_VALUES
    for name, value in body.items():
        left -= _ids_apart(value, context) if name == "prompt" else _weigh(name, value, left)
        if left < 0:
            said = f"`{shorten(name)}` makes the body hold more than {MAX_VALUES} values: send fewer"
            raise ApiError(said, param=shorten(name), status=413, code="request_too_large")


def _weigh(name: str, value: object, most: int) -> int:
    """How many values a field holds; stops to count above `most`. Raises `ApiError` where it is nested too deeply."""
    count, level = 0, [value]
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for one in level:
            if isinstance(one, dict):
                below += one.values()
            elif isinstance(one, list):
                below += one
        count += len(below)
        if not below or count > most:
            return count
        level = below
    said = f"`{shorten(name)}` is nested more than {MAX_DEPTH} levels deep: make it flatter"
    raise ApiError(said, param=shorten(name), code="invalid_value")


def _ids_apart(prompt: object, context: int) -> int:
    """How many values a prompt holds beside its token ids. Raises `ContextLengthExceeded` for too many ids."""
    if not isinstance(prompt, list):
        return _weigh("prompt", prompt, MAX_VALUES)
    if prompt and isinstance(prompt[0], int | float):
        if len(prompt) > context:
            said = f"the prompt has {len(prompt)} tokens, and the context holds {context} with the answer: shorten it"
            raise ContextLengthExceeded(said, param="prompt")
        return 0
    if len(prompt) > MAX_VALUES or not any(isinstance(one, list) for one in prompt):
        return _weigh("prompt", prompt, MAX_VALUES)
    return len(prompt) + sum(_ids_apart(one, context) for one in prompt)


def _check_halves(value: object, path: str) -> None:
    """Raises `ApiError` at a lone surrogate (half a character), which JSON can spell, but no tokenizer can read."""
    if isinstance(value, str):
        if _is_half(value):
            where = f"`{shorten(path)}`"
            said = f"{where} should be text without lone surrogates (half characters), not {echo(value)}"
            raise ApiError(said, param=shorten(path), code="invalid_value")
    elif isinstance(value, list):
        for number, one in enumerate(value):
            _check_halves(one, f"{path}[{number}]")
    elif isinstance(value, dict):
        for name, one in value.items():
            if _is_half(name):
                where = f"`{shorten(path)}`" if path else "the body"
                said = f"{where} has a field whose name {echo(name)} is not valid Unicode"
                raise ApiError(said, param=shorten(path) or None, code="unknown_parameter")
            _check_halves(one, f"{path}.{name}" if path else name)


def _is_half(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
