"""What a sequence's text adds to its drafts, on the device: equals ddtree.tree.matches, and build with guesses.

In a round: `build_with`, then `note` when the round is settled and before the roots advance.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.kernels.backend import jit, overlap, power_of_two
from ddtree.kernels.build import Plan, check_sizes
from ddtree.kernels.pair import PairedProposal
from ddtree.tree import Proposal, RoundState
from ddtree.tree.matches import FACTORS, LEVELS, ORDERS, Confidence, places_for
from ddtree.tree.state import WORD

GUESSES = 16 * 4 + 8  # bytes of what a guess would be worth behind one row, at every level: see build_with
CHUNK = 256  # positions of a program that enters a prompt
KINDS = {"off": 0, "branch": 1, "mix": 2}  # as PlanRow.context has them


@dataclass(frozen=True)
class TextStore:
    """The texts of all slots, with the tables and the confidences that `ddtree.tree.TextIndex` keeps of one.

    The tables are as large as the longest text needs from the beginning: so they equal those of a TextIndex with `room`
    for `capacity` tokens. What one slot holds says nothing to another.
    """

    text: Tensor  # [S, capacity] int32: prompt and output
    lengths: Tensor  # [S] int32
    tables: Tensor  # [S, 6, places] int32: the position behind the latest n-gram of a hash; 0: none
    matches: Tensor  # [S, 2] int32: where the longest match of the text's end goes on, and its length; 0, 0: none
    confidence: Tensor  # [S, 3, 16] float64: hits, tokens seen and confidence by level
    factors: Tensor  # [8] int64: of the hash; 0 behind the last order
    levels: Tensor  # [64] int32: level of a match by its length

    @classmethod
    def allocate(cls, slots: int, capacity: int, device: torch.device | str) -> "TextStore":
        """Empty texts of up to `capacity` tokens."""
        signed = [factor - (1 << 64) if factor >> 63 else factor for factor in FACTORS]
        return cls(
            text=torch.zeros(slots, capacity, dtype=torch.int32, device=device),
            lengths=torch.zeros(slots, dtype=torch.int32, device=device),
            tables=torch.zeros(slots, ORDERS, places_for(capacity), dtype=torch.int32, device=device),
            matches=torch.zeros(slots, 2, dtype=torch.int32, device=device),
            confidence=torch.ones(slots, 3, 16, dtype=torch.float64, device=device),
            factors=torch.tensor(signed + [0] * (8 - ORDERS), dtype=torch.int64, device=device),
            levels=torch.tensor([*LEVELS, *[LEVELS[-1]] * (64 - len(LEVELS))], dtype=torch.int32, device=device),
        )

    @staticmethod
    def bytes(slots: int, capacity: int) -> int:
        """What `allocate` takes."""
        return 4 * slots * (capacity + ORDERS * places_for(capacity))

    @property
    def shift(self) -> int:
        """How far a hash is shifted to become a place."""
        return 65 - self.tables.shape[2].bit_length()

    def write(self, slot: int, tokens: Sequence[int], confidence: Confidence) -> None:
        """A slot's text from now on, in place of what it held. Raises ValueError where it does not fit."""
        capacity, device = self.text.shape[1], self.text.device
        if len(tokens) > capacity:
            raise ValueError(f"a text of {len(tokens)} tokens does not fit the {capacity} of its slot")
        self.text[slot, : len(tokens)] = torch.tensor(list(tokens), dtype=torch.int32).to(device)
        self.lengths[slot] = len(tokens)
        self.confidence[slot, :, : len(confidence.state[0])] = torch.tensor(confidence.state, dtype=torch.float64)
        self.tables[slot].zero_()
        jit("context").lay[(-(-max(len(tokens), 1) // CHUNK),)](
            self.text, self.tables, self.factors, len(tokens), capacity, slot, self.shift,
            block=CHUNK, **overlap(device),
        )  # fmt: skip
        nothing = torch.zeros(1, 1, dtype=torch.int64, device=device)
        asked = Plan(torch.ones(1, 7, dtype=torch.int64, device=device))
        self._note(asked, torch.tensor([slot], device=device), nothing, nothing, nothing, Said.allocate(1, 1, device))

    def read_confidence(self, slot: int) -> Confidence:
        """What a slot has learned. Waits for the device."""
        return Confidence.of(self.confidence[slot, :, : max(LEVELS) + 1].tolist())

    def note(self, plan: Plan, slots: Tensor, state: RoundState, said: "Said") -> None:
        """Take a round's tokens into the texts of the sequences whose plan asks for a context.

        Args:
            plan: as build_with had it.
            slots: [B] int64; different ones, but of sequences without a context.
            state: path, committed and n_committed are read, as `settle` left them.
            said: as build_with left it. What was said of the tokens is compared with them (Confidence.learn).
        """
        self._note(plan, slots, state.path, state.committed, state.n_committed, said)

    def _note(self, plan: Plan, slots: Tensor, path: Tensor, committed: Tensor, kept: Tensor, said: "Said") -> None:
        batch, columns = committed.shape
        jit("context").note[(batch,)](
            plan.settings, slots, path, committed, kept, said.tokens, said.levels, said.shares,
            self.text, self.lengths, self.tables, self.matches, self.confidence, self.factors,
            columns, said.tokens.shape[1], self.text.shape[1], self.shift,
            column_block=max(power_of_two(columns), 32), num_warps=1, **overlap(slots.device),
        )  # fmt: skip


@dataclass(frozen=True)
class Said:
    """What the texts said of a round: behind every row the guess, for `TextStore.note`."""

    tokens: Tensor  # [B, N] int32; undefined where nothing was said
    levels: Tensor  # [B, N] int32: the level of its confidence; -1: nothing was said
    shares: Tensor  # [B, N] float64: how likely the drafter took it to be

    @classmethod
    def allocate(cls, batch: int, rows: int, device: torch.device | str) -> "Said":
        """Of nothing."""
        return cls(
            torch.zeros(batch, rows, dtype=torch.int32, device=device),
            torch.full((batch, rows), -1, dtype=torch.int32, device=device),
            torch.zeros(batch, rows, dtype=torch.float64, device=device),
        )


def build_with(texts: TextStore, slots: Tensor, proposal: Proposal, plan: Plan, state: RoundState, said: Said) -> None:
    """`build`, of `said.tokens.shape[1]` rows, with what each sequence's text says, where its plan asks for that.

    Args:
        slots: [B] int64, where in `texts` the sequences' texts are.
        proposal: tokens and log_q as in `build`; where it is a PairedProposal its lines too.
        said: written: what was said behind every row.
        the others: see ddtree.kernels.build.build.
    Two launches: what any guess would be worth, then the rows. Equals best_first, likeliest and union with Guesses over
    TextIndex.branch or Matches. Scores are float32 of sums and logarithms in float64; those of two libraries can round
    to different floats in about one of 10^8.
    Raises ValueError for shapes out of range.
    """
    log_q, candidates, pair = proposal.log_q, proposal.tokens, proposal.pair
    batch, drafted, ranks = log_q.shape
    width, device = said.tokens.shape[1], log_q.device
    lines = proposal.lines if isinstance(proposal, PairedProposal) else None
    befores = 1 if lines is None else ranks + 1
    check_sizes(log_q, state, width)
    log_q = log_q.contiguous()
    # What any guess would be worth, worked out side by side: logarithms in float64 are what a row would wait for most.
    hits = torch.empty(batch, drafted, befores, ranks + 1, 16, dtype=torch.float32, device=device)
    rests = torch.empty(batch, 16, dtype=torch.float32, device=device)
    shares = torch.empty(batch, drafted, befores, ranks + 1, dtype=torch.float64, device=device)
    jit("context_rows").weigh[(batch, drafted * befores)](
        log_q, log_q if lines is None else pair, plan.settings, slots, texts.confidence, hits, rests, shares,
        drafted, ranks, rank_block=power_of_two(ranks + 1), paired=lines is not None, num_warps=4, **overlap(device),
    )  # fmt: skip
    jit("context_build").build[(batch,)](
        log_q, log_q if lines is None else lines.edges, candidates if lines is None else lines.places,
        candidates.contiguous(), plan.settings, slots,
        texts.text, texts.lengths, texts.tables, texts.matches, texts.factors, texts.levels, hits, rests, shares,
        state.tokens, state.parents, state.depths, state.ancestors,
        state.member.view(torch.uint8), state.tree.view(torch.uint8), said.tokens, said.levels, said.shares,
        state.tokens.stride(0), state.ancestors.shape[2], width, drafted, ranks, texts.text.shape[1], texts.shift,
        block=max(power_of_two(width), 32), words=-(-width // WORD), rank_block=max(power_of_two(ranks), 32),
        paired=lines is not None,
        num_warps=max(power_of_two(width) // 128, 1), **overlap(device),
    )  # fmt: skip
    state.width = width
