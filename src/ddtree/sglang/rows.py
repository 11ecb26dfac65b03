"""What SGLang's caches, masks and links want of a round: three launches beside those of ddtree.kernels."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddtree.kernels.backend import power_of_two
from ddtree.tree import Accepted, RoundState, Rows

TILE = 32  # rows of one program of `lay`


@dataclass(frozen=True)
class Block:
    """What the drafter computes for B requests, and where their rows go."""

    ids: Tensor  # [B, block] int64: the root, then mask tokens
    positions: Tensor  # [B, block] int64
    slots: Tensor  # [B, block] int64: where the accepted path ends up
    row_slots: Tensor  # [B, N] int64: where the verified rows are written
    lengths: Tensor  # [B] int64: tokens in the cache

    @classmethod
    def allocate(cls, batch: int, block: int, width: int, device: torch.device | str) -> "Block":
        """Zeros, which are lengths and SGLang's padding slot."""

        def room(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        return cls(room(batch, block), room(batch, block), room(batch, block), room(batch, width), room(batch))

    def first(self, batch: int) -> "Block":
        """The part of the first `batch` requests."""
        return Block(*(part[:batch] for part in vars(self).values()))


@dataclass(frozen=True)
class Links:
    """The rows of B requests as SGLang's tree kernels and grammars read them."""

    positions: Tensor  # [B, N] int64
    first_child: Tensor  # [B, N] int64, -1: none
    next_sibling: Tensor  # [B, N] int64, -1: none

    @classmethod
    def allocate(cls, batch: int, width: int, device: torch.device | str) -> "Links":
        """Zeros."""
        return cls(*torch.zeros((3, batch, width), dtype=torch.int64, device=device))

    def first(self, batch: int) -> "Links":
        """The part of the first `batch` requests."""
        return Links(*(part[:batch] for part in vars(self).values()))


@dataclass(frozen=True)
class Kept:
    """What B requests keep of a round; M = block columns. What outlives the round lies in one tensor, `report`."""

    report: Tensor  # int64: tokens, lengths, bonus, and in its last B elements counts and tree_counts, both int32
    tokens: Tensor  # [B * M] int64: accepted tokens, then the bonus; 0 behind
    lengths: Tensor  # [B] int64: tokens in the cache after this round
    bonus: Tensor  # [B] int64
    counts: Tensor  # [B] int32: tokens kept, the bonus included
    tree_counts: Tensor  # [B] int32: what the tree would have kept, where it is shadowed; else as counts
    from_slots: Tensor  # [B, M] int64; 0 (SGLang's padding slot) behind
    to_slots: Tensor  # [B, M] int64; 0 behind
    features: Tensor  # [B, M] int64: rows of the flat [B * N] features; the root's behind
    index: Tensor  # [B, M] int32: rows of the flat [B * N] rows, -1 behind

    @classmethod
    def allocate(cls, batch: int, columns: int, device: torch.device | str) -> "Kept":
        """Nothing in it yet."""
        report = torch.empty(batch * (columns + 3), dtype=torch.int64, device=device)
        moves = torch.empty((3, batch, columns), dtype=torch.int64, device=device)
        index = torch.empty((batch, columns), dtype=torch.int32, device=device)
        return cls(report, *_parts(report, batch, columns), moves[0], moves[1], moves[2], index)

    def taken(self, batch: int) -> "Kept":
        """Of the first `batch` requests, with a report of its own: the next round may write this one. One copy."""
        whole, columns = self.index.shape
        report = self.report.clone()
        tokens, lengths, bonus, counts, tree_counts = _parts(report, whole, columns)
        if batch == whole:
            moves = self.from_slots, self.to_slots, self.features, self.index
            return Kept(report, tokens, lengths, bonus, counts, tree_counts, *moves)
        return Kept(
            report,
            tokens[: batch * columns],
            *(part[:batch] for part in (lengths, bonus, counts, tree_counts)),
            *(part[:batch] for part in (self.from_slots, self.to_slots, self.features, self.index)),
        )


def stage(
    bonus: Tensor,
    lengths: Tensor,
    pool: Tensor,
    req_to_token: Tensor,
    state: RoundState,
    block: Block,
    mask_token: int,
    commits: Tensor,
    committed: int,
) -> None:
    """Lay the drafter's blocks, look up the slots of everything this round writes, and put the roots into `state`.

    Args:
        bonus, lengths, pool: [B], integers: the roots' tokens, tokens in the cache, rows of req_to_token.
        req_to_token: [requests, positions] integers, SGLang's table of slots; it reaches `N` past every length.
        state: of at least B sequences; N is its number of rows.
        block: of B requests, written.
        commits: [1] int64, written: `committed`, how many requests, from the first, `commit` may commit in a graph.
    """
    columns, width = block.ids.shape[1], state.tokens.shape[1]
    _jit().stage[(len(lengths),)](
        bonus,
        lengths,
        pool,
        req_to_token,
        req_to_token.stride(0),
        block.ids,
        block.positions,
        block.slots,
        block.row_slots,
        block.lengths,
        state.tokens,
        commits,
        state.tokens.stride(0),
        mask_token,
        committed,
        columns,
        width,
        columns=power_of_two(max(columns, width)),
        num_warps=1,
    )


def lay(rows: Rows, lengths: Tensor, mask: Tensor, links: Links, *, prefix: bool) -> None:
    """Positions, links and the attention mask of every row.

    Args:
        rows: [B, N], as kernels.build leaves them.
        lengths: [B] integers, tokens in the cache.
        mask: uint8, written in SGLang's full layout: request after request, N lines of length + N columns; 1: seen.
        links: of B requests, written.
        prefix: write the columns of the cached tokens too, for backends that read them.
    """
    batch, width = rows.tokens.shape
    block = max(power_of_two(width), TILE)
    _jit().lay[(batch, block // TILE)](
        rows.parents,
        rows.depths,
        rows.ancestors,
        rows.parents.stride(0),
        rows.ancestors.stride(1),
        lengths,
        links.positions,
        links.first_child,
        links.next_sibling,
        mask,
        width,
        block=block,
        tile=TILE,
        batch_block=max(power_of_two(batch), 64),  # one kernel for every batch up to that
        prefix=prefix,
        num_warps=4,
    )


def commit(
    accepted: Accepted,
    lengths: Tensor,
    row_slots: Tensor,
    kept: Kept,
    tree: tuple[Tensor, Tensor] | None = None,
    commits: Tensor | None = None,
) -> None:
    """What an accepted path moves, reports and feeds.

    Args:
        accepted: of B requests, by kernels.accept, depth = block columns - 1.
        lengths: [B] integers, tokens in the cache.
        row_slots: [B, N] int64, where the rows were written; an accepted path ends up in the first of them.
        kept: of B requests, written.
        tree: what the requests' trees would have accepted, [B] int64 without the root, and [B] bool whose are told.
        commits: as `stage` wrote it: requests from that on keep nothing, and move the padding slot onto itself.
    """
    batch, columns = accepted.path.shape
    other, told = tree or (accepted.count, accepted.count)
    _jit().commit[(batch,)](
        accepted.path,
        accepted.count,
        accepted.tokens,
        lengths,
        row_slots,
        other,
        told.view(torch.uint8),
        lengths if commits is None else commits,
        kept.tokens,
        kept.lengths,
        kept.bonus,
        kept.counts,
        kept.tree_counts,
        kept.from_slots,
        kept.to_slots,
        kept.features,
        kept.index,
        row_slots.shape[1],
        columns,
        columns=power_of_two(columns),
        shadows=tree is not None,
        gated=commits is not None,
        num_warps=1,
    )


def _parts(report: Tensor, batch: int, columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, lengths, bonus, counts = report.split_with_sizes([batch * columns, batch, batch, batch])
    narrow = counts.view(torch.int32)
    return tokens, lengths, bonus, narrow[:batch], narrow[batch:]


def _jit() -> Any:
    from ddtree.sglang import rows_jit

    return rows_jit
