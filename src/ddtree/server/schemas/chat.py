"""The body of `POST /v1/chat/completions`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from ddtree.config import MAX_LOGPROBS
from ddtree.server.schemas.common import (
    NEUTRAL_COMMON,
    WHOLE,
    CompletionFields,
    Strict,
    Text,
    encodable,
    invalid,
    without_neutral,
)
from ddtree.server.schemas.messages import Message

NEUTRAL_CHAT: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL_COMMON,
    "best_of": (1,),
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    "add_special_tokens": (False,),
    "chat_template": (),
    "documents": ([],),
    "include_reasoning": (True,),
    "thinking_token_budget": (),
    "mm_processor_kwargs": (),
}
MAX_TOOLS = 128


class JsonSchema(Strict):
    """A schema that the answer must follow."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_by_alias=True, serialize_by_alias=True)

    name: Text
    description: Text | None = None
    definition: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What form the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            said = "`response_format.json_schema` goes with type json_schema, and with no other"
            raise invalid(said, "response_format.json_schema")
        return self


class Function(Strict):
    """A function that the model may call; its parameters are a JSON schema."""

    name: Text = Field(min_length=1, max_length=256)
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool; OpenAI knows no other type for chats that a model alone can call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """The name of one function."""

    name: Text


class NamedTool(Strict):
    """The one tool that the model must call."""

    type: Literal["function"]
    function: NamedFunction


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("as word")] | Annotated[NamedTool, Tag("as tool")],
    Discriminator(lambda value: "as tool" if isinstance(value, dict | NamedTool) else "as word"),
]


class ChatRequest(CompletionFields):
    """The body of `POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: Annotated[int, Field(ge=1), WHOLE] | None = Field(
        None, description="left out: up to the end of the context"
    )
    max_completion_tokens: Annotated[int, Field(ge=1), WHOLE] | None = Field(
        None, description="today's name of max_tokens"
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(None, description="needs logprobs")
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="more arguments of the chat template")
    add_generation_prompt: bool | None = Field(None, description="left out: true, unless the last message goes on")
    continue_final_message: bool | None = Field(None, description="go on with the last message, an assistant's")
    # Labels for the operator's own records, as `user`; by their definition they change no answer.
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_features(cls, body: Any) -> Any:
        if isinstance(body, dict):
            for name in ("tools", "response_format", "chat_template_kwargs"):
                encodable(body.get(name), name)
        return without_neutral(body, NEUTRAL_CHAT)

    @model_validator(mode="after")
    def _refuse_more(self) -> "ChatRequest":
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise invalid(
                f"max_tokens ({old}) and max_completion_tokens ({new}) differ: send one of them", "max_tokens"
            )
        if self.top_logprobs and not self.logprobs:
            raise invalid("`top_logprobs` needs `logprobs`: true", "top_logprobs")
        self._check_tools()
        self._check_end()
        return self

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if not names and self.parallel_tool_calls is not None:
            raise invalid("`parallel_tool_calls` needs `tools`", "parallel_tool_calls")
        if len(set(names)) < len(names):
            raise invalid("`tools` holds two functions of one name: rename one", "tools")

    def _check_end(self) -> None:
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            said = "`continue_final_message` and `add_generation_prompt` exclude each other: send one of them"
            raise invalid(said, "continue_final_message")
        if self.messages[-1].role != "assistant":
            raise invalid("`continue_final_message` needs an assistant's message at the end", "continue_final_message")

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer, by whichever name it was sent."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def ranked(self) -> int | None:
        """Tokens whose log-probabilities are asked for beside the chosen one's."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def plain_tools(self) -> list[dict[str, Any]]:
        """The tools as JSON, without what was left out."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    @property
    def plain_choice(self) -> str | dict[str, Any] | None:
        """The tool choice as JSON."""
        return self.tool_choice.model_dump() if isinstance(self.tool_choice, NamedTool) else self.tool_choice

    @property
    def plain_format(self) -> dict[str, Any] | None:
        """The response format as JSON, without what was left out."""
        return (
            None if self.response_format is None else self.response_format.model_dump(exclude_none=True, by_alias=True)
        )

    def for_template(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them. Raises `ApiError`."""
        return [message.for_template(index) for index, message in enumerate(self.messages)]

    def template_options(self) -> dict[str, Any]:
        """What `Text.chat` is called with beside messages and tools: only what differs from its defaults."""
        options: dict[str, Any] = {}
        if self.chat_template_kwargs:
            options["template_kwargs"] = self.chat_template_kwargs
        if self.add_generation_prompt is False or self.continue_final_message:
            options["add_generation_prompt"] = False
        if self.continue_final_message:
            options["continue_final_message"] = True
        return options
