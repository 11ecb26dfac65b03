"""What of a round differs between a host that lays trees in Python and a device that does everything itself."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ddtree import kernels
from ddtree.engine.consult import HostPart, read_trees, tree_table
from ddtree.engine.modes import Layout, lay_out
from ddtree.engine.sampling import RowSampler, greedy
from ddtree.kernels import HistoryStore, Kept, PairedProposal, PairFactors, Penalties, Plan, PlanRow
from ddtree.kernels.context import Said, TextStore, build_with
from ddtree.tree import Accepted, Pair, Proposal, RoundState, accept, cut, top_k

if TYPE_CHECKING:
    from ddtree.engine.round import Batch, Lane


class Ops(Protocol):
    """The steps of a round around the two models. They read and write the batch's state."""

    def draft(self, batch: "Batch") -> Proposal | None:
        """The drafter's candidates; None where nobody drafts."""

    def build(self, batch: "Batch", proposal: Proposal | None) -> None:
        """Lay the rows of every sequence."""

    def consult(self, batch: "Batch") -> None:
        """What the host adds to the choice, where a device makes it and cannot do so alone."""

    def choose(self, batch: "Batch", logits: Tensor) -> Tensor:
        """[B, N] int64: the token that follows each row; -1 where none can. logits: [B, N, V]."""

    def accept(self, batch: "Batch", own: Tensor) -> Accepted | None:
        """The accepted path and what is committed of it, into the state. Returns: what a shadowed tree would accept."""

    def report(self, batch: "Batch", tree: Accepted | None) -> Tensor:
        """What the host wants to know: see `report`."""

    def kept(self, batch: "Batch", features: Tensor) -> tuple[Tensor, list[int] | None]:
        """Features of the accepted paths [B, M, F], and the rows of each path, where the host knows them.

        features: [B, N, F].
        """

    def advance(self, batch: "Batch") -> None:
        """Make each bonus the next root, move positions and limits on."""


class HostOps:
    """Trees are laid by the host, on exactly as many rows as there are."""

    def __init__(self) -> None:
        self._who: list[int] = []  # sequences that have a proposal
        self._ended: Tensor | None = None  # [B] bool

    def draft(self, batch: "Batch") -> Proposal | None:
        """See Ops.draft. Sequences without a proposal are not computed."""
        state, lanes, drafter = batch.state, batch.lanes, batch.drafter
        places = zip(lanes, state.position.tolist(), state.done.tolist(), strict=True)
        self._who = [i for i, (lane, position, done) in enumerate(places) if not done and lane.drafts(position)]
        if not self._who or drafter is None or batch.drafter_cache is None:
            self._who = []
            return None
        cache, root, position = batch.drafter_cache, state.tokens[:, 0], state.position
        if len(self._who) < len(lanes):
            index = torch.tensor(self._who, device=root.device)
            cache, root, position = cache.view(self._who), root[index], position[index]
        asked = (cache, root, position, max(lanes[i].depth for i in self._who))
        ranks = max(lanes[i].ranks for i in self._who)
        if drafter.pairwise is None:
            return top_k(drafter.propose(*asked), ranks, drafter.vocabulary)
        states = drafter.states(*asked)
        found = top_k(drafter.score(states), ranks, drafter.vocabulary)
        # What lies beyond a sequence's own ranks is no candidate: its scores do not depend on what others ask for.
        own = torch.tensor([lanes[i].ranks for i in self._who], device=root.device).view(-1, 1, 1)
        beyond = torch.arange(found.log_q.shape[-1], device=root.device) >= own  # [B, 1, K]
        known = found.log_q.masked_fill(beyond, -torch.inf)
        return replace(found, pair=drafter.pairwise.pair(states, found.tokens, known))

    def build(self, batch: "Batch", proposal: Proposal | None) -> None:
        """See Ops.build. A sequence without a proposal has its root alone."""
        state, lanes = batch.state, batch.lanes
        layouts = [Layout.root() for _ in lanes]
        candidates: list[list[list[int]]] = [[] for _ in lanes]
        if proposal is not None:
            rows = zip(self._who, proposal.tokens.tolist(), proposal.log_q.tolist(), strict=True)
            for place, (i, tokens, scores) in enumerate(rows):
                depth, ranks = lanes[i].depth, lanes[i].ranks
                candidates[i] = [row[:ranks] for row in tokens[:depth]]
                log_q = [row[:ranks] for row in scores[:depth]]
                pair = None
                if proposal.pair is not None:
                    pair = Pair.of(proposal.pair[place, : max(depth - 1, 0), :ranks, :ranks])
                guesses = lanes[i].guesses(candidates[i], log_q, pair)
                layouts[i] = lay_out(lanes[i].mode, lanes[i].speculation, log_q, guesses, pair)
        state.lay([layout.nodes for layout in layouts], candidates)
        if batch.shadows:
            state.member.fill_(True)
            state.tree.fill_(False)
            for index, (lane, layout) in enumerate(zip(lanes, layouts, strict=True)):
                state.tree[index, : layout.tree_size] = True
                if lane.mode.shadows:
                    state.member[index] = False
                    state.member[index, layout.chain] = True

    def consult(self, batch: "Batch") -> None:
        """Nothing: here the host makes the choice itself."""

    def choose(self, batch: "Batch", logits: Tensor) -> Tensor:
        """See Ops.choose."""
        if all(lane.sampler.plain for lane in batch.lanes):
            return greedy(logits)
        return choose_by_samplers(batch, logits)

    def accept(self, batch: "Batch", own: Tensor) -> Accepted | None:
        """See Ops.accept."""
        state, n, shadows = batch.state, batch.state.width, batch.shadows
        found = accept(state.rows, own, batch.depth, state.member[:, :n] if shadows else None)
        tree = accept(state.rows, own, batch.depth, state.tree[:, :n]) if shadows else None
        kept, self._ended = cut(found.tokens, found.count + 1, state.remaining, batch.ends)
        state.path.copy_(found.path.masked_fill(state.done.unsqueeze(1), -1))
        state.n_accepted.copy_(found.count)
        state.committed.copy_(found.tokens)
        state.n_committed.copy_(kept.masked_fill(state.done, 0))
        return tree

    def report(self, batch: "Batch", tree: Accepted | None) -> Tensor:
        """See Ops.report."""
        return report(batch.state, tree)

    def kept(self, batch: "Batch", features: Tensor) -> tuple[Tensor, list[int] | None]:
        """See Ops.kept."""
        counts = [count + 1 for count in batch.state.n_accepted.tolist()]
        rows = batch.state.path[:, : max(counts)].clamp(min=0)  # [B, M]
        return features.gather(1, rows.unsqueeze(-1).expand(-1, -1, features.shape[-1])), counts

    def advance(self, batch: "Batch") -> None:
        """See Ops.advance."""
        state = batch.state
        assert self._ended is not None
        bonus = state.committed.gather(1, state.n_accepted.unsqueeze(1)).squeeze(1)
        state.tokens[:, 0] = torch.where(state.done, state.tokens[:, 0], bonus)
        state.position += (state.n_accepted + 1).masked_fill(state.done, 0)
        state.remaining -= state.n_committed
        state.done |= self._ended | (state.remaining <= 0)


def report(state: RoundState, tree: Accepted | None) -> Tensor:
    """Everything the host wants to know of a round, in one tensor: one copy from a GPU. See `read_report`.

    Returns: [B, columns] int64: accepted nodes, tokens committed, nodes verified, depth of the deepest, the columns
    of state.committed; then, where a tree was verified beside the chain, its count and its D + 1 tokens.
    """
    n = state.width
    nodes, deepest = (state.parents[:, :n] >= 0).sum(1), state.depths[:, :n].amax(1)
    parts = [torch.stack([state.n_accepted, state.n_committed, nodes, deepest], 1), state.committed]
    if tree is not None:
        parts += [tree.count.unsqueeze(1), tree.tokens]
    return torch.cat(parts, 1)


def choose_by_samplers(batch: "Batch", logits: Tensor) -> Tensor:
    """Each sequence's rows by its own sampler. Returns: [B, N] int64, -1 on padding."""
    own = torch.full(logits.shape[:2], -1, dtype=torch.int64, device=logits.device)
    trees = read_trees(tree_table(batch.state).tolist())
    for index, (lane, (position, rows)) in enumerate(zip(batch.lanes, trees, strict=False)):
        used = logits[index, : len(rows)]
        own[index, : len(used)] = greedy(used) if lane.sampler.plain else lane.sampler.choose(used, rows, position)
    return own


@dataclass
class DeviceOps:
    """Everything on the device, padded to one number of rows, so that a CUDA graph can hold a round.

    Its tensors are read anew by every replay; the host writes them when a sequence comes or goes.
    """

    plan: Plan
    seeds: Tensor  # [B] int64
    temperatures: Tensor  # [B] float64; 0: greedy
    filters: Kept  # what each sequence's filters keep
    penalties: Penalties  # how each sequence changes its logits
    histories: HistoryStore  # of all slots, what it changes them by
    ended: Tensor  # [B] bool
    width: int  # N, rows of every sequence
    depth: int  # D, depths that the drafter proposes; 0: no proposal
    ranks: int  # K
    texts: TextStore | None = None  # where sequences draft from their own text
    said: Said | None = None  # by the texts, of the round
    host: HostPart | None = None  # None: the device chooses every token by itself
    factors: PairFactors | None = None  # of a pairwise head, where the drafter has one

    @classmethod
    def allocate(
        cls,
        batch: int,
        width: int,
        depth: int,
        ranks: int,
        histories: HistoryStore,
        device: torch.device,
        texts: TextStore | None = None,
        factors: PairFactors | None = None,
    ) -> "DeviceOps":
        """For `batch` sequences of `width` rows; histories: of all slots; texts: likewise, where any sequence drafts
        from its own.
        """
        return cls(
            plan=Plan.allocate(batch, device),
            seeds=torch.zeros(batch, dtype=torch.int64, device=device),
            temperatures=torch.zeros(batch, dtype=torch.float64, device=device),
            filters=Kept.allocate(batch, device),
            penalties=Penalties.allocate(batch, device),
            histories=histories,
            ended=torch.zeros(batch, dtype=torch.bool, device=device),
            width=width,
            depth=depth,
            ranks=ranks,
            texts=texts,
            said=Said.allocate(batch, width, device) if texts else None,
            factors=factors,
        )

    def write_samplers(self, samplers: Sequence[RowSampler]) -> None:
        """Tell the device how tokens are drawn; padding is greedy."""
        pad = len(self.seeds) - len(samplers)
        self.seeds.copy_(torch.tensor([sampler.seed for sampler in samplers] + [0] * pad, dtype=torch.int64))
        heat = [sampler.heat for sampler in samplers] + [0.0] * pad
        self.temperatures.copy_(torch.tensor(heat, dtype=torch.float64))
        self.filters.write([sampler.kept for sampler in samplers])
        self.penalties.write([sampler.history.penalties for sampler in samplers])

    def write_plan(self, lanes: Sequence["Lane"], positions: Sequence[int]) -> None:
        """Tell the device what every sequence verifies from now on; padding, and who cannot draft, its root alone."""
        rows = [
            plan_row(lane) if lane.drafts(p) else PlanRow(context=lane.context)
            for lane, p in zip(lanes, positions, strict=True)
        ]
        rows += [PlanRow()] * (len(self.seeds) - len(rows))
        self.plan.write(rows, self.width)

    def draft(self, batch: "Batch") -> Proposal | None:
        """See Ops.draft."""
        if batch.drafter is None or batch.drafter_cache is None or not self.depth:
            return None
        root, position = batch.state.tokens[:, 0], batch.state.position
        drafter, asked = batch.drafter, (batch.drafter_cache, root, position, self.depth)
        if self.factors is None:
            return kernels.propose(drafter.propose(*asked), self.ranks, drafter.vocabulary)
        states = drafter.states(*asked)
        found = kernels.propose(drafter.score(states), self.ranks, drafter.vocabulary)
        return kernels.pair(self.factors, states, found, self.plan)

    def build(self, batch: "Batch", proposal: Proposal | None) -> None:
        """See Ops.build. Without a proposal the state holds roots alone from the beginning."""
        if proposal is not None and self.texts is not None and self.said is not None:
            slots = batch.target_cache.slot
            build_with(self.texts, slots, proposal, self.plan, batch.state, self.said)
        elif proposal is not None:
            lines = proposal.lines if isinstance(proposal, PairedProposal) else None
            kernels.build(proposal.log_q, proposal.tokens, self.plan, batch.state, self.width, lines)
        batch.state.width = self.width

    def consult(self, batch: "Batch") -> None:
        """See Ops.consult. Waits for the trees."""
        if self.host is not None:
            with batch.observer.stage("accept"):
                self.host.fill(batch.lanes, read_trees(tree_table(batch.state).tolist()))

    def choose(self, batch: "Batch", logits: Tensor) -> Tensor:
        """See Ops.choose."""
        state, slots = batch.state, batch.target_cache.slot
        changed = kernels.penalize(logits, state.rows, batch.depth, slots, self.penalties, self.histories)
        asked = (logits, self.seeds, state.position, state.depths[:, : self.width], self.temperatures)
        allowed = None if self.host is None else self.host.allowed
        return kernels.choose(*asked, allowed=allowed, kept=self.filters, changed=changed)

    def accept(self, batch: "Batch", own: Tensor) -> Accepted | None:
        """See Ops.accept."""
        state = batch.state
        shadows = batch.shadows
        kernels.settle(state, own, batch.ends, self.ended, members=shadows)
        return kernels.accept(state.rows, own, batch.depth, state.tree[:, : self.width]) if shadows else None

    def report(self, batch: "Batch", tree: Accepted | None) -> Tensor:
        """See Ops.report."""
        return kernels.report(batch.state, tree)

    def kept(self, batch: "Batch", features: Tensor) -> tuple[Tensor, list[int] | None]:
        """See Ops.kept. Of paths that are shorter, row 0 fills up."""
        return kernels.take(features, batch.state.path), None

    def advance(self, batch: "Batch") -> None:
        """See Ops.advance."""
        self.histories.count(self.penalties, batch.target_cache.slot, batch.state)
        if self.texts is not None and self.said is not None:
            self.texts.note(self.plan, batch.target_cache.slot, batch.state, self.said)
        kernels.advance(batch.state, self.ended)


def plan_row(lane: "Lane") -> PlanRow:
    """A lane's mode and budget as the device reads them."""
    mode, speculation = lane.mode, lane.speculation
    return PlanRow(
        tree=mode.tree,
        chain=mode.chain,
        budget=speculation.tree_budget if mode.tree else 0,
        spine=speculation.tree_spine if mode.tree else 0,
        ranks=lane.ranks,
        depth=lane.depth,
        context=lane.context,
    )
