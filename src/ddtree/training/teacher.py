"""What training takes from the target: features of whole sequences, its embedding, its head as a plain matrix."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ddtree.config import EngineConfig, Speculation
from ddtree.engine.loading import load_pair
from ddtree.errors import InvalidOption
from ddtree.layers import RMSNorm
from ddtree.target import Target
from ddtree.training.config import TargetPart

_HEAD_ROWS = 16  # rows that a head is asked for at once: few enough for every kernel


def load_target(part: TargetPart) -> Target:
    """The target alone. Raises DDTreeError for whatever a user can mend."""
    config = EngineConfig(part.model, "none", Speculation("ar"), part.device, part.dtype)
    return load_pair(config).target


class Teacher:
    """A frozen target. Its features have the columns of `taps`, in that order."""

    def __init__(
        self, target: Target, taps: Sequence[int], max_length: int, distribution: bool = False, cache_gib: float = 0.0
    ) -> None:
        """max_length: tokens of the longest sequence; distribution: its own normed hidden states are wanted too;
        cache_gib: memory for what was computed, on the target's device.

        Raises InvalidOption where they are and the target does not show its last norm.
        """
        self.target, self.device = target, target.spec.device
        self._size = len(taps) * target.spec.hidden_size
        last = target.spec.num_layers - 1
        self._norm: Any = getattr(target, "norm", None) if distribution else None
        if distribution and not isinstance(self._norm, RMSNorm):
            raise InvalidOption(
                f"fit.objective kl needs a target with one last norm, and {type(target).__name__} has none: use"
                " cross_entropy",
                param="fit.objective",
            )
        target.tap((*taps, last) if distribution and last not in taps else tuple(taps))
        self._last = (list(taps).index(last) if last in taps else len(taps)) * target.spec.hidden_size
        self._cache = target.allocate(1, max_length)
        self.kept: dict[int, tuple[Tensor, Tensor | None]] = {}  # by the sequence's number
        self._room = int(cache_gib * 2**30)  # bytes

    def features(
        self, sequences: Sequence[Tensor], length: int, names: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """sequences: each [n] int64 on the device, n at most `length`; names: their numbers, where they may be kept.

        Returns: features [B, length, taps * H], 0 behind a sequence's end, and the normed hidden states that the head
        reads [B, length, H] where the distribution is wanted; both in the target's dtype.
        """
        spec, batch = self.target.spec, len(sequences)
        features = torch.zeros(batch, length, self._size, dtype=spec.dtype, device=self.device)
        hidden = None
        if self._norm is not None:
            hidden = torch.zeros(batch, length, spec.hidden_size, dtype=spec.dtype, device=self.device)
        for row, ids in enumerate(sequences):
            taken, normed = self._of_one(ids, None if names is None else names[row])
            features[row, : len(ids)] = taken
            if hidden is not None and normed is not None:
                hidden[row, : len(ids)] = normed
        return features, hidden

    def _of_one(self, ids: Tensor, name: int | None) -> tuple[Tensor, Tensor | None]:
        if name is not None and name in self.kept:
            return self.kept[name]
        size, dtype = self.target.spec.hidden_size, self.target.spec.dtype
        start = torch.zeros(1, dtype=torch.int64, device=self.device)
        with torch.inference_mode():
            found, _ = self.target.prefill(self._cache, ids.unsqueeze(0), start)
            stream = found[0, :, self._last : self._last + size]
            normed = None if self._norm is None else self._norm(stream.float(), dtype)
            taken = found[0, :, : self._size]
        if name is not None:
            needed = (taken.numel() + (0 if normed is None else normed.numel())) * dtype.itemsize
            if needed <= self._room:
                self._room -= needed
                self.kept[name] = taken.clone(), normed  # a clone: the last layer's columns need not stay
        return taken, normed

    def embed(self, ids: Tensor) -> Tensor:
        """ids [...] -> float32 [..., H]."""
        with torch.inference_mode():
            found = self.target.embed(ids)
        return found.float().clone() if found.dtype is not torch.float32 else found.clone()

    def head(self, dtype: torch.dtype) -> Tensor:
        """The head as a matrix [V, H]: what it answers to unit vectors. Exact, since each sum has one term."""
        spec = self.target.spec
        matrix = torch.empty(spec.vocab_size, spec.hidden_size, dtype=dtype, device=self.device)
        for first in range(0, spec.hidden_size, _HEAD_ROWS):
            count = min(_HEAD_ROWS, spec.hidden_size - first)
            unit = torch.zeros(count, spec.hidden_size, dtype=spec.dtype, device=self.device)
            unit[:, first : first + count].fill_diagonal_(1.0)
            with torch.inference_mode():
                columns = self.target.head(unit)
            matrix[:, first : first + count] = columns.T
        return matrix
