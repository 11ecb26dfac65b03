"""Request bodies: what is read, what is refused by name, and what an engine is asked for in the end.

Every field either does what OpenAI's (or vLLM's) documentation says of it, or the request is refused: none is
accepted and ignored. Fields of features that are not here yet are accepted at the one value that asks for nothing.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from ddtree.config import MAX_SEED, MAX_STOPS, SamplingParams
from ddtree.server.problems import ApiError, echo

# Values that ask for nothing, of fields that OpenAI or vLLM know and this server does not do yet. null always is one.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (),
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
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "speculative": ({},),
}
# The same for the fields of a message: clients send back whole the message objects that they were given.
NEUTRAL_MESSAGE: Mapping[str, tuple[object, ...]] = {
    "name": (),
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "reasoning_content": ("",),
    "reasoning": ("",),
}
NEUTRAL_STREAM: Mapping[str, tuple[object, ...]] = {
    "continuous_usage_stats": (False,),
    "include_obfuscation": (False,),
}


def _same(value: object, neutral: object) -> bool:
    """Equality that tells 1 from True, as JSON does."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _without_neutral(body: object, table: Mapping[str, tuple[object, ...]], where: str = "") -> object:
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


class _Strict(BaseModel):
    """No unknown field, and no value of one type read as another."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _encodable(text: str) -> str:
    """JSON can spell half a character (a lone surrogate), which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("should be text without lone surrogates") from error
    return text


Text = Annotated[str, AfterValidator(_encodable)]


class TextPart(_Strict):
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


Parts = Annotated[list[TextPart], Field(min_length=1)]
Content = Annotated[
    Annotated[Text, Tag("as text")] | Annotated[Parts, Tag("as parts")],
    Discriminator(lambda value: "as parts" if isinstance(value, list) else "as text"),
]


class Message(_Strict):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    @model_validator(mode="before")
    @classmethod
    def _refuse_features(cls, message: Any) -> Any:
        if isinstance(message, dict) and message.get("role") in ("tool", "function"):
            said = f"messages of role {echo(message['role'])} are not supported by this server: tools are not yet"
            raise ApiError(said, param="messages", code="unsupported_role")
        return _without_neutral(message, NEUTRAL_MESSAGE, "messages.")

    def for_template(self) -> dict[str, str]:
        """As chat templates take it: `developer` is OpenAI's new name of `system`; line ends join parts, as in vLLM."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(_Strict):
    """What a stream carries besides the text."""

    include_usage: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_features(cls, options: Any) -> Any:
        return _without_neutral(options, NEUTRAL_STREAM, "stream_options.")


Stop = Annotated[
    Annotated[Text, Tag("as text")] | Annotated[list[Text], Tag("as list"), Field(max_length=MAX_STOPS)],
    Discriminator(lambda value: "as list" if isinstance(value, list) else "as text"),
]


class ChatRequest(_Strict):
    """The body of `POST /v1/chat/completions`."""

    model: str | None = Field(None, description="the served model's name; left out: that model")
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, description="left out: up to the end of the context")
    max_completion_tokens: int | None = Field(None, ge=1, description="today's name of max_tokens")
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False, description="0: greedy; left out: 1")
    seed: int | None = Field(None, ge=-MAX_SEED - 1, le=MAX_SEED, description="left out: the server's, or a fresh one")
    stop: Stop | None = Field(None, description=f"up to {MAX_STOPS} strings, which end the text and are not part of it")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = Field(None, description="go on after the end-of-text token (from vLLM)")
    # Labels for the operator's own records; by their definition they change no answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_features(cls, body: Any) -> Any:
        return _without_neutral(body, NEUTRAL)

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> "ChatRequest":
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            message = f"max_tokens ({old}) and max_completion_tokens ({new}) differ: send one of them"
            raise ApiError(message, param="max_tokens", code="invalid_value")
        if self.stream_options is not None and not self.stream:
            raise ApiError("`stream_options` needs `stream`: true", param="stream_options", code="invalid_value")
        if "" in self.stops:
            raise ApiError("`stop` strings need at least one character", param="stop", code="invalid_value")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, however they were sent."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, default_seed: int | None) -> SamplingParams:
        """What the engine is asked for. The temperature is OpenAI's default of 1 where none was sent."""
        return SamplingParams(
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            seed=default_seed if self.seed is None else self.seed,
            stop=self.stops,
            ignore_eos=bool(self.ignore_eos),
        )
