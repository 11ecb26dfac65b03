"""What request bodies share: fields of features that are not here, sampling, stops, forms, speculation.

Every field either does what OpenAI's (or vLLM's) documentation says of it, or the request is refused: none is
accepted and ignored. Fields of features that are not here are accepted at the one value that asks for nothing.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from ddtree.config import (
    MAX_BIAS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_STOPS,
    MAX_TREE_BUDGET,
    MAX_TREE_TOP_K,
    MODES,
    TREE_CONTEXTS,
    Grammar,
    SamplingParams,
    Speculation,
)
from ddtree.engine.modes import MODES as ENGINE_MODES
from ddtree.server.problems import echo
from ddtree.server.schemas.base import WHOLE, Stop, Strict, Text, TokenId, invalid, without_neutral
from ddtree.server.schemas.forms import ResponseFormat, StructuredOutputs

MAX_TOKENS = 2**31 - 1  # beyond any context; a number of 300 digits would fill the message about it
MAX_PAIRS, MAX_KEY, MAX_LABEL = 16, 64, 512  # of `metadata`, as the OpenAI API has it
MAX_CHOICES = 128  # answers that one request may ask for: its prompts times `n`
MAX_STOP_IDS = 64
MAX_BIASED = 1024  # token ids that a request may move
TOKEN_ID_DIGITS = 10
TREE_OPTIONS = ("tree_budget", "tree_top_k", "tree_spine")  # of modes that draft trees
DRAFT_OPTIONS = ("tree_context",)  # of modes that draft
NEUTRAL_STREAM: Mapping[str, tuple[object, ...]] = {"include_obfuscation": (False,)}
# Values that ask for nothing, of fields that OpenAI or vLLM know for both kinds of completion and this server does
# not do. null always is one.
NEUTRAL_COMMON: Mapping[str, tuple[object, ...]] = {
    "length_penalty": (1,),
    "prompt_logprobs": (),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "return_tokens_as_token_ids": (False,),
    "logits_processors": (),
    "priority": (0,),
    "kv_transfer_params": (),
}


class StreamOptions(Strict):
    """What a stream carries besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="usage so far on every chunk (from vLLM)")

    @model_validator(mode="before")
    @classmethod
    def _refuse_features(cls, options: Any) -> Any:
        return without_neutral(options, NEUTRAL_STREAM, "stream_options.")


class SpeculativeOptions(Strict):
    """How this request speculates; what is left out stays as the server has it."""

    mode: str | None = Field(None, description="how it drafts", json_schema_extra={"enum": [*MODES, None]})
    tree_budget: Annotated[int, Field(ge=1, le=MAX_TREE_BUDGET), WHOLE] | None = Field(
        None, description="tree nodes, the root not counted"
    )
    tree_top_k: Annotated[int, Field(ge=1, le=MAX_TREE_TOP_K), WHOLE] | None = Field(
        None, description="candidate tokens per depth; with a pairwise head at most 32 count"
    )
    tree_spine: Annotated[int, Field(ge=0, le=MAX_TREE_BUDGET), WHOLE] | None = Field(
        None, description="top-1 tokens that a tree must hold"
    )
    tree_context: str | None = Field(
        None,
        description="what drafts take from the text so far",
        json_schema_extra={"enum": [*TREE_CONTEXTS, None]},
    )
    metrics: bool | None = Field(None, description="report `metrics.speculative_decoding` with the answer")

    @model_validator(mode="after")
    def _check_names(self) -> "SpeculativeOptions":
        if self.mode is not None and self.mode not in MODES:
            said = f"`speculative.mode` {echo(self.mode)} is unknown: choose one of {', '.join(MODES)}"
            raise invalid(said, "speculative.mode")
        if self.tree_context is not None and self.tree_context not in TREE_CONTEXTS:
            known = ", ".join(TREE_CONTEXTS)
            said = f"`speculative.tree_context` {echo(self.tree_context)} is unknown: choose one of {known}"
            raise invalid(said, "speculative.tree_context")
        return self


class CompletionFields(Strict):
    """The fields that both kinds of completion have. Numbers have the limits of OpenAI's API, or of vLLM's."""

    model: str | None = Field(None, description="a served model's name; left out: the first")
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = Field(None, description="answers for each prompt")
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS), WHOLE] | None = Field(None)
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS), WHOLE] | None = Field(
        None, description="no end before so many tokens (from vLLM)"
    )
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False, description="0: greedy; left out: 1")
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: Annotated[int, Field(ge=-1, lt=2**31), WHOLE] | None = Field(
        None, description="0 or -1: all tokens (from vLLM)"
    )
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False, description="from vLLM")
    presence_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, gt=0, le=MAX_REPETITION_PENALTY, allow_inf_nan=False)
    logit_bias: dict[str, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS, allow_inf_nan=False)]] | None = Field(
        None,
        max_length=MAX_BIASED,
        description="token id (as a string) -> added to its logit",
        json_schema_extra={"propertyNames": {"pattern": f"^[0-9]{{1,{TOKEN_ID_DIGITS}}}$"}},
    )
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED), WHOLE] | None = Field(
        None, description="left out: the server's, or a fresh one"
    )
    stop: Stop | None = Field(None, description=f"up to {MAX_STOPS} strings, which end the text and are not part of it")
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOP_IDS, description="from vLLM")
    ignore_eos: bool | None = Field(None, description="go on after the end-of-text token (from vLLM)")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(None, description="the ids of prompt and answer, too (from vLLM)")
    speculative: SpeculativeOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = Field(None, description="from vLLM")
    metadata: dict[Annotated[Text, Field(max_length=MAX_KEY)], Annotated[Text, Field(max_length=MAX_LABEL)]] | None = (
        Field(None, max_length=MAX_PAIRS, description="labels for the operator's own records; they change no answer")
    )
    user: str | None = Field(None, description="a label for the operator's own records; changes no answer")

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> "CompletionFields":
        if self.stream_options is not None:
            if not self.stream:
                raise invalid("`stream_options` needs `stream`: true", "stream_options")
            if self.stream_options.continuous_usage_stats and not self.stream_options.include_usage:
                said = "`stream_options.continuous_usage_stats` needs `include_usage`: true"
                raise invalid(said, "stream_options.continuous_usage_stats")
        if self.structured_outputs is not None and self.response_format is not None:
            said = "`structured_outputs` and `response_format` exclude each other: send one of them"
            raise invalid(said, "structured_outputs")
        if "" in self.stops:
            raise invalid("`stop` strings need at least one character", "stop")
        for name in self.logit_bias or ():
            if not (name.isascii() and name.isdecimal() and len(name) <= TOKEN_ID_DIGITS):
                raise invalid(f"`logit_bias` takes token ids, written as strings, not {echo(name)}", "logit_bias")
        limit, least = self.limit, self.min_tokens or 0
        if limit is not None and least > limit:
            raise invalid(f"min_tokens ({least}) is more than max_tokens ({limit}): lower it", "min_tokens")
        return self

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer; None: up to the end of the context."""
        return self.max_tokens

    @property
    def ranked(self) -> int | None:
        """Tokens whose log-probabilities are asked for beside the chosen one's; None: not even that."""
        return None

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

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream carries the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def metrics(self) -> bool:
        """Whether the request itself asks for `metrics.speculative_decoding`."""
        return self.speculative is not None and bool(self.speculative.metrics)

    @property
    def plain_format(self) -> dict[str, Any] | None:
        """The response format as JSON, without what was left out."""
        return (
            None if self.response_format is None else self.response_format.model_dump(exclude_none=True, by_alias=True)
        )

    @property
    def plain_structure(self) -> dict[str, Any] | None:
        """What `structured_outputs` asks for: one of its fields with its value."""
        return None if self.structured_outputs is None else self.structured_outputs.plain

    @property
    def form(self) -> str:
        """The field that says what form an answer must have: what a grammar is made of."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    def sampling(self, default_seed: int | None, grammar: Grammar | None = None) -> SamplingParams:
        """What the engine is asked for. The temperature is OpenAI's default of 1 where none was sent."""
        return SamplingParams(
            max_tokens=self.limit,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=tuple((int(name), float(bias)) for name, bias in (self.logit_bias or {}).items()),
            seed=default_seed if self.seed is None else self.seed,
            stop=self.stops,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            min_tokens=self.min_tokens or 0,
            logprobs=self.ranked,
            grammar=grammar,
        )

    def speculation(self, default: Speculation) -> Speculation | None:
        """The server's `default` with what the request overrides; None where it overrides nothing.

        Raises `ApiError` for an option that the mode does not read.
        """
        if self.speculative is None:
            return None
        asked = self.speculative.model_dump(exclude_none=True, exclude={"metrics"})
        if not asked:
            return None
        mode = asked.get("mode", default.mode)
        for name in TREE_OPTIONS:
            if name in asked and not ENGINE_MODES[mode].tree:
                said = f"`speculative.{name}` goes with the modes that draft trees, not with {mode}: leave it out"
                raise invalid(said, f"speculative.{name}")
        for name in DRAFT_OPTIONS:
            if name in asked and not ENGINE_MODES[mode].drafts:
                said = f"`speculative.{name}` goes with the modes that draft, not with {mode}: leave it out"
                raise invalid(said, f"speculative.{name}")
        own = {name: getattr(default, name) for name in ("mode", *TREE_OPTIONS, *DRAFT_OPTIONS)}
        return Speculation(**{**own, **asked})
