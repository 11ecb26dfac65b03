"""The body of `POST /v1/completions`."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator

from ddtree.server.schemas.common import (
    MAX_CHOICES,
    NEUTRAL_COMMON,
    WHOLE,
    CompletionFields,
    Text,
    TokenId,
    invalid,
    without_neutral,
)

MAX_LEGACY_LOGPROBS = 5  # as OpenAI has it
DEFAULT_MAX_TOKENS = 16  # OpenAI's default, which vLLM keeps too
NEUTRAL_COMPLETION: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL_COMMON,
    "suffix": ("",),
    "add_special_tokens": (True,),
    "response_format": ({"type": "text"},),
    "prompt_embeds": (),
}
Ids = Annotated[list[TokenId], Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)]
ManyIds = Annotated[list[Ids], Field(min_length=1, max_length=MAX_CHOICES)]


def _kind(prompt: object) -> str:
    first = prompt[0] if isinstance(prompt, list) and prompt else prompt
    if isinstance(prompt, list):
        if isinstance(first, list):
            return "as lists of ids"
        return "as ids" if isinstance(first, int) and not isinstance(first, bool) else "as texts"
    return "as text"


Prompt = Annotated[
    Annotated[Text, Tag("as text")]
    | Annotated[Texts, Tag("as texts")]
    | Annotated[Ids, Tag("as ids")]
    | Annotated[ManyIds, Tag("as lists of ids")],
    Discriminator(_kind),
]


class CompletionRequest(CompletionFields):
    """The body of `POST /v1/completions`."""

    prompt: Prompt = Field(description="text, token ids, or a list of either")
    max_tokens: Annotated[int, Field(ge=1), WHOLE] | None = Field(None, description=f"left out: {DEFAULT_MAX_TOKENS}")
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
            raise invalid(said, "prompt")
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
