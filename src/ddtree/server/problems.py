"""Everything that can go wrong with a request, in the one shape that OpenAI's clients read."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from ddtree.errors import DDTreeError
from ddtree.server.worker import EngineFailed, EngineStopped, QueueFull

MAX_ECHO = 80  # characters of a wrong value that a message repeats
ITEMS = {  # what the lists of a body hold
    "messages": "message",
    "content": "content part",
    "stop": "string",
    "prompt": "item",
    "tools": "tool",
    "stop_token_ids": "id",
    "logit_bias": "id",
    "chat_template_kwargs": "argument",
    "metadata": "pair",
    "choice": "choice",
}
# Fields of a body by the engine's names of them.
FIELDS = {
    "mode": "speculative.mode",
    "tree_budget": "speculative.tree_budget",
    "tree_top_k": "speculative.tree_top_k",
    "tree_spine": "speculative.tree_spine",
    "tree_context": "speculative.tree_context",
}


class ErrorDetail(BaseModel):
    """What went wrong: text for people, words for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """A request that gets no answer: the HTTP status, and what the body says about it."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        kind: str = "invalid_request_error",
        retry_after: int | None = None,
    ) -> None:
        # A lone surrogate, which JSON can spell, would make this body impossible to send.
        message = message.encode(errors="backslashreplace").decode()
        param = param and param.encode(errors="backslashreplace").decode()
        super().__init__(message)
        self.status = status
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}  # seconds
        self.detail = ErrorDetail(message=message, type=kind, param=param, code=code)

    def body(self) -> dict[str, Any]:
        """The JSON body: `{"error": {message, type, param, code}}`."""
        return ErrorBody(error=self.detail).model_dump()


def as_api_error(error: Exception, prompt: str = "prompt", form: str = "response_format") -> ApiError:
    """Translates what the engine, its worker or a bug raised. Messages of bugs stay in the server's log.

    prompt, form: the fields that the engine's prompt and grammar were made of.
    """
    match error:
        case ApiError():
            return error
        case DDTreeError():
            own = {"prompt": prompt, "grammar": form, "response_format": form}
            param = own.get(error.param or "") or FIELDS.get(error.param or "", error.param)
            return ApiError(str(error), param=param, code=error.code)
        case QueueFull():
            said = {"kind": "rate_limit_error", "code": "queue_full"}  # the type that OpenAI's clients retry
            return ApiError(str(error), status=429, retry_after=error.retry_after, **said)
        case EngineStopped():
            kind = "service_unavailable_error"
            return ApiError(str(error), status=503, kind=kind, code=error.code, retry_after=error.retry_after)
        case EngineFailed():
            return ApiError(str(error), status=500, kind="server_error", code="engine_error")
        case _:
            message = f"the server failed ({type(error).__name__}): its log says where"
            return ApiError(message, status=500, kind="server_error", code="internal_error")


def echo(value: object) -> str:
    """A value from a body as a message may repeat it: in JSON's spelling, cut to `MAX_ECHO` characters."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except RecursionError:
        return "a deeply nested value"
    return shorten(text.encode(errors="backslashreplace").decode())


def shorten(text: str) -> str:
    """Text as a message may repeat it: cut to `MAX_ECHO` characters."""
    return text if len(text) <= MAX_ECHO else text[: MAX_ECHO - 3] + "..."


def from_unreadable(cause: BaseException) -> ApiError:
    """What reading the JSON of a body raised, other than a plain error of syntax."""
    match cause:
        case ApiError():
            return cause
        case UnicodeDecodeError():
            said = "the body is not valid UTF-8"
        case RecursionError():
            said = "the body is not readable JSON: it is nested too deeply"
        case ValueError():  # Python reads no integer of more than some thousand digits
            said = "the body is not readable JSON: a number in it has too many digits"
        case _:
            said = f"the body cannot be read ({type(cause).__name__})"
    return ApiError(said, code="invalid_json")


def from_validation(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's errors about a request (as `.errors()` gives them), naming the field at fault."""
    first: Mapping[str, Any] = errors[0]
    kind, context = first["type"], first.get("ctx", {})
    if kind == "json_invalid":
        return ApiError(f"the body is not JSON: {context.get('error', 'it cannot be read')}", code="invalid_json")
    param = _path((*first["loc"], context["field"]) if "field" in context else first["loc"])
    if not param:
        return ApiError("the body must be a JSON object, sent with Content-Type: application/json", code="invalid_json")
    if kind == "missing":
        return ApiError(f"`{param}` is missing", param=param, code="missing_required_parameter")
    if kind == "extra_forbidden":
        return ApiError(f"`{param}` is not supported by this server", param=param, code="unknown_parameter")
    return ApiError(f"`{param}` {_said(first, param)}", param=param, code="invalid_value")


def _said(error: Mapping[str, Any], param: str) -> str:
    """One of pydantic's errors about a value, as a sentence whose subject is the field."""
    kind, context = error["type"], error.get("ctx", {})
    value = echo(context.get("value") if "field" in context else error["input"])
    item = ITEMS.get(param.rpartition(".")[2].partition("[")[0], "item")
    if kind == "too_long":
        return f"takes at most {context['max_length']} {item}s, not {len(error['input'])}"
    if kind == "too_short":
        return f"must hold at least one {item}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"must be a JSON object, not {value}"
    if kind == "list_type":
        return f"must be a list, not {value}"
    before, should, rest = str(error["msg"]).partition("should ")  # "Input should", "String should", ...
    return f"{should}{rest if should else before}, not {value}"


def _path(loc: Sequence[str | int]) -> str:
    """pydantic's place of an error as OpenAI writes it: `messages[0].content`. Names of union members are left out."""
    path = ""
    for part in loc[1:] if loc and loc[0] in ("body", "query") else loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("as "):  # "as ...": the tags of unions in `schemas`
            path += f".{part}" if path else part
    return shorten(path)
