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


@dataclass(frozen=True)
class Links:
    """The rows of B requests as SGLang's tree kernels and grammars read them."""

    positions: Tensor  # [B, N] int64
    first_child: Tensor  # [B, N] int64, -1: none
    next_sibling: Tensor  # [B, N] int64, -1: none


@dataclass(frozen=True)
class Kept:
    """What B requests keep of a round; M = block columns."""

    tokens: Tensor  # [B, M] int64: accepted tokens, then the bonus; 0 behind
    counts: Tensor  # [B] int32: tokens kept, the bonus included
    lengths: Tensor  # [B] int64: tokens in the cache after this round
    bonus: Tensor  # [B] int64
    from_slots: Tensor  # [B, M] int64; 0 (SGLang's padding slot) behind
    to_slots: Tensor  # [B, M] int64
    features: Tensor  # [B, M] int64: rows of the flat [B * N] features; the root's behind
    index: Tensor  # [B, M] int32: rows of the flat [B * N] rows, -1 behind


def stage(
    bonus: Tensor, lengths: Tensor, pool: Tensor, req_to_token: Tensor, state: RoundState, mask_token: int, block: int
) -> Block:
    """Lay the drafter's blocks, look up the slots of everything this round writes, and put the roots into `state`.

    Args:
        bonus, lengths, pool: [B], integers: the roots' tokens, tokens in the cache, rows of req_to_token.
        req_to_token: [requests, positions] integers, SGLang's table of slots; it reaches `N` past every length.
        state: of at least B sequences; N is its number of rows.
    """
    batch, width = len(lengths), state.tokens.shape[1]

    def room(columns: int) -> Tensor:
        return torch.empty((batch, columns), dtype=torch.int64, device=lengths.device)

    found = Block(room(block), room(block), room(block), room(width))
    _jit().stage[(batch,)](
        bonus,
        lengths,
        pool,
        req_to_token,
        req_to_token.stride(0),
        found.ids,
        found.positions,
        found.slots,
        found.row_slots,
        state.tokens,
        state.tokens.stride(0),
        mask_token,
        block,
        width,
        columns=power_of_two(max(block, width)),
        num_warps=1,
    )
    return found


def lay(rows: Rows, lengths: Tensor, mask: Tensor, *, prefix: bool) -> Links:
    """Positions, links and the attention mask of every row.

    Args:
        rows: [B, N], as kernels.build leaves them.
        lengths: [B] integers, tokens in the cache.
        mask: uint8, written in SGLang's full layout: request after request, N lines of length + N columns; 1: seen.
        prefix: write the columns of the cached tokens too, for backends that read them.
    """
    batch, width = rows.tokens.shape
    room = torch.empty((3, batch, width), dtype=torch.int64, device=lengths.device)
    links = Links(*room)
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
    return links


def commit(accepted: Accepted, lengths: Tensor, block: Block) -> Kept:
    """What an accepted path moves, reports and feeds. accepted: of kernels.accept, depth = block columns - 1."""
    batch, drafted = accepted.path.shape
    width, device = block.row_slots.shape[1], lengths.device
    wide = torch.empty((4, batch, drafted), dtype=torch.int64, device=device)
    narrow = torch.empty((2, batch), dtype=torch.int64, device=device)
    index = torch.empty((batch, drafted), dtype=torch.int32, device=device)
    counts = torch.empty(batch, dtype=torch.int32, device=device)
    tokens, from_slots, to_slots, features = wide
    _jit().commit[(batch,)](
        accepted.path,
        accepted.count,
        accepted.tokens,
        lengths,
        block.row_slots,
        block.slots,
        tokens,
        counts,
        narrow[0],
        narrow[1],
        from_slots,
        to_slots,
        features,
        index,
        width,
        drafted,
        columns=power_of_two(drafted),
        num_warps=1,
    )
    return Kept(tokens, counts, narrow[0], narrow[1], from_slots, to_slots, features, index)


def _jit() -> Any:
    from ddtree.sglang import rows_jit

    return rows_jit
