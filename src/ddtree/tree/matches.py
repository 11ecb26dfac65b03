"""Where a sequence's last tokens stood before, and what followed there: an index over token ids, kept with the text."""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from random import Random

import numpy as np

from ddtree.tree.context import Branch, Match

ORDERS = 6  # a match is looked up by its last 1 .. 6 tokens
LONGEST = 32  # longer matches count as so long
# Confidence in what follows a match, by its length (from each of `_LENGTHS` on): where it begins, as measured on the
# embedded pair (benchmarks/context_replay.py; other such tables, and weights of 4 and 16, are within 2% of it) ...
_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
_START = (0.15, 0.35, 0.50, 0.60, 0.65, 0.70, 0.75, 0.80, 0.85, 0.85, 0.90)
_WEIGHT = 8  # ... which counts as so many tokens seen
_LEAST, _MOST = 0.01, 0.99
LEVELS = tuple(bisect_right(_LENGTHS, length) - 1 for length in range(LONGEST + 1))  # by length; -1: no match
_SMALLEST = 1024  # places of a table
_WORD = (1 << 64) - 1
# Odd numbers without a pattern: the hash of an n-gram is the sum of its tokens (from the last) times these.
FACTORS = tuple(bits | 1 for bits in map(Random(ORDERS).getrandbits, [64] * ORDERS))


def places_for(tokens: int) -> int:
    """Places of one order's table for a text of so many tokens: a power of two. A hash's highest bits are its place."""
    return max(_SMALLEST, 1 << (2 * tokens).bit_length())


class Confidence:
    """How far matches of a length are to be believed, as this sequence has it so far: c in p = (1 - c) q + c [guess].

    A mixture's weight, learned by expectation: a guess that came true counts for c as far as the drafter did not expect
    it anyway, c / (c + (1 - c) q).
    """

    def __init__(self) -> None:
        self._hits = [start * _WEIGHT for start in _START]
        self._seen = [float(_WEIGHT)] * len(_START)
        self._levels = list(_START)

    @property
    def state(self) -> tuple[list[float], list[float], list[float]]:
        """Hits, tokens seen and confidence of every level: copies, all that there is to know of it."""
        return list(self._hits), list(self._seen), list(self._levels)

    @classmethod
    def of(cls, state: Sequence[Sequence[float]]) -> "Confidence":
        """As another one's `state` had it."""
        made = cls()
        made._hits, made._seen, made._levels = map(list, state)
        return made

    def __call__(self, length: int) -> float:
        """For a match of `length` tokens, at least 1."""
        return self._levels[LEVELS[min(length, LONGEST)]]

    def learn(self, length: int, right: bool, share: float = 0.0) -> None:
        """A match of `length` tokens was right or wrong about the token that came. share: the guess's own q."""
        level = LEVELS[min(length, LONGEST)]
        c = self._levels[level]
        self._hits[level] += c / (c + (1 - c) * share) if right else 0.0
        self._seen[level] += 1
        self._levels[level] = min(max(self._hits[level] / self._seen[level], _LEAST), _MOST)


class TextIndex:
    """Prompt and output of one sequence, by their n-grams. It grows by the token, and is never cut.

    One table per order holds for the n-gram of a hash the position behind its latest occurrence. A younger n-gram may
    take the place of an older one; a match is compared token by token, so it may be a shorter one then, never a wrong
    one. A token costs a few microseconds, a prompt some tenths of one for each of its tokens; the tables take 48 to 96
    bytes a token, or of `room`, where that is more. What it finds depends on the tokens and on `room` alone;
    `ddtree.kernels.context` keeps the same tables on a GPU.
    """

    def __init__(self, prompt: Sequence[int], room: int = 0, confidence: Confidence | None = None) -> None:
        """room: tokens that the tables are made for from the beginning; they grow where more come.

        confidence: how far matches are believed to begin with; None: as the table has it.
        """
        self.confidence = confidence or Confidence()
        self._room = room
        self._text = array("i", prompt)
        self._lay_tables()

    def __len__(self) -> int:
        return len(self._text)

    @property
    def match(self) -> tuple[int, int]:
        """Where the most recent longest match of the text's end goes on, and its length; (0, 0) where there is none."""
        return self._match

    def append(self, tokens: Iterable[int]) -> None:
        """Take committed tokens."""
        for token in tokens:
            for table, place in zip(self._tables, self._places, strict=False):
                table[place] = len(self._text)
            self._text.append(token)
            if 2 * len(self._text) > len(self._tables[0]):
                self._lay_tables()
            else:
                self._look()

    def branch(self, depth: int) -> Branch | None:
        """The text behind the match, `depth` tokens of it; behind the text's own end it goes round."""
        position, length = self._match
        if not position:
            return None
        tokens = self._text[position : position + depth].tolist()
        while len(tokens) < depth:
            tokens.append(tokens[len(tokens) + position - len(self._text)])
        return Branch(tuple(tokens), tuple(self.confidence(length + place) for place in range(depth)), length)

    def token(self, position: int, path: Sequence[int]) -> int:
        """The token at a position of the text with `path` behind it."""
        return self._text[position] if position < len(self._text) else path[position - len(self._text)]

    def find(self, path: Sequence[int]) -> tuple[int, int]:
        """As `match`, of the text with `path` behind it, among what the text alone holds; up to ORDERS long."""
        tail = array("i", path[-ORDERS:])
        if len(tail) < ORDERS:
            tail = self._text[-(ORDERS - len(tail)) :] + tail
        return self._find(tail, self._hash(tail))

    def _look(self) -> None:
        """The end of the text has moved: where are its n-grams kept, and where did they stand before?"""
        tail = self._text[-ORDERS:]
        self._places = self._hash(tail)
        position, length = self._find(tail, self._places)
        if position:
            text, end = self._text, len(self._text)
            while length < min(LONGEST, position) and text[position - 1 - length] == text[end - 1 - length]:
                length += 1
        self._match = position, length

    def _hash(self, tail: Sequence[int]) -> list[int]:
        """Places of the n-grams that end a text, by their order."""
        places, sum_ = [], 0
        for token, factor in zip(reversed(tail), FACTORS, strict=False):
            sum_ = (sum_ + (token + 1) * factor) & _WORD
            places.append(sum_ >> self._shift)
        return places

    def _find(self, tail: "array[int]", places: Sequence[int]) -> tuple[int, int]:
        for order in range(len(places), 0, -1):
            position = self._tables[order - 1][places[order - 1]]
            if position and self._text[position - order : position] == tail[len(tail) - order :]:
                return position, order
        return 0, 0

    def _lay_tables(self) -> None:
        """Tables with room for twice the text, filled with all of it at once."""
        size = places_for(max(len(self._text), self._room))
        self._shift = 65 - size.bit_length()
        self._tables = [array("i", bytes(4 * size)) for _ in range(ORDERS)]
        text = np.array(self._text, dtype=np.uint64) + np.uint64(1)
        sums = np.zeros_like(text)
        for order, (table, factor) in enumerate(zip(self._tables, FACTORS, strict=True), start=1):
            sums[order - 1 :] += text[: max(len(text) - order + 1, 0)] * np.uint64(factor)
            ends = np.arange(order - 1, len(text) - 1)  # the text's last n-gram has nothing behind it yet
            # Of several values for one place numpy keeps the last: the latest occurrence.
            np.frombuffer(table, dtype=np.int32)[(sums[ends] >> np.uint64(self._shift)).astype(np.int64)] = ends + 1
        self._look()


class Matches:
    """A context that looks every node up by its own path, for one round of a sequence."""

    def __init__(self, index: TextIndex) -> None:
        self._index = index
        self._found: dict[tuple[int, ...], tuple[int, int]] = {(): index.match}

    def behind(self, path: tuple[int, ...]) -> Match | None:
        """See Context."""
        if path not in self._found:
            self._found[path] = self._look(path)
        position, length = self._found[path]
        if not position:
            return None
        return Match(self._index.token(position, path), self._index.confidence(length), length)

    def _look(self, path: tuple[int, ...]) -> tuple[int, int]:
        """A node that does what its parent's match says goes on with that one: no other is longer and more recent."""
        position, length = self._found.get(path[:-1], (0, 0))
        if position and self._index.token(position, path[:-1]) == path[-1]:
            return position + 1, length + 1
        return self._index.find(path)
