"""Log-probabilities as OpenAI's two shapes have them. They are the model's own: before temperature, bias and masks."""

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtree.engine import Text
    from ddtree.engine.sampling import TokenLogprob

LOWEST = -9999.0  # JSON has no infinity; vLLM sends this for a token that cannot be
CACHED = 65536  # tokens whose spelling is kept: a few megabytes


class Spelling:
    """How tokens are written: their bytes, and those bytes as text. Kept, for a token comes again and again."""

    def __init__(self, text: "Text") -> None:
        self._token_bytes = text.token_bytes
        self._known: dict[int, tuple[str, list[int], bytes]] = {}

    def __call__(self, token: int) -> tuple[str, list[int], bytes]:
        """Text (a part of a character shows as U+FFFD), byte values, and bytes of a token."""
        known = self._known.get(token)
        if known is None:
            raw = self._token_bytes(token)
            known = (raw.decode(errors="replace"), list(raw), raw)
            if len(self._known) >= CACHED:
                self._known.clear()
            self._known[token] = known
        return known


def chat_logprobs(spelling: Spelling, tokens: "Iterable[TokenLogprob]") -> dict[str, Any]:
    """The `logprobs` of a choice of a chat: one entry a token, whatever field its text went to."""
    return {"content": [_entry(spelling, one) for one in tokens], "refusal": None}


def _entry(spelling: Spelling, one: "TokenLogprob") -> dict[str, Any]:
    entry = _pair(spelling, one.token_id, one.logprob)
    entry["top_logprobs"] = [_pair(spelling, token, logprob) for token, logprob in one.top]
    return entry


def _pair(spelling: Spelling, token: int, logprob: float) -> dict[str, Any]:
    text, values, _ = spelling(token)
    return {"token": text, "logprob": max(logprob, LOWEST), "bytes": values}


class LegacyLogprobs:
    """The `logprobs` of a text completion's choice, chunk by chunk.

    Offsets count characters of the answer; a token that only ends a character begins where that character does.
    """

    def __init__(self, spelling: Spelling, end_ids: frozenset[int] = frozenset()) -> None:
        self._spelling = spelling
        self._end_ids = end_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def push(self, tokens: "Sequence[TokenLogprob]") -> dict[str, Any]:
        """Four lists as long as `tokens`. The chosen token is among its `top_logprobs`, however unlikely it was."""
        block: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for one in tokens:
            text, _, raw = self._spelling(one.token_id)
            top: dict[str, float] = {}
            for token, logprob in one.top:
                top.setdefault(self._spelling(token)[0], max(logprob, LOWEST))  # two may be spelled alike: the better
            own = max(one.logprob, LOWEST)
            top.setdefault(text, own)
            block["tokens"].append(text)
            block["token_logprobs"].append(own)
            block["top_logprobs"].append(top)
            block["text_offset"].append(self._offset)
            if one.token_id not in self._end_ids:  # those are no part of the text
                self._offset += len(self._decoder.decode(raw))
        return block


def joined(blocks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The blocks of a choice's chunks as the one of its whole answer, in either shape."""
    whole: dict[str, Any] = {}
    for block in blocks:
        for name, values in block.items():
            if values is None or name not in whole:
                whole[name] = values if values is None else list(values)
            else:
                whole[name] += values
    return whole
