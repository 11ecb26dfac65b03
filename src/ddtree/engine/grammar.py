"""Grammars that an answer must follow: what is compiled for whom.

llguidance (https://github.com/guidance-ai/llguidance) does the parsing; its `LLMatcher` is one answer's place in a
grammar. What would make it slow or hungry is refused here; following.py lays its masks over draft trees.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ddtree.config import Grammar
from ddtree.engine.following import GrammarMatcher, plain_reason
from ddtree.engine.grammar_text import MAX_SOURCE, check_size, grammar_text, invalid, json_rule, schema_text
from ddtree.engine.text import Text
from ddtree.errors import InvalidOption

__all__ = ["MAX_SOURCE", "GrammarCompiler", "GrammarMatcher", "check_schema", "schema_text"]

MAX_KEPT = 64  # compiled grammars
MAX_KEPT_SOURCE = 4 * MAX_SOURCE  # characters of their sources in all; compiled, one takes some 300 bytes a character
# What one mask may cost (14,000 an ms) and how many states a lexer may have. Answers share a compiled grammar's lexer:
# what one mask made is free for the next, so what a mask costs there depends on others. So those limits end no answer:
# one that meets them goes on alone, by a lexer of its own with much wider ones (following.py). Ordinary schemas need
# less than 10,000. An answer may use up two shared lexers before it goes on alone, so its own has room for the states
# of both: what they allowed, it allows.
_SHARED_FUEL, _ALONE_FUEL, _SHARED_STATES = 25_000, 400_000, 50_000
_LIMITS = LLParserLimits(
    step_lexer_fuel=_SHARED_FUEL, max_lexer_states=_SHARED_STATES, max_grammar_size=100_000, verbose_errors=False
)
_ALONE = LLParserLimits(
    step_lexer_fuel=_ALONE_FUEL, max_lexer_states=2 * _SHARED_STATES, max_grammar_size=100_000, verbose_errors=False
)
_PROBED = 64  # tokens of text that every answer begins with
_FEW = 8  # tokens that may be the same text, cut in other ways


def check_schema(schema: object, param: str, where: str | None = None) -> None:
    """Raises InvalidOption, with `param`, for a schema with parts that cannot be enforced; `where` says whose it is.

    Takes up to seconds for the largest schemas: not for a thread that others wait for.
    """
    try:
        check_size(Grammar("json_schema", json.dumps(schema)))
        if said := LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(json_rule(schema)), limits=_ALONE):
            raise invalid(plain_reason(said))
    except InvalidOption as error:
        raise InvalidOption(f"{where or param}: {error}", param=param, code=error.code) from error
    except RecursionError as error:
        raise invalid(f"{where or param}: nested too deeply", param) from error


class GrammarCompiler:
    """Compiles grammars for one model. Safe to use from several threads."""

    def __init__(self, text: Text, vocab: int, end_ids: Sequence[int]) -> None:
        """vocab: rows of the model's head, which may be more or fewer than the tokenizer's words; end_ids: what may end
        an answer, anywhere its grammar may end.
        """
        self._text, self.vocab = text, vocab
        self.ends = sorted({end for end in end_ids if 0 <= end < vocab})
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[Grammar, LLMatcher | None] = OrderedDict()  # None: costly

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the beginning of an answer; compiled once while it is among the last used.

        Raises InvalidOption (code invalid_grammar) for a grammar that does not compile, that nothing matches, or that
        is too complex already where every answer begins.
        """
        return GrammarMatcher(self, grammar)

    def start(self, grammar: Grammar, failed: LLMatcher | None = None) -> LLMatcher | None:
        """The compiled grammar at its beginning, its lexer shared by all answers; None for one that is too costly to
        share: its answers go alone. failed: what this call gave before, no longer of use.
        """
        with self._lock:
            known, start = grammar in self._kept, self._kept.get(grammar)
            if known:
                self._kept.move_to_end(grammar)
        return start if known and (start is None or start is not failed) else self._compile(grammar)

    def alone(self, grammar: Grammar) -> LLMatcher:
        """The grammar compiled for one answer, with wider limits. May raise what `matcher` raises."""
        return self._made(grammar, _ALONE)

    def keep(self, grammar: Grammar, start: LLMatcher | None) -> None:
        """Remember a compiled grammar, or (None) that it is too costly to share."""
        with self._lock:
            self._kept[grammar] = start
            while len(self._kept) > MAX_KEPT or sum(len(one.source) for one in self._kept) > MAX_KEPT_SOURCE:
                self._kept.popitem(last=False)

    def words(self) -> LLTokenizer:
        """The vocabulary as llguidance reads it: takes a fifth of a second for 50,000 words."""
        with self._making:
            if self._tokenizer is None:
                backend = self._text.backend
                known = backend.get_vocab_size(with_added_tokens=True)
                ends = [end for end in self.ends if end < known]
                spec = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
                try:
                    self._tokenizer = LLTokenizer(json.dumps(spec), n_vocab=max(known, self.vocab), eos_token=ends)
                except Exception as error:  # llguidance's errors have no type of their own
                    raise invalid(f"this model's tokenizer cannot follow a grammar ({error})") from error
            return self._tokenizer

    def _compile(self, grammar: Grammar) -> LLMatcher | None:
        """Compiles anew and keeps the result. Holds no lock meanwhile: others go on."""
        if not self.ends:
            raise invalid("this model has no end-of-sequence token, so nothing ends an answer by a grammar")
        check_size(grammar)
        start: LLMatcher | None = self._made(grammar, _LIMITS)
        assert start is not None
        if self._probe(start):
            start = None
            if said := self._probe(self._made(grammar, _ALONE)):
                nothing = "NoExtension" in said
                raise invalid("nothing matches it" if nothing else f"it is too complex ({plain_reason(said)})")
        self.keep(grammar, start)
        return start

    def _made(self, grammar: Grammar, limits: LLParserLimits) -> LLMatcher:
        source = LLMatcher.grammar_from_lark(grammar_text(grammar))
        made = LLMatcher(self.words(), source, log_level=0, limits=limits)
        if made.is_error():
            raise invalid(plain_reason(made.get_error()))
        return made

    def _probe(self, start: LLMatcher) -> str:
        """Follows the text that every answer begins with. Returns llguidance's error where it fails, else "".

        Some grammars are found to match nothing, or to be too complex, only when they are used.
        """
        at = start.deep_copy()
        for _ in range(_PROBED):
            mask = np.frombuffer(at.compute_bitmask(), np.uint8)
            if at.is_error():
                return at.get_error()
            allowed = np.unpackbits(mask, bitorder="little").nonzero()[0].tolist()
            ways = {token: self._text.token_bytes(token) for token in allowed[: _FEW + 1] if token not in self.ends}
            for token in ways:
                step = at.deep_copy()
                if step.try_consume_tokens([token]) != 1:
                    return step.get_error() or "it cannot be followed"
            longest = max(ways, key=lambda token: len(ways[token]), default=None)
            if longest is None or len(allowed) > _FEW or at.is_accepting():
                return ""
            if not all(ways[longest].startswith(spelled) for spelled in ways.values()):
                return ""
            at.consume_tokens([longest])
        return ""
