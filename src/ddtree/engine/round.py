"""The only decode loop: draft, build, verify, accept, commit."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ddtree.config import Speculation
from ddtree.drafter import Drafter
from ddtree.engine.context import SequenceContext
from ddtree.engine.modes import MODES, Mode, depths_needed, max_rows, ranks_needed
from ddtree.engine.observer import Observer
from ddtree.engine.ops import Ops
from ddtree.engine.sampling import RowSampler
from ddtree.layers import KVCache
from ddtree.target import Target
from ddtree.tree import Guesses, Pair, RoundState


class Lane:
    """One sequence's part in the rounds: how it drafts, and how its tokens are chosen."""

    def __init__(
        self,
        speculation: Speculation,
        sampler: RowSampler,
        drafter: Drafter | None,
        text: SequenceContext | None = None,
    ) -> None:
        """text: what this sequence says itself; None: its drafts do not look at that."""
        self.speculation, self.sampler, self.text = speculation, sampler, text
        self.mode: Mode = MODES[speculation.mode]
        self.depth = depths_needed(self.mode, speculation, drafter.config.depths) if drafter else 0
        self.ranks = ranks_needed(self.mode, speculation, drafter is not None and drafter.pairwise is not None)
        self.rows = max_rows(self.mode, speculation, self.depth)  # the most a round can have, the root included
        # Past the context that the drafter was made for, a sequence decodes plainly.
        self.limit = drafter.config.max_position - drafter.config.block_size if drafter else -1

    def commit(self, tokens: Sequence[int]) -> None:
        """Tokens that are the sequence's from now on."""
        self.sampler.commit(tokens)
        if self.text is not None:
            self.text.commit(tokens)

    def guesses(
        self, tokens: Sequence[Sequence[int]], log_q: Sequence[Sequence[float]], pair: Pair | None = None
    ) -> Guesses | None:
        """What the text so far says of a proposal, [D][K]; None where it says nothing, or is not asked."""
        return self.text.guesses(tokens, log_q, pair) if self.text is not None else None

    @property
    def context(self) -> int:
        """What its text adds to its drafts, as PlanRow.context has it."""
        return self.text.plan if self.text is not None else 0

    def drafts(self, position: int) -> bool:
        """Whether a round with its root at this position has a proposal."""
        return self.depth > 0 and position <= self.limit and self.sampler.drafts


@dataclass
class Batch:
    """Everything the rounds of one batch of sequences work on. Lane b is sequence b of the state and of both caches."""

    target: Target
    target_cache: KVCache
    drafter: Drafter | None
    drafter_cache: KVCache | None
    lanes: Sequence[Lane]
    state: RoundState
    ends: Tensor  # [B, E] int64: tokens that end a sequence; -2, which is no token, behind them
    observer: Observer
    ops: Ops

    @property
    def depth(self) -> int:
        """The deepest a row can be."""
        return self.state.path.shape[1] - 1

    @property
    def shadows(self) -> bool:
        """Whether any sequence verifies rows that it may not commit."""
        return any(lane.mode.shadows for lane in self.lanes)


@dataclass(frozen=True)
class Verified:
    """What the target says of a round's rows."""

    logits: Tensor  # [B, N, V] its own
    features: Tensor  # [B, N, F], what a drafter reads


@dataclass(frozen=True)
class Verdict:
    """What a round found, on the device: see `Outcome` for what the host reads of it."""

    logits: Tensor  # [B, N, V] the target's own, of every row
    report: Tensor  # [B, columns] int64


@dataclass(frozen=True)
class Outcome:
    """What a round did for one sequence."""

    accepted: int  # nodes, before the cut at an end
    committed: list[int]  # tokens, after it
    done: bool
    drafted: int  # nodes verified
    depth: int  # of the deepest
    tree: list[int]  # what the tree would have committed, where it was verified along with the chain; else empty


def run_round(batch: Batch) -> Verdict:
    """One round of every sequence, from its root to its new tokens (state.committed, cut to n_committed).

    At `consult` it can be cut in two: what lies before needs nothing of the host, and what lies behind only tensors
    that the host has written there.
    """
    propose(batch)
    verified = verify(batch)
    batch.ops.consult(batch)
    return settle(batch, verified)


def propose(batch: Batch) -> None:
    """Draft, and lay the rows."""
    with batch.observer.stage("draft"):
        proposal = batch.ops.draft(batch)
    with batch.observer.stage("build"):
        batch.ops.build(batch, proposal)


def verify(batch: Batch) -> Verified:
    """One forward of the target over the rows."""
    with batch.observer.stage("verify"):
        return Verified(*batch.target.verify(batch.target_cache, batch.state.rows, batch.state.position))


def settle(batch: Batch, verified: Verified) -> Verdict:
    """Choose every row's token, accept, commit, and move on to the next roots."""
    ops = batch.ops
    with batch.observer.stage("accept"):
        own = ops.choose(batch, verified.logits)
        tree = ops.accept(batch, own)
        report = ops.report(batch, tree)  # before the roots advance
    with batch.observer.stage("commit"):
        _commit(batch, verified.features)
        ops.advance(batch)
    return Verdict(verified.logits, report)


def _commit(batch: Batch, features: Tensor) -> None:
    """Keep the accepted path in both caches."""
    state = batch.state
    batch.target.commit(batch.target_cache, state.path, state.position)
    if batch.drafter is not None and batch.drafter_cache is not None:
        kept, counts = batch.ops.kept(batch, features)
        batch.drafter.append(batch.drafter_cache, kept, state.position, counts)


def read_report(
    report: Sequence[Sequence[int]], depth: int, remaining: Sequence[int], ends: Sequence[frozenset[int]]
) -> list[Outcome]:
    """The rows of a report, for the sequences that have a limit and end tokens here."""
    found = []
    for row, left, end in zip(report, remaining, ends, strict=False):
        accepted, kept, drafted, deepest = row[:4]
        committed = list(row[4 : 4 + kept])
        tree = row[5 + depth :]
        found.append(
            Outcome(
                accepted=accepted,
                committed=committed,
                done=kept >= left or (kept > 0 and committed[-1] in end),
                drafted=drafted,
                depth=deepest,
                tree=list(tree[1 : tree[0] + 2]) if tree else [],
            )
        )
    return found
