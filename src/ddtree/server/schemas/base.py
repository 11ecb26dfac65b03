"""How request bodies are read: strictly, with refusals that name the field; and the types that their fields share."""

import math
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from ddtree.config import MAX_STOPS
from ddtree.server.problems import ApiError, echo

MAX_TOKEN_ID = 2**31 - 1


def _same(value: object, neutral: object) -> bool:
    """Equality that tells 1 from True, as JSON does."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def without_neutral(body: object, table: Mapping[str, tuple[object, ...]], where: str = "") -> object:
    """`body` without the fields of `table`. Raises `ApiError` for one that asks for something."""
    if not isinstance(body, dict):
        return body  # pydantic says what is wrong with it
    kept = {}
    for name, value in body.items():
        if name not in table:
            kept[name] = value
        elif value is not None and not any(_same(value, neutral) for neutral in table[name]):
            remedy = "leave it out" + "".join(f" or send {echo(neutral)}" for neutral in table[name][:1])
            raise ApiError(
                f"`{where}{name}` = {echo(value)} is not supported by this server: {remedy}",
                param=where + name,
                code="unsupported_parameter",
            )
    return kept


def field_error(field: str | int, message: str, value: object) -> PydanticCustomError:
    """An error about one field of the object that is being read, for `problems.from_validation`."""
    return PydanticCustomError("field", "{said}", {"said": message, "field": field, "value": value})


def invalid(message: str, param: str) -> ApiError:
    """A refusal of a value, or of fields that contradict each other."""
    return ApiError(message, param=param, code="invalid_value")


class Strict(BaseModel):
    """No unknown field, and no value of one type read as another."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _encodable(text: str) -> str:
    """JSON can spell half a character (a lone surrogate), which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("should be text without lone surrogates") from error
    return text


def _whole(value: object) -> object:
    """JSON knows no integers: 2.0 is 2, and some clients write it so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Text = Annotated[str, AfterValidator(_encodable)]
WHOLE = BeforeValidator(_whole)  # goes last, so that limits before it stay in the OpenAPI document
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID), WHOLE]
Stop = Annotated[
    Annotated[Text, Tag("as text")] | Annotated[list[Text], Tag("as list"), Field(max_length=MAX_STOPS)],
    Discriminator(lambda value: "as list" if isinstance(value, list) else "as text"),
]


def encodable(value: object, param: str) -> None:
    """Raises `ApiError` where free JSON of a body (tools, schemas, template arguments) holds a lone surrogate."""
    try:
        stack = [value]
        while stack:
            match stack.pop():
                case str(text):
                    text.encode()
                case dict(fields):
                    stack.extend(fields)
                    stack.extend(fields.values())
                case list(items):
                    stack.extend(items)
                case float(number) if not math.isfinite(number):
                    raise invalid(f"`{param}` holds {number}, which is no JSON", param)
    except UnicodeEncodeError as error:
        raise invalid(f"`{param}` should be text without lone surrogates", param) from error
