"""The messages of a chat, as clients send them and as chat templates take them."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from ddtree.server.problems import ApiError, echo
from ddtree.server.schemas.base import Strict, Text, encodable, field_error, invalid, without_neutral

# As in `common`, for the fields of a message: clients send back whole the message objects that they were given.
NEUTRAL_MESSAGE: Mapping[str, tuple[object, ...]] = {
    "name": (),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
}
NEUTRAL_CALL: Mapping[str, tuple[object, ...]] = {"index": tuple(range(128))}  # as streamed deltas number them


class TextPart(Strict):
    """A part of a message, of the only type that this server reads."""

    type: Literal["text"]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_types(cls, part: Any) -> Any:
        if isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind != "text":
            message = f"content parts of type {echo(kind)} are not supported by this server: send text"
            raise ApiError(message, param="messages", code="unsupported_content_type")
        return part


Parts = Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]
Content = Annotated[
    Annotated[Text, Tag("as text")] | Annotated[Parts, Tag("as parts")],
    Discriminator(lambda value: "as parts" if isinstance(value, list) else "as text"),
]


class CalledFunction(Strict):
    """What an assistant called: a name, and arguments as the text of a JSON object."""

    name: Text = Field(min_length=1)
    arguments: Text = ""


class CalledTool(Strict):
    """A call that an assistant made earlier in the chat."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _refuse_features(cls, call: Any) -> Any:
        return without_neutral(call, NEUTRAL_CALL, "messages.tool_calls.")

    def for_template(self, param: str) -> dict[str, Any]:
        """As templates take it: the arguments are an object, not its text. Raises `ApiError` where they are none."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            said = (
                f"`{param}.function.arguments` must be the text of a JSON object, not {echo(self.function.arguments)}"
            )
            raise invalid(said, f"{param}.function.arguments")
        encodable(arguments, f"{param}.function.arguments")
        call = {"type": "function", "function": {"name": self.function.name, "arguments": arguments}}
        return call if self.id is None else {"id": self.id, **call}


class _Message(Strict):
    """What all messages have in common."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_features(cls, message: Any) -> Any:
        return without_neutral(message, NEUTRAL_MESSAGE, "messages.")

    def for_template(self, index: int) -> dict[str, Any]:
        """As chat templates take it. index: the message's place in the chat. Raises `ApiError`."""
        raise NotImplementedError  # abstract: every role has its own


class _Said(_Message):
    """A message that has content."""

    content: Content

    def for_template(self, index: int) -> dict[str, Any]:
        """Role and content; `developer` is OpenAI's new name of `system`."""
        role: str = self.role  # type: ignore[attr-defined]
        return {"role": "system" if role == "developer" else role, "content": joined_text(self.content)}


class SystemMessage(_Said):
    """What the operator of the chat says."""

    role: Literal["system", "developer"]


class UserMessage(_Said):
    """What the user says."""

    role: Literal["user"]


class ToolMessage(_Said):
    """What a tool answered."""

    role: Literal["tool"]
    name: Text | None = None
    tool_call_id: Text  # as OpenAI wants it: which call this answers

    @model_validator(mode="before")
    @classmethod
    def _refuse_features(cls, message: Any) -> Any:
        table = {name: values for name, values in NEUTRAL_MESSAGE.items() if name != "name"}
        return without_neutral(message, table, "messages.")

    def for_template(self, index: int) -> dict[str, Any]:
        """With the call's id, and the tool's name where it was sent."""
        message = {**super().for_template(index), "tool_call_id": self.tool_call_id}
        return message if self.name is None else {**message, "name": self.name}


class AssistantMessage(_Message):
    """An earlier answer, as clients send it back; its thinking by either of vLLM's names."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[list[CalledTool], Field(fail_fast=True)] | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None

    @model_validator(mode="after")
    def _check_content(self) -> "AssistantMessage":
        if self.content is None and not (self.tool_calls or self.reasoning_content or self.reasoning):
            raise field_error("content", "should be text where nothing is called", None)
        return self

    def for_template(self, index: int) -> dict[str, Any]:
        """With thinking and calls, where there are any; templates cannot take content that is null."""
        message: dict[str, Any] = {"role": self.role, "content": joined_text(self.content or "")}
        if thinking := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = thinking
        if self.tool_calls:
            message["tool_calls"] = [
                call.for_template(f"messages[{index}].tool_calls[{number}]")
                for number, call in enumerate(self.tool_calls)
            ]
        return message


def joined_text(content: str | list[TextPart]) -> str:
    """The content as one text: line ends join parts, as in vLLM."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, dict) else getattr(message, "role", None)


def _check_role(message: Any) -> Any:
    """Of an unknown role nothing else can be said, so that comes first."""
    if not isinstance(message, dict):
        if isinstance(message, Strict):
            return message
        raise PydanticCustomError("dict_type", "should be an object")
    role = message.get("role")
    if role == "function":
        said = 'messages of role "function" are not supported by this server: send role "tool"'
        raise ApiError(said, param="messages", code="unsupported_role")
    if "role" not in message:
        raise PydanticCustomError("missing", "is missing", {"field": "role"})
    if not isinstance(role, str) or role not in ROLES:
        raise field_error("role", f"should be one of {', '.join(ROLES)}", role)
    return message


Message = Annotated[
    Annotated[SystemMessage, Tag("as system")]
    | Annotated[UserMessage, Tag("as user")]
    | Annotated[AssistantMessage, Tag("as assistant")]
    | Annotated[ToolMessage, Tag("as tool")],
    Discriminator(lambda message: f"as {ROLES.get(str(_role(message)))}"),
    BeforeValidator(_check_role),
]
