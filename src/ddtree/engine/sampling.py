"""How a row's token is chosen: argmax(logits + temperature * noise), noise a function of (seed, position, token id).

The noise is standard Gumbel, so the argmax is an exact sample of softmax(logits / temperature). Since it depends on
nothing else (not on mode, node, round or place in the batch), the same seed gives the same tokens in every mode.
The logits have been through the grammar, the biases and the penalties of the row's own path before.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddtree.config import SamplingParams
from ddtree.engine.filters import Candidates, Filters
from ddtree.engine.history import History
from ddtree.engine.logprobs import TokenLogprob, token_logprobs
from ddtree.engine.rows import HostRows, Matcher
from ddtree.errors import DamagedFile, InvalidOption
from ddtree.kernels import Kept, choose
from ddtree.kernels.backend import usable
from ddtree.tree import best

__all__ = [
    "HostRows",
    "Matcher",
    "Noise",
    "RowSampler",
    "TokenLogprob",
    "check_token_ids",
    "greedy",
    "gumbel",
    "token_logprobs",
]

_MASK = 0xFFFFFFFF
Bits = TypeVar("Bits", int, Tensor)  # a number in [0, 2^32), or an int64 tensor of them


def _mix(x: Bits) -> Bits:
    """A 32-bit finaliser: every bit of x moves about half of the bits of the result."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _MASK
    x = (x ^ (x >> 15)) * 0x846CA68B & _MASK
    return x ^ (x >> 16)


def _stream(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys of a row of noise, mixed in different ways, so that rows share one only by a 64-bit accident."""
    low, high, place = seed & _MASK, (seed >> 32) & _MASK, position & _MASK
    one = _mix(_mix(_mix(low ^ 0x9E3779B9) ^ high) ^ place)
    two = _mix(_mix(_mix(low + 0x85EBCA6B & _MASK) + high & _MASK) + place & _MASK)
    return one, two


def gumbel(seed: int, position: int, vocab: int, device: torch.device | str = "cpu") -> Tensor:
    """Standard Gumbel noise for every token at one position. Returns [vocab] float32, finite.

    Args:
        seed: the request's, any int64.
        position: absolute position of the token to be chosen.
    """
    one, two = _stream(seed, position)
    token = torch.arange(vocab, device=device)
    return _gumbel_of(_mix(_mix(token ^ one) + two & _MASK))


def _gumbel_of(bits: Tensor) -> Tensor:
    """32 random bits each, as int64, to standard Gumbel noise in float32."""
    # v near 0 is where the largest noise comes from, and floats are finest there; log1p keeps what they resolve.
    v = ((bits.double() + 0.5) * 2.0**-32).float().clamp_(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-v))


def _gumbel_at(seed: int, positions: Sequence[int], tokens: Tensor) -> Tensor:
    """What gumbel gives n positions at some tokens each. tokens: [n, P] int64. Returns: [n, P] float32."""
    keys = torch.tensor([_stream(seed, position) for position in positions], device=tokens.device)  # [n, 2]
    one, two = keys[:, :1], keys[:, 1:]
    return _gumbel_of(_mix(_mix(tokens ^ one) + two & _MASK))


class Noise:
    """The noise of one request, remembered while its positions can still be drafted."""

    def __init__(self, seed: int, vocab: int, device: torch.device) -> None:
        self._key = (seed, vocab, device)
        self._rows: dict[int, Tensor] = {}

    def at(self, position: int) -> Tensor:
        """[vocab] float32 for the token at an absolute position."""
        if position not in self._rows:
            seed, vocab, device = self._key
            self._rows[position] = gumbel(seed, position, vocab, device)
        return self._rows[position]

    def forget(self, position: int) -> None:
        """Drop what lies before `position`."""
        for old in [p for p in self._rows if p < position]:
            del self._rows[old]


def greedy(logits: Tensor) -> Tensor:
    """The token of the highest logit, the lowest id on ties; -1 where none is above -inf, or one is NaN.

    logits: [..., V] of any float dtype. Returns: [...] int64.
    """
    own = best(logits)
    return _answered(own, logits)


def _answered(own: Tensor, scores: Tensor) -> Tensor:
    """-1 for a row whose token has no number for a score (NaN counts as the best), or a forbidden one."""
    score = scores.gather(-1, own.unsqueeze(-1)).squeeze(-1)
    return own.where(score > -torch.inf, -1)  # false for NaN


def check_token_ids(params: SamplingParams, vocab: int) -> None:
    """Raises InvalidOption for a token id of the request that the vocabulary does not have."""
    ids = {"logit_bias": [token for token, _ in params.logit_bias], "stop_token_ids": list(params.stop_token_ids)}
    for name, tokens in ids.items():
        for token in tokens:
            if token >= vocab:
                raise InvalidOption(
                    f"{name} names token {token}, but the model's vocabulary ends at {vocab - 1}: leave it out",
                    param=name,
                )


def rehearse_choices(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile what samplers of their own launch on a GPU: for a prompt's last row, and behind penalties.

    dtype: of the logits.
    """
    logits = torch.zeros(1, vocab, dtype=dtype, device=device)
    for penalty in (0.0, 1.0):
        params = SamplingParams(temperature=1.0, top_p=0.5, presence_penalty=penalty)
        RowSampler(params, 0, [0], vocab, device).choose(logits, HostRows.root(0), 0)


class RowSampler:
    """Chooses the tokens of one sequence: of every row of its tree, each by the history of the row's own path."""

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt: Sequence[int],
        vocab: int,
        device: torch.device,
        *,
        matcher: Matcher | None = None,
        end_ids: Sequence[int] = (),
    ) -> None:
        """
        Args:
            seed: of the noise; params.seed is not read, since it may be None.
            prompt: token ids, which the repetition penalty counts.
            end_ids: what may not come before params.min_tokens, beside params.stop_token_ids.
        Raises InvalidOption for a token id outside the vocabulary.
        """
        check_token_ids(params, vocab)
        temperature = float(params.temperature)
        self._greedy = temperature == 0 or params.top_k == 1
        self._filters = Filters(temperature, max(params.top_k, 0), float(params.top_p), float(params.min_p))
        self._filtered = self._filters.active(vocab)
        self._vocab, self._seed, self._noise = vocab, seed, Noise(seed, vocab, device)
        self.history = History(params, prompt, device)
        self._matcher = matcher
        self._told: tuple[Tensor, Tensor, Tensor, Kept] | None = None  # what kernels are told of it
        self._min_tokens, self._output = params.min_tokens, 0
        ends = sorted({t for t in (*end_ids, *params.stop_token_ids) if 0 <= t < vocab}) if self._min_tokens else []
        self._ends = torch.tensor(ends, dtype=torch.int64, device=device)
        self._end_ids = ends
        self._processes = self.history.active or bool(ends) or matcher is not None
        self.plain = self._greedy and not self._processes  # `greedy` of the raw logits is the answer

    @property
    def heat(self) -> float:
        """The temperature that a row's token is drawn with; 0: the best is taken. A device chooses by this, `kept`,
        the history and, where it is `masked`, masks.
        """
        return 0.0 if self._greedy else self._filters.temperature

    @property
    def kept(self) -> tuple[int, float, float] | None:
        """What the filters keep, as kernels.Kept.write has it; None where that is all, or the best is taken."""
        return None if self._greedy else self._filters.numbers(self._vocab)

    @property
    def masked(self) -> bool:
        """Whether a device needs `mask`, of every round's rows, to choose by itself."""
        return self._matcher is not None or bool(self._end_ids)

    def mask(self, rows: HostRows) -> NDArray[np.int32]:
        """What may follow each row, by the grammar and by min_tokens: see Matcher.bits."""
        if self._matcher is None:
            bits = np.full((len(rows), -(-self._vocab // 32)), -1, np.int32)
        else:
            bits = self._matcher.bits(rows.tokens, rows.parents)
        early = self._early(rows)
        if early:
            self._clear_ends_(bits.view(np.uint32), early)
        return bits

    def _early(self, rows: HostRows) -> list[int]:
        """The rows whose token may not end the answer."""
        if not self._end_ids:
            return []
        return [row for row, depth in enumerate(rows.depths) if self._output + depth < self._min_tokens]

    def _clear_ends_(self, bits: NDArray[np.uint32], early: list[int]) -> None:
        """Take the end tokens out of some rows, but not where the grammar allows nothing else: see _forbid_ends_."""
        others = bits[early]
        for end in self._end_ids:
            others[:, end // 32] &= ~np.uint32(1 << end % 32)
        real = others[:, : self._vocab // 32].any(1)
        if self._vocab % 32:
            real |= (others[:, self._vocab // 32] & np.uint32((1 << self._vocab % 32) - 1)) != 0
        real |= self._matcher is None
        bits[np.array(early)[real]] = others[real]

    @property
    def seed(self) -> int:
        """Of the noise."""
        return self._seed

    @property
    def grammar_error(self) -> str | None:
        """Why the grammar allows nothing any more; None as long as it works, and without one."""
        return None if self._matcher is None else self._matcher.error

    @property
    def drafts(self) -> bool:
        """Whether rows below the root can have answers; once False, it stays so."""
        return self._matcher is None or not self._matcher.alone

    def choose(self, logits: Tensor, rows: HostRows, position: int) -> Tensor:
        """Each row's own token, whatever other rows there are.

        Args:
            logits: [n, V] of any float dtype, raw; not changed.
            rows: n rows.
            position: the root's absolute position; a row at depth d chooses the token at position + d + 1.
        Returns: [n] int64; -1 for a row that has no answer: its path breaks the grammar or, below the root, cannot be
        followed; its logits are NaN, or none is above -inf.
        """
        if self.plain:
            return greedy(logits)
        scores = self._processed(logits, rows)
        if self._greedy:
            return greedy(scores)
        self._noise.forget(position + 1)
        positions = [position + depth + 1 for depth in rows.depths]
        if not self._filtered:
            return self._noisy_best(scores, positions)
        if usable(
            scores.device
        ):  # in the dtype that rounds have, where nothing was changed: no other kernel is compiled
            return self._filtered_by_kernels(scores if self._processes else logits, positions)
        return self._filtered_best(scores, positions)

    def commit(self, tokens: Sequence[int]) -> None:
        """The answer goes on by these tokens, in order.

        Raises DamagedFile for -1, which is no token: see choose.
        """
        if -1 in tokens:
            raise DamagedFile(
                "no token can be chosen: the model's logits are not numbers (its weights or its configuration are"
                " damaged, or overflow in this dtype: fetch the model again, or try float32)"
                + (", or the grammar allows none of its tokens" if self._matcher is not None else "")
            )
        self._output += len(tokens)
        self.history.commit(tokens)
        if self._matcher is not None:
            self._matcher.commit(tokens)

    def _processed(self, logits: Tensor, rows: HostRows) -> Tensor:
        """Logits as they are drawn from, before temperature: [n, V] float32; the raw ones where nothing changes."""
        scores = logits.float()
        early = self._early(rows)
        if self.history.active or early:
            scores = scores.clone() if scores is logits else scores
        if self.history.active:
            self.history.apply_(scores, logits, rows)
        allowed = None
        if self._matcher is not None:
            allowed = self._matcher.masks(rows.tokens, rows.parents).to(scores.device)  # [n, V]
            scores = scores.masked_fill(~allowed, -torch.inf)
        if early:
            self._forbid_ends_(scores, torch.tensor(early, device=scores.device), allowed)
        return scores

    def _forbid_ends_(self, scores: Tensor, early: Tensor, allowed: Tensor | None) -> None:
        """Mask the end tokens in some rows, but not where the grammar allows nothing else: the answer is complete."""
        if allowed is not None:
            others = allowed[early].index_fill(1, self._ends, False).any(-1)
            early = early[others]
        scores[early.unsqueeze(1), self._ends] = -torch.inf

    def _noisy_best(self, scores: Tensor, positions: list[int]) -> Tensor:
        """argmax(scores + temperature * noise) of all tokens. scores: [n, V] float32. Returns: [n] int64."""
        temperature = self._filters.temperature
        noisy = torch.empty_like(scores)
        # Row by row: no copy of the noise, and the same operation on the same shape whatever rows there are.
        for row, position in enumerate(positions):
            noise = self._noise.at(position)
            if temperature > 1:  # the same order, and no temperature overflows; the limit keeps -inf away from 0 * inf
                torch.add(noise, scores[row], alpha=max(1 / temperature, 1e-30), out=noisy[row])
            else:
                torch.add(scores[row], noise, alpha=temperature, out=noisy[row])
        return _answered(best(noisy), scores)

    def _filtered_best(self, scores: Tensor, positions: list[int]) -> Tensor:
        """The same of the tokens that the filters keep."""
        few, lacking = self._filters.narrow(scores)
        own = self._draw(few, positions)
        for row in lacking.nonzero().flatten().tolist():
            own[row] = self._draw(self._filters.wide(scores[row : row + 1]), positions[row : row + 1])[0]
        return own

    def _filtered_by_kernels(self, scores: Tensor, positions: list[int]) -> Tensor:
        """The same with the launches of a round's choice, where torch would take hundreds."""
        device = scores.device
        if self._told is None:
            kept = Kept.allocate(1, device)
            kept.write([self.kept])
            heat = torch.tensor([self.heat], dtype=torch.float64, device=device)
            self._told = torch.tensor([self._seed], device=device), torch.tensor([-1], device=device), heat, kept
        seed, position, heat, kept = self._told
        depths = torch.tensor([positions], device=device)  # of a root at position -1
        return choose(scores.unsqueeze(0), seed, position, depths, heat, kept=kept)[0]

    def _draw(self, candidates: Candidates, positions: list[int]) -> Tensor:
        """The candidate of the highest score, the lowest id on ties. Returns: [n] int64, -1 where there is none."""
        noise = _gumbel_at(self._seed, positions, candidates.ids).double()
        scores = candidates.values.double() + self._filters.temperature * noise  # [n, P]
        scores = scores.masked_fill(~candidates.keep, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        nowhere = torch.iinfo(torch.int64).max
        own = candidates.ids.where(scores == top, nowhere).amin(-1)
        return own.where(top.squeeze(-1) > -torch.inf, -1)  # false for NaN
