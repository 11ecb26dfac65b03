"""The accepted path, its cut and the step to the next root: equals ddtree.tree.accept and cut, and the engine's commit.

In a round: `settle`, then the caches commit state.path at state.position, then `advance`.
"""

import torch
from torch import Tensor

from ddtree.kernels.backend import jit, overlap, power_of_two
from ddtree.tree import Accepted, RoundState, Rows


def accept(rows: Rows, own: Tensor, depth: int, member: Tensor | None = None) -> Accepted:
    """Follow the target's own tokens down the tree, in one launch: see ddtree.tree.accept for the arguments.

    Two matching rows of one depth, which no tree of distinct siblings has, give the higher row.
    Raises ValueError where the rows' tensors (and member) differ in their pitch.
    """
    found = _accepted(own, depth)
    _launch(rows, own, member, found)
    return found


def settle(state: RoundState, own: Tensor, ends: Tensor, ended: Tensor, *, members: bool = True) -> None:
    """What a round accepted, into state.path, n_accepted, committed and n_committed; finished sequences keep nothing.

    Args:
        own: [B, N] int64, N = state.width.
        ends: [B, E] int64 contiguous, as cut has them.
        ended: [B] bool, written: the last kept token is an end token. `advance` wants it.
        members: only the rows of state.member may be accepted.
    The roots, positions and limits stay, since the caches still commit at the old ones.
    """
    found = Accepted(path=state.path, count=state.n_accepted, tokens=state.committed)
    member = state.member[:, : state.width] if members else None
    _launch(state.rows, own, member, found, (state.remaining, ends, state.done, state.n_committed, ended))


def advance(state: RoundState, ended: Tensor) -> None:
    """Make each running sequence's bonus its root; move its position, limit and done on. ended: as settle left it."""
    batch, columns = state.committed.shape
    jit("accept").advance[(1,)](
        state.tokens,
        state.position,
        state.remaining,
        state.done.view(torch.uint8),
        state.n_accepted,
        state.committed,
        state.n_committed,
        ended.view(torch.uint8),
        state.tokens.stride(0),
        columns,
        batch,
        block=max(power_of_two(batch), 32),
        num_warps=1,
        **overlap(ended.device),
    )


def _accepted(own: Tensor, depth: int) -> Accepted:
    """Room for the answer."""
    batch, columns = own.shape[0], depth + 1
    path = torch.empty((batch, columns), dtype=torch.int64, device=own.device)
    return Accepted(path=path, count=path.new_empty(batch), tokens=torch.empty_like(path))


Cut = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]  # remaining, ends, done, kept, ended


def _launch(rows: Rows, own: Tensor, member: Tensor | None, found: Accepted, cut: Cut | None = None) -> None:
    batch, n = rows.tokens.shape
    words, columns = -(-n // 64), found.path.shape[1]
    pitched = [rows.tokens, rows.parents, rows.depths, *([] if member is None else [member])]
    pitches = {tensor.stride(0) for tensor in pitched if batch > 1}
    if len(pitches) > 1 or any(tensor.stride(-1) != 1 for tensor in [*pitched, rows.ancestors, own, found.path]):
        raise ValueError(
            f"the rows' tensors are {sorted(pitches)} apart: they must share one pitch, columns contiguous"
        )
    remaining, ends, done, kept, ended = cut or (own, own, None, own, own)
    jit("accept").accept[(batch,)](
        rows.tokens,
        rows.parents,
        rows.depths,
        rows.ancestors,
        own,
        own if member is None else member.view(torch.uint8),
        found.path,
        found.count,
        found.tokens,
        remaining,
        ends,
        own if done is None else done.view(torch.uint8),
        kept,
        ended.view(torch.uint8) if cut else own,
        rows.tokens.stride(0),
        rows.ancestors.stride(0),
        rows.ancestors.stride(1),
        own.stride(0),
        n,
        columns,
        ends.shape[1] if cut else 0,
        block=max(power_of_two(n), 64),
        words=words,
        column_block=power_of_two(columns),
        end_block=power_of_two(ends.shape[1]) if cut else 1,
        has_member=member is not None,
        cuts=cut is not None,
        settles=done is not None,
        num_warps=4,
        **overlap(own.device),
    )
