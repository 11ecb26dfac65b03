"""The only decode loop: draft, build, verify, accept, commit."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.config import Speculation
from ddtree.drafter import Drafter
from ddtree.engine.modes import Layout, Mode, depths_needed, lay_out, max_rows, ranks_needed
from ddtree.engine.observer import Observer
from ddtree.engine.sampling import Sampler
from ddtree.layers import KVCache
from ddtree.target import Target
from ddtree.tree import Accepted, RoundState, accept, cut, top_k


@dataclass
class Batch:
    """Everything the rounds of one batch of sequences work on."""

    target: Target
    target_cache: KVCache
    drafter: Drafter | None
    drafter_cache: KVCache | None
    mode: Mode
    speculation: Speculation
    state: RoundState
    sampler: Sampler
    ends: Tensor  # [B, E] int64: end-of-sequence ids; -2 where a request ignores them
    observer: Observer

    @property
    def depth(self) -> int:
        """The deepest a row can be."""
        return self.state.path.shape[1] - 1


@dataclass(frozen=True)
class Verdict:
    """What a round's accept found: what is committed, and, where the mode asks, what the tree would have."""

    committed: Accepted
    tree: Accepted | None


def round_depth(drafter: Drafter | None, mode: Mode, speculation: Speculation) -> tuple[int, int]:
    """Depths and rows (root included) that a round of this mode can have: the sizes of its RoundState."""
    depth = depths_needed(mode, speculation, drafter.config.depths) if drafter else 0
    return depth, max_rows(mode, speculation, depth)


def run_round(batch: Batch) -> Verdict:
    """One round of every sequence, from its root to its new tokens (state.committed, cut to n_committed)."""
    state, observer = batch.state, batch.observer
    with observer.stage("draft"):
        candidates, log_q = _draft(batch)
    with observer.stage("build"):
        _build(batch, candidates, log_q)
    with observer.stage("verify"):
        logits, features = batch.target.verify(batch.target_cache, state.rows, state.position)
    with observer.stage("accept"):
        verdict = _accept(batch, logits)
    with observer.stage("commit"):
        _commit(batch, verdict.committed, features)
    return verdict


def _draft(batch: Batch) -> tuple[list[list[list[int]]], list[list[list[float]]]]:
    """Candidate ids and log-probabilities, [B][D][K] each; empty depths where nothing is drafted."""
    state, drafter = batch.state, batch.drafter
    if drafter is None or batch.drafter_cache is None or not batch.mode.drafts:
        nothing: list[list[list[int]]] = [[] for _ in range(len(state.done))]
        return nothing, [[] for _ in nothing]
    logits = drafter.propose(batch.drafter_cache, state.tokens[:, 0], state.position, batch.depth)
    proposal = top_k(logits, ranks_needed(batch.mode, batch.speculation))
    return proposal.tokens.tolist(), proposal.log_q.tolist()


def _build(batch: Batch, candidates: list[list[list[int]]], log_q: list[list[list[float]]]) -> None:
    """Lay the rows. A sequence that is done, or past the context its drafter was made for, has its root alone."""
    state = batch.state
    limit = batch.drafter.config.max_position - batch.drafter.config.block_size if batch.drafter else 0
    layouts = [
        Layout.root() if done or position > limit else lay_out(batch.mode, batch.speculation, scores)
        for done, position, scores in zip(state.done.tolist(), state.position.tolist(), log_q, strict=True)
    ]
    state.lay([layout.nodes for layout in layouts], candidates)
    if batch.mode.chain and batch.mode.tree:
        row = torch.arange(state.width, device=state.tree.device)
        sizes = torch.tensor([layout.tree_size for layout in layouts], device=row.device)
        state.tree[:, : state.width] = row < sizes.unsqueeze(1)
        state.chain.zero_()
        for index, layout in enumerate(layouts):
            state.chain[index, layout.chain] = True


def _accept(batch: Batch, logits: Tensor) -> Verdict:
    """Each row's own token, then the longest matching path among the rows that the mode commits."""
    state, n = batch.state, batch.state.width
    own = batch.sampler.choose(logits, state.depths[:, :n], state.position)
    both = batch.mode.chain and batch.mode.tree
    committed = accept(state.rows, own, batch.depth, state.chain[:, :n] if both else None)
    tree = accept(state.rows, own, batch.depth, state.tree[:, :n]) if both else None
    return Verdict(committed=committed, tree=tree)


def _commit(batch: Batch, accepted: Accepted, features: Tensor) -> None:
    """Keep the path in both caches, advance the roots; finished sequences commit nothing."""
    state = batch.state
    path = accepted.path.masked_fill(state.done.unsqueeze(1), -1)
    batch.target.commit(batch.target_cache, path, state.position)
    if batch.drafter is not None and batch.drafter_cache is not None:
        longest = int(accepted.count.max()) + 1
        rows = accepted.path[:, :longest].clamp(min=0)  # [B, M]
        kept = features.gather(1, rows.unsqueeze(-1).expand(-1, -1, features.shape[-1]))
        batch.drafter.append(batch.drafter_cache, kept, state.position)
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
