"""The tensors of one round, with a leading batch dimension."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddtree.tree.build import Nodes

WORD = 64  # bits in one int64 of an ancestor mask


@dataclass
class Rows:
    """What one verify forward computes: views of a RoundState cut to the rows in use."""

    tokens: Tensor  # [B, N] int64; row 0 is the root
    parents: Tensor  # [B, N] int64; -1 for the root and for padding
    depths: Tensor  # [B, N] int64; position = root position + depth
    ancestors: Tensor  # [B, N, W] int64; bit j of row i: j is i or an ancestor of i. Padding sees itself alone


@dataclass
class RoundState:
    """Preallocated state of a batch of B sequences and up to N rows each (the root included) of depth up to D.

    The builder fills the rows, accept fills path and counts, the engine's commit advances position and root. On a CPU
    `width` is the exact number of rows of the round; on a GPU it is the padded number that a graph was captured for.
    """

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64
    depths: Tensor  # [B, N] int64
    ancestors: Tensor  # [B, N, W] int64
    member: Tensor  # [B, N] bool: rows that may be committed, where a round also verifies others
    tree: Tensor  # [B, N] bool: rows of the tree, where a round verifies it without committing along it
    path: Tensor  # [B, D + 1] int64: accepted rows, the root first, -1 behind them
    n_accepted: Tensor  # [B] int64: accepted rows without the root, before any cut
    committed: Tensor  # [B, D + 1] int64: the tokens this round adds; -1 behind them
    n_committed: Tensor  # [B] int64: how many, after the cut at end of sequence and length
    position: Tensor  # [B] int64: position of the root = tokens in the target's cache
    remaining: Tensor  # [B] int64: tokens a sequence may still commit
    done: Tensor  # [B] bool: finished sequences commit nothing
    width: int = field(default=1)

    @classmethod
    def allocate(cls, batch: int, rows: int, depth: int, device: torch.device | str = "cpu") -> "RoundState":
        """State for `batch` sequences of at most `rows` rows (root included) and `depth` depths."""

        def ints(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=device)

        def bools(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.bool, device=device)

        return cls(
            tokens=ints(batch, rows),
            parents=ints(batch, rows, value=-1),
            depths=ints(batch, rows),
            ancestors=ints(batch, rows, -(-rows // WORD)),
            member=bools(batch, rows),
            tree=bools(batch, rows),
            path=ints(batch, depth + 1, value=-1),
            n_accepted=ints(batch),
            committed=ints(batch, depth + 1, value=-1),
            n_committed=ints(batch),
            position=ints(batch),
            remaining=ints(batch),
            done=bools(batch),
        )

    @property
    def rows(self) -> Rows:
        """The rows of this round, [B, width]."""
        n, words = self.width, -(-self.width // WORD)
        return Rows(self.tokens[:, :n], self.parents[:, :n], self.depths[:, :n], self.ancestors[:, :n, :words])

    def lay_roots(self) -> None:
        """Every row alone, as padding is; row 0 of each is the root."""
        self.parents.fill_(-1)
        self.depths.fill_(0)
        row = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        bit = torch.ones_like(row) << (row % WORD)
        self.ancestors.copy_(
            bit.unsqueeze(1) * (row.unsqueeze(1) // WORD == torch.arange(self.ancestors.shape[2], device=row.device))
        )
        self.member.fill_(True)

    def lay(self, nodes: Sequence[Nodes], candidates: Sequence[Sequence[Sequence[int]]]) -> None:
        """Write one round's rows; the roots' tokens in column 0 stay as they are.

        Args:
            nodes: one per sequence.
            candidates: [B][D][K] token ids that the ranks of nodes point into, but those of foreign ones (unused where
                only the root is laid).
        """
        self.width = max(map(len, nodes))
        columns = [_columns(n, c, self.width) for n, c in zip(nodes, candidates, strict=True)]
        n, words = self.width, -(-self.width // WORD)
        device = self.tokens.device
        for target, values in zip(
            (self.tokens[:, 1:n], self.parents[:, :n], self.depths[:, :n], self.ancestors[:, :n, :words]),
            zip(*columns, strict=True),
            strict=True,
        ):
            if target.numel():
                target.copy_(torch.tensor(values, device=device))

    def draft_tree(self, index: int) -> "DraftTree":
        """A read-only copy of one sequence's rows, without padding."""
        used = [0] + [row for row in range(1, self.width) if int(self.parents[index, row]) >= 0]
        return DraftTree(
            tokens=tuple(int(self.tokens[index, row]) for row in used),
            parents=tuple(int(self.parents[index, row]) for row in used),
            depths=tuple(int(self.depths[index, row]) for row in used),
        )


@dataclass(frozen=True)
class DraftTree:
    """One sequence's rows for tests, logs and pages; the root first."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]

    def paths(self) -> list[tuple[int, ...]]:
        """For every row, the tokens from the root's child down to it (empty for the root)."""
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(self.tokens, self.parents, strict=True):
            paths.append(() if parent < 0 else (*paths[parent], token))
        return paths


def unpack(ancestors: Tensor, rows: int) -> Tensor:
    """Ancestor bits [B, N, W] int64 as a mask [B, N, rows] bool."""
    shifts = torch.arange(WORD, device=ancestors.device)
    bits = (ancestors.unsqueeze(-1) >> shifts) & 1  # [B, N, W, 64]
    return bits.flatten(-2)[..., :rows].bool()


def _columns(nodes: Nodes, candidates: Sequence[Sequence[int]], width: int) -> tuple[list[int], ...]:
    """Token (without the root's), parent, depth and ancestor words of every row, padded to `width`."""
    pad = width - len(nodes)
    tokens = [
        nodes.foreign[row] if row in nodes.foreign else candidates[nodes.depths[row] - 1][nodes.ranks[row]]
        for row in range(1, len(nodes))
    ] + [0] * pad
    masks: list[int] = []
    for row, parent in enumerate(nodes.parents + [-1] * pad):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << row)
    words = [[_signed(mask >> (WORD * w)) for w in range(-(-width // WORD))] for mask in masks]
    return tokens, nodes.parents + [-1] * pad, nodes.depths + [0] * pad, words  # type: ignore[return-value]


def _signed(bits: int) -> int:
    """The low 64 bits as the int64 of the same pattern."""
    low = bits & (1 << WORD) - 1
    return low - (1 << WORD) if low >> (WORD - 1) else low
