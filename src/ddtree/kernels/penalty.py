"""Biases, and penalties for the tokens that are already there: equals engine.history's changes to the logits.

In a round: `penalize` before the choice, `HistoryStore.count` when the round is settled.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.kernels.backend import jit, overlap, power_of_two
from ddtree.tree import RoundState, Rows

BIASED, SEEN, ONCE = 1, 2, 4  # of a word: has a bias; prompt or output has the token; the output has it once more
BLOCK = 1024  # columns that a program looks at together, a power of two
PROGRAMS = 512  # of a launch, about what a large card runs at once: they end quickly where nothing is changed


@dataclass(frozen=True)
class Penalties:
    """How each sequence of a batch changes its logits: every launch reads it anew."""

    active: Tensor  # [B] bool: whether any logit is changed
    numbers: Tensor  # [B, 3] float64: repetition penalty (1: none), frequency penalty, presence penalty (0: none)

    @classmethod
    def allocate(cls, batch: int, device: torch.device) -> "Penalties":
        """For so many sequences, none of which changes anything."""
        numbers = torch.tensor([[1.0, 0.0, 0.0]] * batch, dtype=torch.float64, device=device)
        return cls(torch.zeros(batch, dtype=torch.bool, device=device), numbers)

    def write(self, asked: Sequence[tuple[float, float, float] | None]) -> None:
        """The numbers of the first sequences, None for one without penalties and biases; the others have none."""
        rows = [*asked, *[None] * (len(self.active) - len(asked))]
        self.active.copy_(torch.tensor([row is not None for row in rows]))
        self.numbers.copy_(torch.tensor([row or (1.0, 0.0, 0.0) for row in rows], dtype=torch.float64))


@dataclass(frozen=True)
class HistoryStore:
    """What the sequences of all slots are biased to and have said. What one slot holds says nothing to another."""

    words: Tensor  # [S, V] int32: BIASED + SEEN + ONCE * times in the output; 0: the logit is left alone
    biases: Tensor  # [S, V] float64; undefined where a word is not BIASED

    @classmethod
    def allocate(cls, slots: int, vocab: int, device: torch.device | str) -> "HistoryStore":
        """Of nothing."""
        return cls(
            words=torch.zeros(slots, vocab, dtype=torch.int32, device=device),
            biases=torch.zeros(slots, vocab, dtype=torch.float64, device=device),
        )

    @staticmethod
    def bytes(slots: int, vocab: int) -> int:
        """What `allocate` takes."""
        return slots * vocab * (4 + 8)

    def write(self, slot: int, seen: Collection[int], counts: Mapping[int, int], biases: Mapping[int, float]) -> None:
        """A slot's history from now on, in place of what it held.

        Args:
            seen: tokens of the prompt that count.
            counts: how often the output has a token.
            biases: by token.
        """
        words = dict.fromkeys(biases, BIASED)
        for token in seen:
            words[token] = words.get(token, 0) | SEEN
        for token, count in counts.items():
            words[token] = words.get(token, 0) & BIASED | SEEN | ONCE * count
        device = self.words.device
        self.words[slot].zero_()
        if words:
            ids = torch.tensor(list(words)).to(device)
            self.words[slot, ids] = torch.tensor(list(words.values()), dtype=torch.int32).to(device)
        if biases:
            ids = torch.tensor(list(biases)).to(device)
            self.biases[slot, ids] = torch.tensor(list(biases.values()), dtype=torch.float64).to(device)

    def count(self, penalties: Penalties, slots: Tensor, state: RoundState) -> None:
        """Take a round's tokens into the histories of the sequences that change their logits.

        Args:
            slots: [B] int64; different ones, but of sequences that change nothing.
            state: committed and n_committed are read, as `settle` left them; -1 is no token.
        """
        batch, columns = state.committed.shape
        jit("penalty").count[(batch,)](
            penalties.active.view(torch.uint8), slots, state.committed, state.n_committed, self.words,
            columns, self.words.shape[1],
            column_block=power_of_two(columns), num_warps=1, **overlap(slots.device),
        )  # fmt: skip


@dataclass(frozen=True)
class Changed:
    """The logits that tokens are chosen by, of the sequences that do not take their raw ones."""

    scores: Tensor  # [B, N, V] float32, contiguous; undefined where a sequence changes nothing
    active: Tensor  # [B] bool


def penalize(
    logits: Tensor,
    rows: Rows,
    depth: int,
    slots: Tensor,
    penalties: Penalties,
    store: HistoryStore,
    block: int = BLOCK,
    programs: int = PROGRAMS,
) -> Changed:
    """Each row's logits, changed by its sequence's history and by the tokens of its own path, in one launch.

    In vLLM's order, worked out in float64 and rounded once: bias, repetition, frequency, presence. No finite logit
    becomes infinite.

    Args:
        logits: [B, N, V] of any float dtype, raw; columns are contiguous. Not changed.
        rows: of the round, N each; the root is in the history already, and padding has no path.
        depth: the deepest a row can be.
        slots: [B] int64, where in `store` the sequences' histories are.
        block, programs: see BLOCK and PROGRAMS; they change the time alone.
    Programs of sequences that change nothing end at their first load.
    Raises ValueError for strides and sizes that do not fit.
    """
    batch, n, columns = logits.shape
    tokens, depths, ancestors = rows.tokens, rows.depths, rows.ancestors
    if logits.stride(2) != 1 or any(tensor.stride(-1) != 1 for tensor in (tokens, depths)):
        raise ValueError("the columns of logits and rows must be contiguous")
    if batch > 1 and tokens.stride(0) != depths.stride(0):
        raise ValueError(f"rows are {tokens.stride(0)} and {depths.stride(0)} apart: they must share one pitch")
    if store.words.shape[1] != columns:
        raise ValueError(f"histories of {store.words.shape[1]} tokens: the logits have {columns}")
    scores = torch.empty((batch, n, columns), dtype=torch.float32, device=logits.device)
    segments = -(-columns // block)
    each = -(-segments // max(1, programs // (n * batch)))  # segments of a program
    jit("penalty").penalize[-(-segments // each), n, batch](
        logits, logits.stride(0), logits.stride(1), tokens, depths, ancestors,
        tokens.stride(0), ancestors.stride(0), ancestors.stride(1), ancestors.stride(2),
        slots, penalties.active.view(torch.uint8), penalties.numbers, store.words, store.biases, scores,
        n, columns, each, block=block, node_block=power_of_two(n), depth_block=power_of_two(depth) if depth else 0,
        # A product and a sum in one would be rounded once, where the reference rounds twice.
        enable_fp_fusion=False, num_warps=4, **overlap(logits.device),
    )  # fmt: skip
    return Changed(scores, penalties.active)
