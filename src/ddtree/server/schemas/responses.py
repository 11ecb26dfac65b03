"""The bodies of answers, as the server's OpenAPI document tells them. Answers are built as plain dicts: see `chat`."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptDetails(_Body):
    """Of the prompt's tokens, those whose work was done already."""

    cached_tokens: int


class CompletionDetails(_Body):
    """Of the answers' tokens, those that were thinking."""

    reasoning_tokens: int


class Usage(_Body):
    """Token counts; with several choices the answers' are summed, each prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class ShadowBlock(_Body):
    """What mode shadow-linear saw of the tree."""

    linear_acceptance_length: float | None
    tree_acceptance_length: float | None
    agree: bool | None
    overhead: float | None


class SpeculationBlock(_Body):
    """How an answer was decoded."""

    mode: str = Field(description="the mode that really ran")
    acceptance_length: float | None = Field(description="tokens a round, its bonus included; null without a round")
    rounds: int
    tok_s: float | None
    shadow: ShadowBlock | None


class SpeculativeDecoding(_Body):
    """vLLM's per-request acceptance metrics."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int] = Field(description="[j]: rounds that accepted j drafted tokens")
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class Metrics(_Body):
    """What a request asked to know of its own speculation."""

    speculative_decoding: SpeculativeDecoding | None = Field(description="null where nothing was drafted")


class Pair(_Body):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class Entry(Pair):
    """A chosen token, and the likely ones at its place."""

    top_logprobs: list[Pair]


class ChatLogprobs(_Body):
    """One entry for each token of the answer."""

    content: list[Entry] | None
    refusal: None = None


class CompletionLogprobs(_Body):
    """One place for each token of the answer."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class FunctionCall(_Body):
    """What is called; the arguments are the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(_Body):
    """One call that the model makes."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AnswerMessage(_Body):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoiceBody(_Body):
    """One answer to a chat."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None = Field(description="the stop string or stop token id that ended it, from vLLM")
    token_ids: list[int] | None = None
    ddtree: SpeculationBlock | None = None


class ChatCompletion(_Body):
    """A whole answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoiceBody]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    ddtree: SpeculationBlock | None = None
    metrics: Metrics | None = None


class CompletionChoice(_Body):
    """One continuation of a text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    ddtree: SpeculationBlock | None = None


class Completion(_Body):
    """A whole answer to `POST /v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    ddtree: SpeculationBlock | None = None
    metrics: Metrics | None = None


class ModelCard(_Body):
    """A served name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(_Body):
    """All served names."""

    object: Literal["list"]
    data: list[ModelCard]


def _success(model: type[BaseModel], chunks: str) -> dict[int | str, dict[str, Any]]:
    """FastAPI's `responses` of a route that streams on demand."""
    told = f"with stream: events `data: {{json}}` of {chunks}, the last one `data: [DONE]`"
    return {
        200: {
            "description": f"the whole answer; {told}",
            "model": model,
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    }


SUCCESS_CHAT = _success(ChatCompletion, "chat.completion.chunk objects")
SUCCESS_TEXT = _success(Completion, "text_completion objects")
