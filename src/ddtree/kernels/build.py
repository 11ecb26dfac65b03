"""The rows of a round, laid on the device: equals ddtree.tree.best_first, chain and union with RoundState.lay."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from ddtree.kernels.backend import jit, overlap, power_of_two
from ddtree.tree import RoundState
from ddtree.tree.state import WORD

MOST_ROWS, MOST_DEPTHS, MOST_RANKS = 256, 63, 32  # what the kernel's packed keys have bits for


@dataclass(frozen=True)
class PlanRow:
    """What one sequence verifies. Neither tree nor chain: the root alone."""

    tree: bool = False
    chain: bool = False
    budget: int = 0  # nodes of the tree, the root not counted
    spine: int = 0  # rank-0 tokens that are placed first
    ranks: int = 1  # candidates of a depth that the tree may use
    depth: int = 0  # depths that may be used
    context: int = 0  # what the sequence's text adds, where rows are laid by `build_with`; 1: branch, 2: mix

    @property
    def rows(self) -> int:
        """The most rows that can be laid, the root included."""
        return 1 + (self.budget if self.tree else 0) + (self.depth if self.chain else 0)


@dataclass(frozen=True)
class Plan:
    """What every sequence of a batch verifies, in one device tensor, so that a captured graph can be told anew."""

    settings: Tensor  # [B, 7] int64: the fields of PlanRow

    @classmethod
    def allocate(cls, batch: int, device: torch.device | str) -> "Plan":
        """A plan of roots alone."""
        return cls(torch.tensor([astuple(PlanRow())] * batch, dtype=torch.int64, device=device))

    def write(self, rows: Sequence[PlanRow], width: int) -> None:
        """Set all sequences, in one copy. Raises ValueError where one may need more than `width` rows."""
        for index, row in enumerate(rows):
            if row.rows > width:
                raise ValueError(f"sequence {index} may need {row.rows} rows, but the round has {width}")
        self.settings.copy_(torch.tensor([astuple(row) for row in rows], dtype=torch.int64), non_blocking=True)


@dataclass(frozen=True)
class Lines:
    """Pair scores in order, a line for each candidate of the depth before.

    Line [b, d, i] is of depth d behind candidate i of depth d - 1, best first, equals by lowest rank; missing ones are
    -inf. Of depth 0, line 0 alone is read: log_q as it is.
    """

    edges: Tensor  # [B, D, K, K] float32, dense
    places: Tensor  # [B, D, K, K] uint8, dense: the ranks that these are of


def build(
    log_q: Tensor,
    candidates: Tensor,
    plan: Plan,
    state: RoundState,
    width: int,
    lines: Lines | None = None,
    chained: bool = True,
    chain_first: bool = False,
) -> None:
    """Lay the rows of every sequence into `state`, padded to `width`; the roots' tokens stay as they are.

    Args:
        log_q: [B, D, K] float32, best first, at most 0; -inf or NaN marks a missing rank.
        candidates: [B, D, K] int64, the tokens.
        plan: of B sequences.
        state: columns up to `width` of tokens, parents, depths, ancestors, member and tree are written, and `width`.
            member: the chain where a sequence verifies both, else every row, padding too. tree: the tree's rows.
        width: N, static: 1 to 256.
        lines: pair scores, in the stead of log_q.
        chained: a chain goes by the lines too; otherwise it takes the best of each depth, as without lines.
        chain_first: of a sequence that verifies both, the chain's rows come first, where a chain alone would have them;
            the tree's others follow in their order. Otherwise the tree comes first, and the rest of the chain last.
    Order: score, depth, path of places (without lines: of ranks); a score is one float32 addition to its parent's.
    Raises ValueError for shapes out of range (D up to 63, K up to 32).
    No heap: every laid row holds one candidate in its lane, and two maxima over the lanes (of one warp) find the best.
    """
    batch, drafted, ranks = log_q.shape
    check_sizes(log_q, state, width)
    words, pitch = -(-width // WORD), state.tokens.stride(0)
    block = max(power_of_two(width), 32)
    jit("build").build[(batch,)](
        log_q.contiguous() if lines is None else lines.edges,
        candidates if lines is None else lines.places,  # not read without lines
        candidates.contiguous(),
        plan.settings,
        state.tokens,
        state.parents,
        state.depths,
        state.ancestors,
        state.member.view(torch.uint8),
        state.tree.view(torch.uint8),
        pitch,
        state.ancestors.shape[2],
        width,
        drafted,
        ranks,
        block=block,
        words=words,
        paired=lines is not None,
        chained=chained and lines is not None,
        chain_first=chain_first,
        num_warps=max(block // 128, 1),  # more rows do not fit into the registers of one
        **overlap(log_q.device),
    )
    state.width = width


def check_sizes(log_q: Tensor, state: RoundState, width: int) -> None:
    """Raises ValueError for what the kernels cannot lay."""
    _, drafted, ranks = log_q.shape
    if not (1 <= width <= min(MOST_ROWS, state.tokens.shape[1]) and drafted <= MOST_DEPTHS and ranks <= MOST_RANKS):
        raise ValueError(f"{width} rows, {drafted} depths, {ranks} ranks: at most {MOST_ROWS}, 63 and 32")
