"""The body of `POST /v1/chat/completions`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from ddtree.config import MAX_LOGPROBS
from ddtree.server.problems import ApiError, echo
from ddtree.server.schemas.base import WHOLE, Strict, Text, encodable, invalid, without_neutral
from ddtree.server.schemas.common import MAX_TOKENS, NEUTRAL_COMMON, CompletionFields
from ddtree.server.schemas.json_schema import fault_of
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
    "verbosity": (),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "documents": ([],),
    "include_reasoning": (True,),
    "thinking_token_budget": (),
    "mm_processor_kwargs": (),
}
MAX_TOOLS = 128
MAX_ARGUMENTS = 128  # of a chat template


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

    messages: list[Message] = Field(min_length=1, fail_fast=True)  # else each of thousands had its own error
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS), WHOLE] | None = Field(
        None, description="left out: up to the end of the context"
    )
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS), WHOLE] | None = Field(
        None, description="today's name of max_tokens"
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(None, description="needs logprobs")
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, max_length=MAX_ARGUMENTS, description="more arguments of the chat template"
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="how much to think: an argument of the chat template, which may not read it"
    )
    add_generation_prompt: bool | None = Field(None, description="left out: true, unless the last message goes on")
    continue_final_message: bool | None = Field(None, description="go on with the last message, an assistant's")
    # Labels for the operator's own records, as `user`; by their definition they change no answer.
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_features(cls, body: Any) -> Any:
        if isinstance(body, dict):
            for name in ("tools", "chat_template_kwargs"):
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
        more = self.chat_template_kwargs or {}
        if self.reasoning_effort is not None and more.get("reasoning_effort", self.reasoning_effort) != (
            self.reasoning_effort
        ):
            said = "`reasoning_effort` and that of `chat_template_kwargs` differ: send one of them"
            raise invalid(said, "reasoning_effort")
        self._check_tools()
        self._check_end()
        return self

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if not names and self.parallel_tool_calls is not None:
            raise invalid("`parallel_tool_calls` needs `tools`", "parallel_tool_calls")
        if len(set(names)) < len(names):
            raise invalid("`tools` holds two functions of one name: rename one", "tools")
        for number, tool in enumerate(self.tools or ()):
            self._check_parameters(tool.function.parameters, f"tools[{number}].function.parameters")

    def _check_parameters(self, parameters: dict[str, Any] | None, param: str) -> None:
        if parameters is None:
            return
        if parameters.get("type", "object") != "object":
            said = f"`{param}` must be a schema of type object, not {echo(parameters['type'])}"
        elif fault := fault_of(parameters):
            said = f"`{param}` is no JSON schema: {fault}"
        else:
            return
        raise ApiError(said, param=param, code="invalid_grammar")

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

    def for_template(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them. Raises `ApiError`."""
        return [message.for_template(index) for index, message in enumerate(self.messages)]

    def template_options(self) -> dict[str, Any]:
        """What `Text.chat` is called with beside messages and tools: only what differs from its defaults."""
        options: dict[str, Any] = {}
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        if more := {**effort, **(self.chat_template_kwargs or {})}:
            options["template_kwargs"] = more
        if self.add_generation_prompt is False or self.continue_final_message:
            options["add_generation_prompt"] = False
        if self.continue_final_message:
            options["continue_final_message"] = True
        return options
