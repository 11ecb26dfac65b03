"""From the target's answers to the accepted path. The draft's probabilities play no part, so it is exact."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.tree.state import Rows, unpack


@dataclass(frozen=True)
class Accepted:
    """The longest path from the root on which every node is what the target chose at its parent."""

    path: Tensor  # [B, D + 1] int64: rows, the root first, -1 behind them
    count: Tensor  # [B] int64: accepted rows without the root
    tokens: Tensor  # [B, D + 1] int64: what each row of the path chose: the accepted tokens, then the bonus; -1 behind


def accept(rows: Rows, own: Tensor, depth: int, member: Tensor | None = None) -> Accepted:
    """Follow the target's own tokens down the tree.

    Args:
        rows: the verified rows, [B, N].
        own: [B, N] int64, the token each row's position was given (argmax of processed logits plus noise); -1: none can
            follow it, and it is not accepted: it is the next root, which is asked again then.
        depth: D, the deepest a row can be.
        member: [B, N] bool, rows that take part (all of them when None); it must be closed under parents.
    A node is kept when it and all its ancestors match. Siblings differ in their token, so the kept nodes are one path,
    and the last one's own token is the bonus: the next root.
    Source: DDTree (arXiv 2604.12989), verification by sampling at every node and matching.
    """
    batch, n = rows.tokens.shape
    parent = rows.parents.clamp(min=0)
    match = (rows.tokens == own.gather(1, parent)) & (rows.parents >= 0) & (own >= 0)  # [B, N]; false on padding
    if member is not None:
        match &= member
    match[:, 0] = True
    kept = ~(unpack(rows.ancestors, n) & ~match.unsqueeze(1)).any(-1)  # [B, N]
    # Kept rows write their index at their depth; the rest write into one column more, which is cut off.
    index = torch.arange(n, device=own.device).expand(batch, n)
    column = torch.where(kept, rows.depths, depth + 1)
    path = torch.full((batch, depth + 2), -1, dtype=torch.int64, device=own.device)
    path = path.scatter(1, column, index)[:, : depth + 1]
    tokens = own.gather(1, path.clamp(min=0)).masked_fill(path < 0, -1)
    return Accepted(path=path, count=kept.sum(1) - 1, tokens=tokens)


def cut(tokens: Tensor, count: Tensor, remaining: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """How many of a round's tokens a sequence keeps: up to the first end token (included) and the length limit.

    Args:
        tokens: [B, M] int64, -1 behind the last.
        count: [B] int64, valid tokens.
        remaining: [B] int64, tokens a sequence may still commit.
        ends: [B, E] int64, end-of-sequence ids of each sequence (-2 where there is none).
    Returns: kept [B] int64, and ended [B] bool: the last kept token is an end token.
    """
    place = torch.arange(tokens.shape[1], device=tokens.device)
    is_end = (tokens.unsqueeze(-1) == ends.unsqueeze(1)).any(-1)  # [B, M]
    kept = torch.minimum(count, remaining)
    first = torch.where(is_end & (place < kept.unsqueeze(1)), place, tokens.shape[1]).amin(1)
    return torch.minimum(kept, first + 1), first < kept
