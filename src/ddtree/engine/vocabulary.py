"""The bytes that each token stands for, as its vocabulary spells them."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

# Thinking and tool calls are told by these. Some tokenizers call them special, which would drop them from the text.
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def with_plain_markers(backend: Tokenizer) -> Tokenizer:
    """The tokenizer with `MARKERS` as text that decoding shows; itself where they are so already."""
    added = backend.get_added_tokens_decoder().values()
    if not any(token.special and token.content in MARKERS for token in added):
        return backend
    spec = json.loads(backend.to_str())
    for token in spec["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in MARKERS
    return Tokenizer.from_str(json.dumps(spec))


@lru_cache(maxsize=1)
def _byte_letters() -> Mapping[str, int]:
    """The letters that byte-level vocabularies spell bytes with: printable ones as themselves, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of a tokenizer's decoder, those of sequences too."""
    if isinstance(part, dict):
        yield part
        for inner in part.get("decoders", ()):
            yield from _steps(inner)


class TokenBytes:
    """Reads the bytes of tokens. Byte-level vocabularies, and those of characters with `<0x..>` for single bytes."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._added = {token: added.content.encode() for token, added in backend.get_added_tokens_decoder().items()}
        spec = json.loads(backend.to_str())
        steps = list(_steps(spec.get("decoder")))
        kinds = {step["type"] for step in steps}
        self._byte_level = "ByteLevel" in kinds
        self._by_rule = bool(kinds & {"ByteFallback", "Metaspace", "Replace"})
        self._byte_fallback = "ByteFallback" in kinds or bool(spec["model"].get("byte_fallback"))
        self._spaces = [step["replacement"] for step in steps if step["type"] == "Metaspace"]
        self._replace = [
            (step["pattern"]["String"], step["content"])
            for step in steps
            if step["type"] == "Replace" and "String" in step["pattern"]
        ] + [(space, " ") for space in self._spaces]

    def __call__(self, token: int) -> bytes:
        """The bytes of one id; none for an id that the vocabulary does not have."""
        if token in self._added:
            return self._added[token]
        piece = self._backend.id_to_token(token) if 0 <= token < 2**32 else None
        if piece is None:
            return b""
        if self._byte_level:
            letters = _byte_letters()
            return bytes(letters[c] for c in piece) if all(c in letters for c in piece) else piece.encode()
        if self._byte_fallback and (byte := _BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        if not self._by_rule:  # a decoder of another kind: what it makes of the token alone
            return str(self._backend.decode([token], skip_special_tokens=False)).encode()
        for old, new in self._replace:
            piece = piece.replace(old, new)
        return piece.encode()
