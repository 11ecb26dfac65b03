"""What a drafter's blocks are worth on answers that are known: acceptance, ranks, calibration."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddtree.training.attention import Blocks
from ddtree.training.model import DraftModel
from ddtree.training.shards import Chat
from ddtree.training.teacher import Teacher
from ddtree.tree import best_first
from ddtree.tree import top_k as candidates

BINS = 10  # of probability, equally wide
RANKS = (0, 1, 2, 3, 7, 15, 63)  # bounds of the classes of ranks


@dataclass(frozen=True)
class Drafts:
    """Blocks behind every root of one answer that has a whole block of known tokens behind it."""

    first: int  # position of the first root
    log_q: Tensor  # [R, D, K] float32, best first
    ranks: Tensor  # [R, D] int64: how many tokens stand before the true one
    true_log_q: Tensor  # [R, D] float32


class Measures:
    """Sums over answers."""

    def __init__(self, depths: int, budgets: Sequence[int]) -> None:
        self.depths, self.budgets = depths, tuple(budgets)
        self.names = ("chain", *(f"tree@{budget}" for budget in self.budgets))
        self.rounds: dict[str, Counter[str]] = defaultdict(Counter)  # by group, by name
        self.tokens: dict[str, Counter[str]] = defaultdict(Counter)
        self.rank_counts = [Counter[int]() for _ in range(depths)]
        self.log_loss = torch.zeros(depths, dtype=torch.float64)
        self.blocks = self.answers = 0
        self.bins = torch.zeros(3, depths, BINS, dtype=torch.float64)  # count, sum of q, hits; of the top-1 token

    def add(self, chat: Chat, drafts: Drafts) -> None:
        """Count one answer."""
        groups = ("all", chat.kind, "greedy" if chat.greedy else "sampled")
        for name, budget in zip(self.names, (None, *self.budgets), strict=True):
            steps = walk(drafts, budget)
            for group in groups:
                self.rounds[group][name] += len(steps)
                self.tokens[group][name] += sum(steps)
        self.answers += 1
        self.blocks += len(drafts.ranks)
        for depth, column in enumerate(drafts.ranks.T.tolist()):
            self.rank_counts[depth].update(_class(rank) for rank in column)
        self.log_loss -= drafts.true_log_q.double().sum(0)
        q = drafts.log_q[:, :, 0].double().exp()
        bins = (q * BINS).long().clamp(max=BINS - 1).T  # [D, R]
        for row, values in enumerate((torch.ones_like(q), q, (drafts.ranks == 0).double())):
            self.bins[row].scatter_add_(1, bins, values.T)

    def acceptance(self, group: str = "all") -> dict[str, float]:
        """Tokens per round, pooled; 0 where there was no round."""
        rounds, tokens = self.rounds[group], self.tokens[group]
        return {name: tokens[name] / rounds[name] if rounds[name] else 0.0 for name in self.names}

    def report(self) -> dict[str, Any]:
        """Everything as plain values."""
        groups = [group for group in self.rounds if group not in ("all", "greedy", "sampled")]
        decoding = [group for group in ("greedy", "sampled") if group in self.rounds]
        return {
            "answers": self.answers,
            "blocks": self.blocks,
            "acceptance_length": self.acceptance(),
            "rounds": dict(self.rounds["all"]),
            "decoding": {group: self.acceptance(group) for group in decoding},
            "categories": {group: self.acceptance(group) for group in sorted(groups)},
            "depths": [self._depth(depth) for depth in range(self.depths)],
            "calibration": self._calibration(self.bins.sum(1)),
        }

    def _depth(self, depth: int) -> dict[str, Any]:
        counts, seen = self.rank_counts[depth], max(self.blocks, 1)
        ranks = {_name(bound): counts[bound] / seen for bound in (*RANKS, -1)}
        off = self.bins[:, depth]
        error = float((off[1] - off[2]).abs().sum() / max(float(off[0].sum()), 1.0))
        return {"depth": depth + 1, "cross_entropy": float(self.log_loss[depth]) / seen, "calibration_error": error,
                "rank": ranks}  # fmt: skip

    def _calibration(self, bins: Tensor) -> list[dict[str, float]]:
        """Of the best token of each depth: how likely it was said to be, how often it was right."""
        found = []
        for index, (count, q, hits) in enumerate(bins.T.tolist()):
            if count:
                found.append({"from": index / BINS, "count": int(count), "said": q / count, "right": hits / count})
        return found


def measure(
    model: DraftModel,
    teacher: Teacher,
    head: Tensor,
    chats: Sequence[Chat],
    into: Measures,
    *,
    top_k: int,
    anchors: int,
) -> None:
    """Count what the drafter would have drafted behind every token of these answers. anchors: blocks of a forward."""
    model.eval()
    for chat in chats:
        drafts = draft(model, teacher, head, chat, top_k, anchors)
        if drafts is not None:
            into.add(chat, drafts)


def draft(
    model: DraftModel, teacher: Teacher, head: Tensor, chat: Chat, top_k: int, anchors: int = 64
) -> Drafts | None:
    """None where the answer is no longer than a block."""
    config = model.config
    ids = torch.from_numpy(chat.ids).long().to(teacher.device)
    first, behind = max(chat.prompt, 1), len(ids) - config.depths
    if first >= behind:
        return None
    features, _ = teacher.features([ids], len(ids))
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    for part in torch.arange(first, behind, device=teacher.device).split(anchors):
        hidden = hidden_states(model, teacher, features.to(head.dtype), ids, part)
        with torch.inference_mode():
            logits = model.logits(hidden.flatten(0, 1), head).unflatten(0, hidden.shape[:2])  # [A, D, V]
            true = ids[part.unsqueeze(1) + torch.arange(1, config.block_size, device=ids.device)]
            kept.append(_compare(logits, true, top_k))
    log_q, ranks, true_log_q = (torch.cat(tensors).cpu() for tensors in zip(*kept, strict=True))
    return Drafts(first, log_q, ranks, true_log_q)


@torch.inference_mode()
def hidden_states(model: DraftModel, teacher: Teacher, features: Tensor, ids: Tensor, roots: Tensor) -> Tensor:
    """features [1, T, taps * H], ids [T], roots [A] positions -> [A, D, H]."""
    config = model.config
    block = ids.new_full((1, len(roots), config.block_size), config.mask_token_id)
    block[0, :, 0] = ids[roots]
    blocks = Blocks(config, roots.unsqueeze(0), features.shape[1])
    half = features.dtype is torch.bfloat16
    with torch.autocast(features.device.type, dtype=torch.bfloat16, enabled=half):
        hidden: Tensor = model(teacher.embed(block), features, blocks)[0]
    return hidden


def _compare(logits: Tensor, true: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates' log-probabilities, ranks of the true tokens (ties by lowest id) and their log-probabilities."""
    value = logits.gather(-1, true.unsqueeze(-1))
    index = torch.arange(logits.shape[-1], device=logits.device)
    before = (logits > value) | ((logits == value) & (index < true.unsqueeze(-1)))
    log_q = (value - logits.logsumexp(-1, keepdim=True)).squeeze(-1)
    return candidates(logits, top_k).log_q, before.sum(-1), log_q


def walk(drafts: Drafts, budget: int | None) -> list[int]:
    """Tokens of each round from the first root on, as decoding goes: the next root is the bonus. None: the chain."""
    steps, at = [], 0
    while at < len(drafts.ranks):
        ranks = drafts.ranks[at].tolist()
        accepted = _chain(ranks) if budget is None else _tree(drafts.log_q[at].tolist(), ranks, budget)
        steps.append(accepted + 1)
        at += accepted + 1
    return steps


def _chain(ranks: Sequence[int]) -> int:
    return next((depth for depth, rank in enumerate(ranks) if rank), len(ranks))


def _tree(log_q: Sequence[Sequence[float]], ranks: Sequence[int], budget: int) -> int:
    nodes = best_first(log_q, budget)
    rows = {(parent, rank): row for row, (parent, rank) in enumerate(zip(nodes.parents, nodes.ranks, strict=True))}
    row = accepted = 0
    for rank in ranks:
        if (row, rank) not in rows:
            break
        row, accepted = rows[row, rank], accepted + 1
    return accepted


def _class(rank: int) -> int:
    """The bound of its class, -1 behind the last."""
    return next((bound for bound in RANKS if rank <= bound), -1)


def _name(bound: int) -> str:
    if bound < 0:
        return f"{RANKS[-1] + 1}+"
    low = next((b + 1 for b in reversed(RANKS) if b < bound), 0)
    return str(bound) if low == bound else f"{low}-{bound}"
