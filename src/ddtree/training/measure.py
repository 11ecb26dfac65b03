"""What a drafter's blocks are worth on answers that are known: acceptance, ranks, calibration."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddtree.drafter import PairwiseHead
from ddtree.training.attention import Blocks
from ddtree.training.model import DraftModel
from ddtree.training.shards import Chat
from ddtree.training.teacher import Teacher
from ddtree.tree import Nodes, Pair, best_first, chain
from ddtree.tree import top_k as candidates

BINS = 10  # of probability, equally wide
PAIRWISE = "+pairwise"  # behind the names of what pair scores make
NEXT = ("spine", "sibling")  # contexts of at least one drafted token: all of them the best, or all but the last
RANKS = (0, 1, 2, 3, 7, 15, 63)  # bounds of the classes of ranks


@dataclass(frozen=True)
class Drafts:
    """Blocks behind every root of one answer that has a whole block of known tokens behind it."""

    first: int  # position of the first root
    log_q: Tensor  # [R, D, K] float32, best first
    ranks: Tensor  # [R, D] int64: how many tokens stand before the true one
    true_log_q: Tensor  # [R, D] float32
    pair: Tensor | None = None  # [R, D - 1, K, K] float32, of a pairwise head


@dataclass
class Next:
    """How often the best candidate behind a token is the true one."""

    contexts: int = 0
    marginal: int = 0  # right by the drafter's own scores
    pairwise: int = 0  # by the pair scores

    def __iadd__(self, other: "Next") -> "Next":
        self.contexts += other.contexts
        self.marginal += other.marginal
        self.pairwise += other.pairwise
        return self

    def report(self, pairwise: bool) -> dict[str, float]:
        """As parts of the contexts."""
        seen = max(self.contexts, 1)
        found = {"contexts": self.contexts, "marginal": self.marginal / seen}
        return found | ({"pairwise": self.pairwise / seen} if pairwise else {})


class Measures:
    """Sums over answers."""

    def __init__(self, depths: int, budgets: Sequence[int], pairwise: bool = False) -> None:
        """pairwise: whether drafts have pair scores, which are measured beside the marginals alone."""
        self.depths, self.budgets, self.pairwise = depths, tuple(budgets), pairwise
        plain = ("chain", *(f"tree@{budget}" for budget in self.budgets))
        self.names = (*plain, *(f"{name}{PAIRWISE}" for name in plain)) if pairwise else plain
        self.next = {name: Next() for name in NEXT}
        self.rounds: dict[str, Counter[str]] = defaultdict(Counter)  # by group, by name
        self.tokens: dict[str, Counter[str]] = defaultdict(Counter)
        self.rank_counts = [Counter[int]() for _ in range(depths)]
        self.log_loss = torch.zeros(depths, dtype=torch.float64)
        self.blocks = self.answers = 0
        self.bins = torch.zeros(3, depths, BINS, dtype=torch.float64)  # count, sum of q, hits; of the top-1 token

    def add(self, chat: Chat, drafts: Drafts) -> None:
        """Count one answer."""
        groups = ("all", chat.kind, "greedy" if chat.greedy else "sampled")
        budgets = (None, *self.budgets)
        for number, name in enumerate(self.names):
            steps = walk(drafts, budgets[number % len(budgets)], number >= len(budgets))
            for group in groups:
                self.rounds[group][name] += len(steps)
                self.tokens[group][name] += sum(steps)
        for name, found in next_tokens(drafts).items():
            self.next[name] += found
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
            "next_token": {name: found.report(self.pairwise) for name, found in self.next.items()},
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
    pairwise: PairwiseHead | None = None,
) -> None:
    """Count what the drafter would have drafted behind every token of these answers. anchors: blocks of a forward."""
    model.eval()
    for chat in chats:
        drafts = draft(model, teacher, head, chat, top_k, anchors, pairwise)
        if drafts is not None:
            into.add(chat, drafts)


def draft(
    model: DraftModel,
    teacher: Teacher,
    head: Tensor,
    chat: Chat,
    top_k: int,
    anchors: int = 64,
    pairwise: PairwiseHead | None = None,
) -> Drafts | None:
    """None where the answer is no longer than a block."""
    config = model.config
    ids = torch.from_numpy(chat.ids).long().to(teacher.device)
    first, behind = max(chat.prompt, 1), len(ids) - config.depths
    if first >= behind:
        return None
    features, _ = teacher.features([ids], len(ids))
    kept: list[tuple[Tensor, ...]] = []
    for part in torch.arange(first, behind, device=teacher.device).split(anchors):
        hidden = hidden_states(model, teacher, features.to(head.dtype), ids, part)
        with torch.inference_mode():
            logits = model.logits(hidden.flatten(0, 1), head).unflatten(0, hidden.shape[:2])  # [A, D, V]
            true = ids[part.unsqueeze(1) + torch.arange(1, config.block_size, device=ids.device)]
            best = candidates(logits, top_k)
            pair = () if pairwise is None else (pairwise.pair(hidden, best.tokens, best.log_q),)
            kept.append((best.log_q, *_compare(logits, true), *pair))
    return Drafts(first, *(torch.cat(tensors).cpu() for tensors in zip(*kept, strict=True)))


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


def _compare(logits: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """Ranks of the true tokens (ties by lowest id), and their log-probabilities."""
    value = logits.gather(-1, true.unsqueeze(-1))
    index = torch.arange(logits.shape[-1], device=logits.device)
    before = (logits > value) | ((logits == value) & (index < true.unsqueeze(-1)))
    return before.sum(-1), (value - logits.logsumexp(-1, keepdim=True)).squeeze(-1)


def next_tokens(drafts: Drafts) -> dict[str, Next]:
    """Whether the next token is the likeliest, behind all roots: on the best tokens, and just behind another candidate.

    The same contexts with and without pair scores.
    """
    ranks, most = drafts.ranks, drafts.log_q.shape[2]
    best = (ranks == 0).cumprod(1).bool()  # [R, D]: this token and all before it
    above = torch.nn.functional.pad(best[:, :-2], (1, 0), value=True)
    contexts = {"spine": best[:, :-1], "sibling": above & (ranks[:, :-1] > 0) & (ranks[:, :-1] < most)}
    right, chosen = ranks[:, 1:] == 0, torch.zeros_like(ranks[:, 1:], dtype=torch.bool)
    if drafts.pair is not None:
        before = ranks[:, :-1].clamp(max=most - 1)[:, :, None, None].expand(-1, -1, 1, most)
        chosen = drafts.pair.gather(2, before).squeeze(2).argmax(-1) == ranks[:, 1:]
    return {
        name: Next(int(where.sum()), int((where & right).sum()), int((where & chosen).sum()))
        for name, where in contexts.items()
    }


def walk(drafts: Drafts, budget: int | None, pairwise: bool = False) -> list[int]:
    """Tokens of each round from the first root on, as decoding goes: the next root is the bonus.

    budget: None is the chain; pairwise: by the pair scores, which the drafts must have.
    """
    steps, at = [], 0
    while at < len(drafts.ranks):
        pair = Pair.of(drafts.pair[at]) if pairwise and drafts.pair is not None else None
        nodes = chain(drafts.ranks.shape[1], pair) if budget is None else best_first(
            drafts.log_q[at].tolist(), budget, pair=pair
        )  # fmt: skip
        accepted = _accepted(nodes, drafts.ranks[at].tolist())
        steps.append(accepted + 1)
        at += accepted + 1
    return steps


def _accepted(nodes: Nodes, ranks: Sequence[int]) -> int:
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
