"""One answer's way through a grammar: the masks of a draft tree's rows, each by the row's own path.

llguidance limits what a mask may cost and how many states a lexer has. All copies of a compiled grammar share its
lexer, so there one answer's limits would depend on what else was asked: on other answers, and on its own drafts, of
which every mode has others. So nothing that happens in a shared lexer ends an answer. An answer that meets a limit goes
on alone: by a lexer that nobody else uses, brought to where plain decoding would have it, and without drafts from then
on. What happens there depends on the answer's tokens alone, so every mode ends at the same token.
"""

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from ddtree.config import Grammar

if TYPE_CHECKING:
    from ddtree.engine.grammar import GrammarCompiler

APART = 16  # tokens that a fresh lexer must have served before another one is made: what one costs is shared by them
Bits = NDArray[np.int32]  # a mask: [words / 32], one bit a token
_UNHELPFUL = (  # what users of the server can do nothing with
    (re.compile(r"\n\s*\d+ \| .*", re.DOTALL), ""),  # the lines around the place, with what was wrapped around a schema
    (re.compile(r"^\s*(at )?\d+\(\d+\): "), ""),
    (re.compile(r"^(failed to compile JSON schema|Parser Error|lexer error): "), ""),
    (re.compile(r"\. Enable 'coerce_one_of'.*"), ": use anyOf"),
    (re.compile(r"; (consider making your grammar|try avoiding) .*"), ""),
)


class _Failed(Exception):
    """A shared matcher met a limit."""


def plain_reason(said: str) -> str:
    """llguidance's message without its internals."""
    said = said.partition("<state>")[0].replace("<non-verbose/>", "")
    for pattern, instead in _UNHELPFUL:
        said = pattern.sub(instead, said)
    return " ".join(said.split())[:400]


class PlainFollower:
    """Follows an answer as plain decoding does, by a lexer of its own: a mask, a token, a mask, a token.

    Everything here is a function of the tokens. A lexer that is full of states of masks long ago is made anew.
    """

    def __init__(self, make: Callable[[], LLMatcher], size: int) -> None:
        """make: compiles the grammar; size: int32 numbers of a mask."""
        self._make = make
        self._made: LLMatcher | None = None
        self._mask = np.zeros(size, np.int32)
        self._known = False  # whether _mask is that behind the last token
        self._tokens: list[int] = []
        self._since = 0  # tokens when the lexer was made
        self.may_end = False  # as of mask()
        self.error: str | None = None

    def mask(self) -> Bits:
        """What may follow; nothing once `error` is set."""
        if self._known or self.error is not None:
            return self._mask
        if not self._compute() and not (self._renew() and self._compute()):
            self._mask[:], self.may_end = 0, False
            self.error = self.error or plain_reason(self._at.get_error()) or "it met a limit"
        self._known = True
        return self._mask

    def follow(self, token: int) -> None:
        """Go on by a token that is no end."""
        mask = self.mask()
        if self.error is not None:
            return
        self._known = False
        legal = 0 <= token < 32 * len(mask) and bool(mask[token // 32] >> (token % 32) & 1)
        self._tokens.append(token)
        if legal and self._at.try_consume_tokens([token]) == 1:
            return
        if not legal:
            self.error = f"token {token} is not what it allows after {len(self._tokens) - 1} tokens"
        elif not self._renew():
            self.error = plain_reason(self._at.get_error()) or "it met a limit"

    @property
    def stopped(self) -> bool:
        """Only an end may follow."""
        return self.error is None and self._at.is_stopped() and not self._at.is_error()

    @property
    def _at(self) -> LLMatcher:
        """The place in the grammar. Made when it is first asked for: compiling takes up to seconds."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def _compute(self) -> bool:
        if self._at.is_error():
            return False
        self._at.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self.may_end = not self._at.is_error() and self._at.is_accepting()
        return not self._at.is_error()

    def _renew(self) -> bool:
        """A fresh lexer behind the same tokens; False where it fails too, or where the last one is too young."""
        if len(self._tokens) - self._since < APART:
            return False
        self._since, self._made = len(self._tokens), self._make()
        return self._at.consume_tokens(self._tokens)


class GrammarMatcher:
    """One answer's place in a grammar (the sampler's `Matcher`). Used by one thread at a time."""

    def __init__(self, compiler: "GrammarCompiler", grammar: Grammar) -> None:
        """Raises InvalidOption for a grammar that cannot be used."""
        self._compiler, self._grammar = compiler, grammar
        self._vocab, self._ends = compiler.vocab, frozenset(compiler.ends)
        self._start = compiler.start(grammar)
        self._mask_size = -(-max(self._vocab, compiler.words().vocab_size) // 32)
        self._shared = None if self._start is None else self._start.deep_copy()
        self._own = self._follower() if self._start is None else None
        self._renewed = False
        self._committed: list[int] = []
        self._ended = False
        self.error: str | None = None  # why no row has an answer any more: the grammar grew too complex on its way

    @property
    def finished(self) -> bool:
        """Only end tokens may follow."""
        if self._ended or self.error is not None:
            return self._ended
        return self._own.stopped if self._own is not None else self._matcher.is_stopped()

    @property
    def alone(self) -> bool:
        """Only the root has a mask: drafts are of no use."""
        return self._own is not None

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
            self._committed.append(token)
            if self._own is not None:
                self._own.follow(token)
                self.error = self._own.error
            elif not (0 <= token < self._vocab and self._matcher.try_consume_tokens([token]) == 1):
                self._recover(self._matcher.get_error())

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Which tokens may follow each row, given its own path.

        Args:
            tokens, parents: of the rows; row 0 is the root (parent -1), committed before.
        Returns: [n, vocab] bool. End tokens are allowed exactly where the grammar may end, nothing else behind one. A
        row whose path breaks the grammar is all False, as are drafts that were too complex to follow, and all rows once
        `error` is set.
        """
        bits = self.bits(tokens, parents).view(np.uint8)
        return torch.from_numpy(np.unpackbits(bits, axis=1, bitorder="little", count=self._vocab).view(bool))

    def bits(self, tokens: Sequence[int], parents: Sequence[int]) -> Bits:
        """What `masks` says, as a device takes it: [n, W] int32, bit t % 32 of word t // 32 for token t; W covers the
        model's vocabulary and the tokenizer's. Of tokens beyond the model's it says nothing.
        """
        rows = len(tokens)
        bits = np.zeros((rows, self._mask_size), np.int32)
        may_end = np.zeros(rows, bool)
        if self.error is None:
            self._fill(tokens, parents, bits, may_end)
        words = bits.view(np.uint32)
        for end in self._ends:
            bit = np.uint32(1 << end % 32)
            words[:, end // 32] = np.where(may_end, words[:, end // 32] | bit, words[:, end // 32] & ~bit)
        return bits

    def _fill(self, tokens: Sequence[int], parents: Sequence[int], bits: Bits, may_end: NDArray[np.bool_]) -> None:
        """Writes the masks, of the root alone where not all rows could be followed."""
        while self._ended or self._own is None:
            try:
                self._walk(tokens, parents, bits, may_end)
                return
            except _Failed as failed:
                bits[:], may_end[:] = 0, False
                self._recover(str(failed))
                tokens, parents = tokens[:1], parents[:1]
        bits[0] = self._own.mask()
        may_end[0], self.error = self._own.may_end, self._own.error

    def _walk(self, tokens: Sequence[int], parents: Sequence[int], bits: Bits, may_end: NDArray[np.bool_]) -> None:
        """Follows every path from the root, what they share once; a fork gets a copy of the matcher.

        llguidance could also go back (`rollback`), but then gives wrong masks: rows that a mask was computed with stay
        and are taken for those of another path (1.9.1). So the answer's own matcher only ever goes on.
        """
        children = _children(parents)
        todo = [(0, None if self._ended else self._matcher.deep_copy())]  # row, matcher behind it; None: it has ended
        while todo:
            row, at = todo.pop()
            if at is not None:
                at.unsafe_compute_mask_ptr(bits[row].ctypes.data, bits[row].nbytes)
            may_end[row] = at is None or at.is_accepting()
            if at is not None and at.is_error():
                raise _Failed(at.get_error())
            if may_end[row]:
                todo += [(child, None) for child in children[row] if tokens[child] in self._ends]
            legal = [child for child in children[row] if at is not None and self._legal(bits[row], tokens[child])]
            for child in legal:
                assert at is not None
                own = at if child == legal[-1] else at.deep_copy()
                if own.try_consume_tokens([tokens[child]]) != 1:
                    raise _Failed(own.get_error())
                todo.append((child, own))

    def _legal(self, mask: Bits, token: int) -> bool:
        """Whether a mask allows a token that is no end."""
        return 0 <= token < self._vocab and token not in self._ends and bool(mask[token // 32] >> (token % 32) & 1)

    @property
    def _matcher(self) -> LLMatcher:
        assert self._shared is not None
        return self._shared

    def _follower(self) -> PlainFollower:
        return PlainFollower(lambda: self._compiler.alone(self._grammar), self._mask_size)

    def _recover(self, said: str) -> None:
        """The shared matcher met a limit. Once an answer gets a new one, where the lexer was only full; else it goes
        on alone, for good: what it costs to get there is paid once. said: llguidance's error.
        """
        if "too many states" in said and not self._renewed:  # of what weeks of answers asked for
            self._renewed = True
            self._start = self._compiler.start(self._grammar, self._start)
            self._shared = None if self._start is None else self._start.deep_copy()
            if self._shared is not None and self._shared.consume_tokens(self._committed):
                return
        if "too many expressions" in said:
            self._compiler.keep(self._grammar, None)
        self._shared, self._own = None, self._follower()
        for token in self._committed:
            self._own.follow(token)
        self.error = self._own.error


def _children(parents: Sequence[int]) -> list[list[int]]:
    """Rows below each row."""
    children: list[list[int]] = [[] for _ in parents]
    for row, parent in enumerate(parents):
        if row > 0:
            children[parent].append(row)
    return children
