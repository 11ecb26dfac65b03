"""What form an answer must have: OpenAI's `response_format` and vLLM's `structured_outputs`."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from ddtree.server.schemas.base import Strict, Text, encodable, invalid, without_neutral

MAX_CHOICES_OF_FORM = 1024
MAX_SOURCE = 128 * 1024  # characters of a regular expression or a grammar
KINDS = ("json", "regex", "choice", "grammar", "json_object")
NEUTRAL_STRUCTURED: Mapping[str, tuple[object, ...]] = {
    "disable_fallback": (False,),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
    "whitespace_pattern": (),
    "structural_tag": (),
    "json_object": (False,),
}


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

    @model_validator(mode="before")
    @classmethod
    def _check_text(cls, value: Any) -> Any:
        encodable(value, "response_format")
        return value

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        param = "response_format.json_schema"
        if self.type == "json_schema" and self.json_schema is None:
            raise invalid(f"`{param}` is missing, which type json_schema needs", param)
        if self.type != "json_schema" and self.json_schema is not None:
            raise invalid(f"`{param}` goes with type json_schema alone, not with {self.type}: leave it out", param)
        return self


def _read_schema(value: object) -> object:
    """A schema that came as its text."""
    if not isinstance(value, str) or len(value) > MAX_SOURCE:
        return value
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        return value
    encodable(read, "structured_outputs.json")
    return read


Schema = Annotated[dict[str, Any], BeforeValidator(_read_schema, json_schema_input_type=dict[str, Any] | str)]


class StructuredOutputs(Strict):
    """What form the answer must have: exactly one of these."""

    json_schema: Schema | None = Field(None, alias="json", description="a JSON schema, as an object or as its text")
    regex: Annotated[Text, Field(min_length=1, max_length=MAX_SOURCE)] | None = Field(
        None, description="a regular expression that the whole answer matches"
    )
    choice: list[Annotated[Text, Field(min_length=1)]] | None = Field(
        None, min_length=1, max_length=MAX_CHOICES_OF_FORM, description="the answer is one of these"
    )
    grammar: Annotated[Text, Field(min_length=1, max_length=MAX_SOURCE)] | None = Field(
        None, description="a grammar in llguidance's dialect of Lark, which begins at `start`"
    )
    json_object: bool | None = Field(None, description="true: any JSON object")

    @model_validator(mode="before")
    @classmethod
    def _refuse_features(cls, value: Any) -> Any:
        encodable(value, "structured_outputs")
        kept = without_neutral(value, {**NEUTRAL_STRUCTURED, "json_object": (False, True)}, "structured_outputs.")
        if isinstance(value, dict) and isinstance(kept, dict) and value.get("json_object") is True:
            kept["json_object"] = True
        return kept

    @model_validator(mode="after")
    def _check_one(self) -> "StructuredOutputs":
        sent = list(self.plain)
        if len(sent) != 1:
            said = f"not {' and '.join(sent)} together" if sent else "but holds none of them"
            raise invalid(f"`structured_outputs` takes exactly one of {', '.join(KINDS)}, {said}", "structured_outputs")
        return self

    @property
    def plain(self) -> dict[str, Any]:
        """What was asked for, by the name it was sent with; a schema as an object."""
        fields = {name: getattr(self, name) for name in KINDS if name != "json"}
        asked = {"json": self.json_schema, **fields}
        return {name: value for name, value in asked.items() if value is not None and value is not False}
