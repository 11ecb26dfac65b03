"""What the host wants to know of a round, in one tensor and one launch."""

import torch
from torch import Tensor

from ddtree.kernels.backend import jit, overlap, power_of_two
from ddtree.tree import Accepted, RoundState


def report(state: RoundState, tree: Accepted | None) -> Tensor:
    """Equals engine.ops.report: see it for the columns. Returns: [B, columns] int64."""
    batch, columns, n = state.committed.shape[0], state.committed.shape[1], state.width
    out = torch.empty(
        batch, 4 + columns + (0 if tree is None else 1 + columns), dtype=torch.int64, device=state.committed.device
    )
    jit("report").report_kernel[(batch,)](
        state.parents, state.depths, state.committed, state.n_accepted, state.n_committed,
        out if tree is None else tree.count, out if tree is None else tree.tokens, out,
        state.parents.stride(0), n, columns, out.shape[1],
        block=power_of_two(n), column_block=power_of_two(columns), has_tree=tree is not None,
        num_warps=1 if n <= 64 else 4, **overlap(out.device),
    )  # fmt: skip
    return out
