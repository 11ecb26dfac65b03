"""How a row's token is chosen: argmax(logits + temperature * noise), noise a function of (seed, position, token id).

The noise is standard Gumbel, so the argmax is an exact sample of softmax(logits / temperature). Since it depends on
nothing else (not on mode, node, round or place in the batch), the same seed gives the same tokens in every mode.
"""

from typing import TypeVar

import torch
from torch import Tensor

from ddtree.tree import best

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
    bits = _mix(_mix(token ^ one) + two & _MASK)  # [vocab], 32 random bits each
    # v near 0 is where the largest noise comes from, and floats are finest there; log1p keeps what they resolve.
    v = ((bits.double() + 0.5) * 2.0**-32).float().clamp_(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-v))


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


class Sampler:
    """Chooses the token of every row of a batch."""

    def __init__(self, temperatures: list[float], seeds: list[int], vocab: int, device: torch.device) -> None:
        self.temperatures = temperatures
        self._noise = [
            Noise(seed, vocab, device) if t > 0 else None for t, seed in zip(temperatures, seeds, strict=True)
        ]

    def choose(self, logits: Tensor, depths: Tensor, position: Tensor) -> Tensor:
        """Each row's own token; the lowest id on ties.

        Args:
            logits: [B, N, V]; depths: [B, N] int64; position: [B] int64, of the roots.
        A row at depth d stands at position + d and chooses the token at position + d + 1. Returns: [B, N] int64.
        """
        own = best(logits)
        for index, noise in enumerate(self._noise):
            if noise is not None:
                base = int(position[index]) + 1
                noise.forget(base)
                own[index] = self._sample(index, noise, logits[index], depths[index] + base)
        return own

    def choose_one(self, index: int, logits: Tensor, position: int) -> int:
        """The token of sequence `index` at an absolute position, from logits [V]."""
        noise = self._noise[index]
        if noise is None:
            return int(best(logits))
        return int(self._sample(index, noise, logits.unsqueeze(0), torch.tensor([position])))

    def _sample(self, index: int, noise: Noise, logits: Tensor, positions: Tensor) -> Tensor:
        """logits: [N, V]; positions: [N] int64, of the tokens to choose. Returns: [N] int64."""
        distinct, which = positions.unique(return_inverse=True)
        rows = torch.stack([noise.at(int(p)) for p in distinct])  # [distinct, V]
        temperature = self.temperatures[index]
        if temperature > 1:  # the same order, and no temperature overflows
            return best(torch.add(rows[which], logits.float(), alpha=1 / temperature))
        return best(torch.add(logits.float(), rows[which], alpha=temperature))
