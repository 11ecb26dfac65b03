"""The text of a grammar, as llguidance compiles it, and how much of it a user may send."""

import json

from llguidance import regex_to_lark

from ddtree.config import Grammar
from ddtree.errors import InvalidOption

MAX_SOURCE = 128 * 1024  # bytes; the slowest schema of that size known compiles in about two seconds
MAX_WHITESPACE = 64  # characters in a row between the parts of JSON: no answer is whitespace without end
# Without `no_forcing` llguidance walks ahead along all text that is certain (a million characters, for a{1000000}),
# and allows only one way to cut it into tokens, which a drafter often does not propose.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
_JSON = "%json "
_WHITESPACE = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}"}


def schema_text(schema: object) -> str:
    """A JSON schema as Lark grammars hold it (after `%json `), whitespace limited. One line.

    Raises InvalidOption for what is no schema, and for llguidance's own options in one.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise invalid(f"a JSON schema must be an object, not {str(schema)[:80]}")
    if "x-guidance" in schema:
        raise invalid("the schema's x-guidance is not supported: leave it out")
    return _compact({"x-guidance": _WHITESPACE, **schema})


def json_rule(schema: object) -> str:
    """The whole grammar of JSON by a schema."""
    return f"{_OPTIONS}start: {_JSON}{schema_text(schema)}"


def grammar_text(grammar: Grammar) -> str:
    """The Lark grammar that llguidance compiles."""
    match grammar.kind:
        case "lark":
            return _OPTIONS + grammar.source
        case "regex":
            return f"{_OPTIONS}start: /{regex_to_lark(grammar.source, '')}/"
        case "json_object":
            return json_rule({"type": "object"})
    return json_rule(_read(grammar.source))


def check_size(grammar: Grammar) -> None:
    """Raises InvalidOption for more than MAX_SOURCE bytes of a user's own: JSON counts as written without spaces."""
    match grammar.kind:
        case "json_schema":
            what, size = "the schema has", _size(_compact(_read(grammar.source)))
        case "lark" if _JSON in grammar.source and len(grammar.source) <= 2 * MAX_SOURCE:  # rules around schemas
            ours = len(schema_text({})) - len("{}") + len(",")
            schemas = [line.partition(_JSON)[2] for line in grammar.source.split("\n") if _JSON in line]
            what, size = "the schemas have", sum(_size(schema) - ours for schema in schemas)
        case _:
            what, size = "it has", _size(grammar.source)
    if size > MAX_SOURCE:
        raise invalid(f"{what} {size} bytes, more than {MAX_SOURCE} ({MAX_SOURCE // 1024} KiB): make it smaller")


def invalid(said: str, param: str = "response_format") -> InvalidOption:
    """The error of a grammar that cannot be used."""
    return InvalidOption(f"the grammar cannot be used: {said}", param=param, code="invalid_grammar")


def _read(source: str) -> object:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the schema is not JSON that can be read ({error})") from error


def _compact(value: object) -> str:
    try:
        written = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError as error:
        raise invalid("the schema is nested too deeply") from error
    if not written.isascii():
        try:
            written.encode()
        except UnicodeEncodeError as error:
            raise invalid(f"the schema has half a character at {error.start} (a lone surrogate)") from error
    return written


def _size(text: str) -> int:
    return len(text.encode(errors="replace"))
