"""The only decode loop: draft, build, verify, accept, commit."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.config import Speculation
from ddtree.drafter import Drafter
from ddtree.engine.modes import MODES, Layout, Mode, depths_needed, lay_out, max_rows, ranks_needed
from ddtree.engine.observer import Observer
from ddtree.engine.rows import HostRows
from ddtree.engine.sampling import RowSampler, greedy
from ddtree.layers import KVCache
from ddtree.target import Target
from ddtree.tree import Accepted, RoundState, accept, cut, top_k


class Lane:
    """One sequence's part in the rounds: how it drafts, and how its tokens are chosen."""

    def __init__(self, speculation: Speculation, sampler: RowSampler, drafter: Drafter | None) -> None:
        self.speculation, self.sampler = speculation, sampler
        self.mode: Mode = MODES[speculation.mode]
        self.depth = depths_needed(self.mode, speculation, drafter.config.depths) if drafter else 0
        self.ranks = ranks_needed(self.mode, speculation)
        self.rows = max_rows(self.mode, speculation, self.depth)  # the most a round can have, the root included
        # Past the context that the drafter was made for, a sequence decodes plainly.
        self.limit = drafter.config.max_position - drafter.config.block_size if drafter else -1

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

    @property
    def depth(self) -> int:
        """The deepest a row can be."""
        return self.state.path.shape[1] - 1


@dataclass(frozen=True)
class Draft:
    """One sequence's rows of a round, and the drafter's candidates [D][K] that they point into."""

    layout: Layout
    candidates: Sequence[Sequence[int]]

    def rows(self, root: int) -> HostRows:
        """The rows as the sampler reads them."""
        nodes = self.layout.nodes
        tokens = [self.candidates[d - 1][r] for d, r in zip(nodes.depths[1:], nodes.ranks[1:], strict=True)]
        return HostRows([root, *tokens], nodes.parents, nodes.depths)


@dataclass(frozen=True)
class Verdict:
    """What a round found: what is committed, and, where a mode asks, what the tree would have."""

    committed: Accepted
    tree: Accepted | None
    logits: Tensor  # [B, N, V] the target's own, of every row
    drafts: Sequence[Draft]


def run_round(batch: Batch) -> Verdict:
    """One round of every sequence, from its root to its new tokens (state.committed, cut to n_committed)."""
    state, observer = batch.state, batch.observer
    with observer.stage("draft"):
        candidates, log_q = _draft(batch)
    with observer.stage("build"):
        drafts = _build(batch, candidates, log_q)
    with observer.stage("verify"):
        logits, features = batch.target.verify(batch.target_cache, state.rows, state.position)
    with observer.stage("accept"):
        verdict = _accept(batch, logits, drafts)
    with observer.stage("commit"):
        _commit(batch, verdict.committed, features)
    return verdict


def _draft(batch: Batch) -> tuple[list[list[list[int]]], list[list[list[float]]]]:
    """Candidate ids and log-probabilities, [B][D][K] each; no depths where nothing is drafted."""
    state, lanes, drafter = batch.state, batch.lanes, batch.drafter
    candidates: list[list[list[int]]] = [[] for _ in lanes]
    log_q: list[list[list[float]]] = [[] for _ in lanes]
    places = zip(lanes, state.position.tolist(), state.done.tolist(), strict=True)
    who = [index for index, (lane, position, done) in enumerate(places) if not done and lane.drafts(position)]
    if not who or drafter is None or batch.drafter_cache is None:
        return candidates, log_q
    cache, root, position = batch.drafter_cache, state.tokens[:, 0], state.position
    if len(who) < len(lanes):
        index = torch.tensor(who, device=root.device)
        cache, root, position = cache.view(who), root[index], position[index]
    logits = drafter.propose(cache, root, position, max(lanes[i].depth for i in who))
    proposal = top_k(logits, max(lanes[i].ranks for i in who))
    for i, tokens, scores in zip(who, proposal.tokens.tolist(), proposal.log_q.tolist(), strict=True):
        depth, ranks = lanes[i].depth, lanes[i].ranks
        candidates[i] = [row[:ranks] for row in tokens[:depth]]
        log_q[i] = [row[:ranks] for row in scores[:depth]]
    return candidates, log_q


def _build(batch: Batch, candidates: list[list[list[int]]], log_q: list[list[list[float]]]) -> list[Draft]:
    """Lay the rows. A sequence without a proposal has its root alone."""
    state = batch.state
    drafts = [
        Draft(lay_out(lane.mode, lane.speculation, scores) if scores else Layout.root(), tokens)
        for lane, tokens, scores in zip(batch.lanes, candidates, log_q, strict=True)
    ]
    state.lay([draft.layout.nodes for draft in drafts], candidates)
    if any(lane.mode.shadows for lane in batch.lanes):
        state.member.fill_(True)
        state.tree.fill_(False)
        for index, (lane, draft) in enumerate(zip(batch.lanes, drafts, strict=True)):
            state.tree[index, : draft.layout.tree_size] = True
            if lane.mode.shadows:
                state.member[index] = False
                state.member[index, draft.layout.chain] = True
    return drafts


def _accept(batch: Batch, logits: Tensor, drafts: Sequence[Draft]) -> Verdict:
    """Each row's own token, then the longest matching path among the rows that the mode commits.

    A draft without an answer of its own is not accepted: it is the next root, which is asked again then.
    """
    state, n = batch.state, batch.state.width
    own = _choose(batch, logits, drafts)
    answered = own >= 0
    shadows = any(lane.mode.shadows for lane in batch.lanes)
    committed = accept(state.rows, own, batch.depth, answered & state.member[:, :n] if shadows else answered)
    tree = accept(state.rows, own, batch.depth, answered & state.tree[:, :n]) if shadows else None
    return Verdict(committed, tree, logits, drafts)


def _choose(batch: Batch, logits: Tensor, drafts: Sequence[Draft]) -> Tensor:
    """[B, N] int64: the token that follows each row; -1 where none can."""
    state = batch.state
    if all(lane.sampler.plain for lane in batch.lanes):
        return greedy(logits)
    own = torch.full(logits.shape[:2], -1, dtype=torch.int64, device=logits.device)
    places = zip(batch.lanes, drafts, state.tokens[:, 0].tolist(), state.position.tolist(), strict=True)
    for index, (lane, draft, root, position) in enumerate(places):
        used = logits[index, : len(draft.layout.nodes)]
        own[index, : len(used)] = (
            greedy(used) if lane.sampler.plain else lane.sampler.choose(used, draft.rows(root), position)
        )
    return own


def _commit(batch: Batch, accepted: Accepted, features: Tensor) -> None:
    """Keep the path in both caches, advance the roots; finished sequences commit nothing."""
    state = batch.state
    path = accepted.path.masked_fill(state.done.unsqueeze(1), -1)
    batch.target.commit(batch.target_cache, path, state.position)
    if batch.drafter is not None and batch.drafter_cache is not None:
        counts = [count + 1 for count in accepted.count.tolist()]
        rows = accepted.path[:, : max(counts)].clamp(min=0)  # [B, M]
        kept = features.gather(1, rows.unsqueeze(-1).expand(-1, -1, features.shape[-1]))
        batch.drafter.append(batch.drafter_cache, kept, state.position, counts)
    kept_tokens, ended = cut(accepted.tokens, accepted.count + 1, state.remaining, batch.ends)
    kept_tokens = kept_tokens.masked_fill(state.done, 0)
    state.path.copy_(path)
    state.n_accepted.copy_(accepted.count)
    state.committed.copy_(accepted.tokens)
    state.n_committed.copy_(kept_tokens)
    advance = (accepted.count + 1).masked_fill(state.done, 0)
    bonus = accepted.tokens.gather(1, accepted.count.unsqueeze(1)).squeeze(1)
    state.tokens[:, 0] = torch.where(state.done, state.tokens[:, 0], bonus)
    state.position += advance
    state.remaining -= kept_tokens
    state.done |= ended | (state.remaining <= 0)
