"""What a sampler is told of the rows it answers, and what it asks of a grammar."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class HostRows:
    """The rows of one sequence and one round, on the host. Row 0 is the root; parents come before children."""

    tokens: list[int]  # row 0: the last token of the history, which the sampler already knows
    parents: list[int]  # -1 for the root
    depths: list[int]  # 0 for the root; a row chooses the token at position + depth + 1

    @classmethod
    def root(cls, token: int) -> "HostRows":
        """The root alone, as prefill has it."""
        return cls([token], [-1], [0])

    def __len__(self) -> int:
        return len(self.tokens)

    def paths(self) -> list[dict[int, int]]:
        """How often each token stands between the root (left out) and a row (counted in), row by row."""
        paths: list[dict[int, int]] = [{}]
        for token, parent in zip(self.tokens[1:], self.parents[1:], strict=True):
            above = paths[parent]
            paths.append({**above, token: above.get(token, 0) + 1})
        return paths


class Matcher(Protocol):
    """A grammar that follows one answer."""

    @property
    def finished(self) -> bool:
        """The answer is complete: only an end token may come."""
        ...

    @property
    def error(self) -> str | None:
        """Why nothing is allowed any more, where following the answer failed."""
        ...

    @property
    def alone(self) -> bool:
        """It follows the root alone from now on: drafts are of no use."""
        ...

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Which tokens may follow each row, given its own path. Returns: [n, V] bool, True where allowed.

        Args: as HostRows has them; row 0 has been committed already.
        A row whose path breaks the grammar is all False, and so may be any row but the root: it is to be cut.
        """
        ...

    def bits(self, tokens: Sequence[int], parents: Sequence[int]) -> NDArray[np.int32]:
        """The same as [n, W] int32, W >= V / 32: bit t % 32 of word t // 32 is set where token t may follow."""
        ...

    def commit(self, tokens: Sequence[int]) -> None:
        """Go on by tokens that the answer really keeps, in order."""
        ...
