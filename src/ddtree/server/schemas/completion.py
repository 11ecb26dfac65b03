"""The body of `POST /v1/completions`."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ddtree.server.schemas.base import MAX_TOKEN_ID, WHOLE, Text, TokenId, field_error, invalid, without_neutral
from ddtree.server.schemas.common import MAX_CHOICES, MAX_TOKENS, NEUTRAL_COMMON, CompletionFields

MAX_LEGACY_LOGPROBS = 5  # as OpenAI has it
DEFAULT_MAX_TOKENS = 16  # OpenAI's default, which vLLM keeps too
NEUTRAL_COMPLETION: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL_COMMON,
    "suffix": ("",),
    "add_special_tokens": (True,),
    "prompt_embeds": (),
}


def _check_ids(ids: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Thousands of ids one by one take long, so good ones are seen together, and of others the first bad one alone."""
    if not isinstance(ids, list) or not ids:
        return check(ids)
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= MAX_TOKEN_ID:
        return ids
    return check(ids[: next((at for at, one in enumerate(ids, 1) if not _is_id(one)), len(ids))])


def _is_id(value: object) -> bool:
    whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    return whole and 0 <= value <= MAX_TOKEN_ID  # type: ignore[operator]


def _check_prompt(prompt: Any) -> Any:
    """What is of no form at all is told of all of them."""
    if not isinstance(prompt, str | list):
        raise PydanticCustomError("prompt_type", "should be text, token ids, or a list of either")
    if isinstance(prompt, list) and prompt and (prompt[0] is None or isinstance(prompt[0], bool | dict)):
        raise field_error(0, "should be text, a token id, or a list of token ids", prompt[0])
    return prompt


Ids = Annotated[list[TokenId], Field(min_length=1), WrapValidator(_check_ids)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)]
ManyIds = Annotated[list[Ids], Field(min_length=1, max_length=MAX_CHOICES)]


def _kind(prompt: object) -> str:
    first = prompt[0] if isinstance(prompt, list) and prompt else prompt
    if isinstance(prompt, list):
        if isinstance(first, list):
            return "as lists of ids"
        return "as ids" if isinstance(first, int | float) else "as texts"
    return "as text"


Prompt = Annotated[
    Annotated[Text, Tag("as text")]
    | Annotated[Texts, Tag("as texts")]
    | Annotated[Ids, Tag("as ids")]
    | Annotated[ManyIds, Tag("as lists of ids")],
    Discriminator(_kind),
    BeforeValidator(_check_prompt),
]


class CompletionRequest(CompletionFields):
    """The body of `POST /v1/completions`."""

    prompt: Prompt = Field(description="text, token ids, or a list of either")
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS), WHOLE] | None = Field(
        None, description=f"left out: {DEFAULT_MAX_TOKENS}"
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LEGACY_LOGPROBS), WHOLE] | None = Field(
        None, description="likely tokens at each place"
    )
    echo: bool | None = Field(None, description="begin the text with the prompt")
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = Field(
        None, description="must equal n: answers are not ranked"
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_features(cls, body: Any) -> Any:
        return without_neutral(body, NEUTRAL_COMPLETION)

    @model_validator(mode="after")
    def _refuse_more(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != (self.n or 1):
            said = f"`best_of` ({self.best_of}) must equal `n` ({self.n or 1}): this server ranks no answers"
            raise invalid(said, "best_of")
        if self.echo and self.logprobs is not None:
            said = "`echo` with `logprobs` is not supported by this server: the prompt's own are not computed"
            raise invalid(said, "echo")
        answers = len(self.prompts) * (self.n or 1)
        if answers > MAX_CHOICES:
            said = (
                f"`prompt` times `n` asks for {answers} answers, but a request gets at most {MAX_CHOICES}: send fewer"
            )
            raise invalid(said, "prompt" if len(self.prompts) > 1 else "n")
        return self

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def ranked(self) -> int | None:
        """Tokens whose log-probabilities are asked for beside the chosen one's."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one, however they were sent."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[int(token) for token in self.prompt]]
        return list(self.prompt)
