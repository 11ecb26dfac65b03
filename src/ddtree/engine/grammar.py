"""Grammars that an answer must follow: which tokens may come next, at every row of a draft tree along its own path.

llguidance (https://github.com/guidance-ai/llguidance) does the parsing; its `LLMatcher` is one answer's place in a
grammar. Here its masks are laid over a tree, and what would make it slow or hungry is refused.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from numpy.typing import NDArray
from torch import Tensor

from ddtree.config import Grammar
from ddtree.engine.text import Text
from ddtree.errors import InvalidOption

MAX_SOURCE = 128 * 1024  # characters; the slowest schema of that size known compiles in about two seconds
MAX_KEPT = 64  # compiled grammars
MAX_KEPT_SOURCE = 4 * MAX_SOURCE  # characters of their sources in all; compiled, one takes some 300 bytes a character
MAX_WHITESPACE = 64  # characters in a row between the parts of JSON: no answer is whitespace without end
_ANY_OBJECT = {"type": "object"}
# Without `no_forcing` llguidance walks ahead along all text that is certain (a million characters, for a{1000000}),
# and allows only one way to cut it into tokens, which a drafter often does not propose.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
_LIMITS = LLParserLimits(max_lexer_states=100_000, max_grammar_size=100_000, verbose_errors=False)


def schema_text(schema: object) -> str:
    """A JSON schema as Lark grammars hold it (after `%json `), whitespace limited.

    Raises InvalidOption for what is no schema, and for llguidance's own options in one.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _invalid(f"a JSON schema must be an object, not {str(schema)[:80]}")
    if "x-guidance" in schema:
        raise _invalid("the schema's x-guidance is not supported: leave it out")
    whitespace = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}"}
    return json.dumps({"x-guidance": whitespace, **schema})


def check_schema(schema: object, param: str, where: str | None = None) -> None:
    """Raises InvalidOption, with `param`, for a schema with parts that cannot be enforced; `where` says whose it is.

    Takes up to seconds for the largest schemas: not for a thread that others wait for.
    """
    try:
        source = _OPTIONS + "start: %json " + schema_text(schema)
        _check_size(source)
        if said := LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(source), limits=_LIMITS):
            raise _invalid(_plain(said))
    except InvalidOption as error:
        raise InvalidOption(f"{where or param}: {error}", param=param, code=error.code) from error
    except RecursionError as error:
        raise _invalid(f"{where or param}: nested too deeply", param) from error


class GrammarCompiler:
    """Compiles grammars for one model. Safe to use from several threads."""

    def __init__(self, text: Text, vocab: int, end_ids: Sequence[int]) -> None:
        """vocab: rows of the model's head, which may be more or fewer than the tokenizer's words; end_ids: what may end
        an answer, anywhere its grammar may end.
        """
        self._text, self._vocab = text, vocab
        self._ends = sorted({end for end in end_ids if 0 <= end < vocab})
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def matcher(self, grammar: Grammar) -> "GrammarMatcher":
        """A matcher at the beginning of an answer; compiled once while it is among the last used.

        Raises InvalidOption (code invalid_grammar) for a grammar that does not compile or that nothing matches.
        """
        with self._lock:
            start = self._kept.get(grammar)
            if start is not None:
                self._kept.move_to_end(grammar)
        if start is None:
            start = self._compile(grammar)
        return GrammarMatcher(start, lambda: self._compile(grammar), self._vocab, self._words().vocab_size, self._ends)

    def _keep(self, grammar: Grammar, start: LLMatcher) -> None:
        with self._lock:
            self._kept[grammar] = start
            while len(self._kept) > MAX_KEPT or sum(len(one.source) for one in self._kept) > MAX_KEPT_SOURCE:
                self._kept.popitem(last=False)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        """Compiles anew and keeps the result. Holds no lock meanwhile: others go on."""
        if not self._ends:
            raise _invalid("this model has no end-of-sequence token, so nothing ends an answer by a grammar")
        source = _lark(grammar)
        _check_size(source)
        start = LLMatcher(self._words(), LLMatcher.grammar_from_lark(source), log_level=0, limits=_LIMITS)
        if start.is_error():
            raise _invalid(_plain(start.get_error()))
        probe = start.deep_copy()  # some grammars are found to match nothing only when they are used
        probe.compute_bitmask()
        if probe.is_error():
            said = probe.get_error()
            raise _invalid("nothing matches it" if "NoExtension" in said else _plain(said))
        self._keep(grammar, start)
        return start

    def _words(self) -> LLTokenizer:
        """The vocabulary as llguidance reads it: takes a fifth of a second for 50,000 words."""
        with self._making:
            if self._tokenizer is None:
                backend = self._text.backend
                known = backend.get_vocab_size(with_added_tokens=True)
                ends = [end for end in self._ends if end < known]
                spec = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
                try:
                    self._tokenizer = LLTokenizer(json.dumps(spec), n_vocab=max(known, self._vocab), eos_token=ends)
                except Exception as error:  # llguidance's errors have no type of their own
                    raise _invalid(f"this model's tokenizer cannot follow a grammar ({error})") from error
            return self._tokenizer


class GrammarMatcher:
    """One answer's place in a grammar (the sampler's `Matcher`). Used by one thread at a time."""

    def __init__(
        self, start: LLMatcher, renew: Callable[[], LLMatcher], vocab: int, words: int, ends: Sequence[int]
    ) -> None:
        """start: the compiled grammar at its beginning; renew: compiles it again; words: its tokenizer's; ends: ids
        below `vocab`.
        """
        self._renew, self._vocab, self._ends = renew, vocab, frozenset(ends)
        self._end_columns = sorted(ends)
        self._mask_size = -(-max(vocab, words) // 32)  # int32 numbers of one bit a token
        self._matcher = start.deep_copy()
        self._committed: list[int] = []
        self._ended = False
        self._failure = ""
        self.error: str | None = None  # why no row has an answer any more: the grammar grew too complex on its way

    @property
    def finished(self) -> bool:
        """Only end tokens may follow."""
        return self._ended or (self.error is None and self._matcher.is_stopped())

    def commit(self, tokens: Sequence[int]) -> None:
        """Go on by tokens that the answer keeps, in order; what follows an end token is ignored.

        A token that the grammar forbids sets `error`.
        """
        for token in tokens:
            if self._ended or self.error is not None:
                return
            if token in self._ends:
                self._ended = True
                return
            follows = 0 <= token < self._vocab and self._matcher.try_consume_tokens([token]) == 1
            self._committed.append(token)
            if not follows:  # perhaps at a limit that others used up
                self._again([])
                if self._matcher.is_error():
                    said = f"token {token} is not what it allows after {len(self._committed) - 1} tokens"
                    self.error = _plain(self._matcher.get_error()) or said

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Which tokens may follow each row, given its own path.

        Args:
            tokens, parents: of the rows; row 0 is the root (parent -1), committed before.
        Returns: [n, vocab] bool. End tokens are allowed exactly where the grammar may end, nothing else behind one. A
        row whose path breaks the grammar is all False, as are all rows once `error` is set.
        """
        rows = len(tokens)
        bits = np.zeros((rows, self._mask_size), np.int32)
        may_end = np.zeros(rows, bool)
        if self.error is None:
            self._walk(tokens, parents, bits, may_end)
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little", count=self._vocab).view(bool)
        allowed[:, self._end_columns] = may_end[:, None]
        return torch.from_numpy(allowed)

    def _walk(
        self, tokens: Sequence[int], parents: Sequence[int], bits: NDArray[np.int32], may_end: NDArray[np.bool_]
    ) -> None:
        """Follows every path from the root, what they share once; a fork gets a copy of the matcher.

        llguidance could also go back (`rollback`), but then gives wrong masks: rows that a mask was computed with stay
        and are taken for those of another path (1.9.1). So the answer's own matcher only ever goes on.
        """
        children = _children(parents)
        todo = [(0, None if self._ended else self._matcher.deep_copy())]  # row, matcher behind it; None: it has ended
        while todo:
            row, at = todo.pop()
            if at is not None:
                at = self._allow(at, bits[row], partial(_path, row, tokens, parents))
                if at is None:  # too complex to tell
                    if row == 0:
                        self.error = self._failure
                    continue
            may_end[row] = at is None or at.is_accepting()
            if may_end[row]:
                todo += [(child, None) for child in children[row] if tokens[child] in self._ends]
            legal = [child for child in children[row] if at is not None and self._legal(bits[row], tokens[child])]
            for child in legal:
                assert at is not None
                own = at if child == legal[-1] else at.deep_copy()
                if own.try_consume_tokens([tokens[child]]) != 1:
                    own = self._again(_path(child, tokens, parents))
                todo.append((child, own))

    def _legal(self, mask: NDArray[np.int32], token: int) -> bool:
        """Whether a mask allows a token that is no end."""
        return 0 <= token < self._vocab and token not in self._ends and bool(mask[token // 32] >> (token % 32) & 1)

    def _allow(self, at: LLMatcher, mask: NDArray[np.int32], path: Callable[[], list[int]]) -> LLMatcher | None:
        """Writes the mask behind a path, one bit a token. Returns the matcher there; None if it is too complex."""
        for attempt in range(2):
            if not at.is_error():
                at.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
                if not at.is_error():
                    return at
            self._failure = _plain(at.get_error()) or "the grammar is too complex"
            if attempt == 0:
                at = self._again(path())
        mask[:] = 0
        return None

    def _again(self, path: Sequence[int]) -> LLMatcher:
        """The answer's matcher made anew, and one at the end of `path`, in place of one that failed at a limit.

        All matchers of a compiled grammar share a cache of lexer states, which may have reached its limit by what other
        answers did. So the grammar is compiled anew: what an answer gets depends on the answer alone.
        """
        self._matcher = self._renew().deep_copy()
        self._matcher.consume_tokens(self._committed)  # sets its error where it does not succeed
        at = self._matcher.deep_copy()
        at.consume_tokens(list(path))
        return at


def _children(parents: Sequence[int]) -> list[list[int]]:
    """Rows below each row."""
    children: list[list[int]] = [[] for _ in parents]
    for row, parent in enumerate(parents):
        if row > 0:
            children[parent].append(row)
    return children


def _path(row: int, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The tokens below the root that lead to a row, its own the last."""
    path = []
    while row > 0:
        path.append(tokens[row])
        row = parents[row]
    return path[::-1]


def _lark(grammar: Grammar) -> str:
    """The Lark grammar that llguidance compiles."""
    match grammar.kind:
        case "lark":
            return _OPTIONS + grammar.source
        case "regex":
            return f"{_OPTIONS}start: /{regex_to_lark(grammar.source, '')}/"
        case "json_object":
            return f"{_OPTIONS}start: %json {schema_text(_ANY_OBJECT)}"
    try:
        return f"{_OPTIONS}start: %json {schema_text(json.loads(grammar.source))}"
    except (ValueError, RecursionError) as error:
        raise _invalid(f"the schema is not JSON that can be read ({error})") from error


def _check_size(source: str) -> None:
    if len(source) > MAX_SOURCE:
        raise _invalid(f"its {len(source)} characters are more than {MAX_SOURCE}: make it smaller")


def _plain(said: str) -> str:
    """llguidance's message without its internals."""
    return " ".join(said.partition("<state>")[0].replace("<non-verbose/>", "").split())[:400]


def _invalid(said: str, param: str = "response_format") -> InvalidOption:
    return InvalidOption(f"the grammar cannot be used: {said}", param=param, code="invalid_grammar")
