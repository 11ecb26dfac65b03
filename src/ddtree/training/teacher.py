"""What training takes from the target: features of whole sequences, its embedding, its head as a plain matrix."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree.config import EngineConfig, Speculation
from ddtree.engine.loading import load_pair
from ddtree.errors import InvalidOption
from ddtree.layers import RMSNorm
from ddtree.target import LlamaTarget, Target
from ddtree.training.config import TargetPart
from ddtree.training.whole import whole

Found = tuple[Tensor, Tensor | None]  # features [n, F], and normed hidden states [n, H] where they are wanted
_ROWS = 1 << 15  # rows of one forward, below the 65,535 that a launch takes in its second dimension
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
        self.kept: dict[int, Found] = {}  # by the sequence's number
        self._room = int(cache_gib * 2**30)  # bytes
        self.batched = self.device.type == "cuda" and isinstance(target, LlamaTarget)

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
        for row, (taken, normed) in enumerate(self._found(sequences, names)):
            features[row, : len(taken)] = taken
            if hidden is not None and normed is not None:
                hidden[row, : len(normed)] = normed
        return features, hidden

    def _found(self, sequences: Sequence[Tensor], names: Sequence[int] | None) -> list[Found]:
        """Each sequence's own, kept or computed now."""
        kept = [None if names is None else self.kept.get(name) for name in names or range(len(sequences))]
        missing = [row for row, found in enumerate(kept) if found is None]
        new = dict(zip(missing, self._computed([sequences[row] for row in missing]), strict=True))
        if names is not None:
            for row, found in new.items():
                self._keep(names[row], found)
        return [found if found is not None else new[row] for row, found in enumerate(kept)]

    def _keep(self, name: int, found: Found) -> None:
        needed = sum(part.numel() * part.element_size() for part in found if part is not None)
        if needed <= self._room:
            self._room -= needed
            taken, normed = (None if part is None else part.clone() for part in found)  # of a larger tensor
            assert taken is not None
            self.kept[name] = taken, normed

    def _computed(self, sequences: Sequence[Tensor]) -> list[Found]:
        """On a GPU all at once, where the target is one that can; else one by one: exact, whatever the company."""
        if not sequences:
            return []
        if self.batched:
            some = max(1, _ROWS // max(len(ids) for ids in sequences))
            parts = [sequences[first : first + some] for first in range(0, len(sequences), some)]
            return [found for part in parts for found in self._of_many(part)]
        return [self._of_one(ids) for ids in sequences]

    def _of_many(self, sequences: Sequence[Tensor]) -> list[Found]:
        longest = max(len(ids) for ids in sequences)
        ids = torch.stack([F.pad(ids, (0, longest - len(ids))) for ids in sequences])
        hidden, features = whole(cast(LlamaTarget, self.target), ids)
        rows = [(features[row, : len(ids)], hidden[row, : len(ids)]) for row, ids in enumerate(sequences)]
        return [(found[:, : self._size], normed if self._norm is not None else None) for found, normed in rows]

    @torch.inference_mode()
    def _of_one(self, ids: Tensor) -> Found:
        start = torch.zeros(1, dtype=torch.int64, device=self.device)
        found, _ = self.target.prefill(self._cache, ids.unsqueeze(0), start)
        stream = found[0, :, self._last : self._last + self.target.spec.hidden_size]
        normed = None if self._norm is None else self._norm(stream.float(), self.target.spec.dtype)
        return found[0, :, : self._size], normed

    def embed(self, ids: Tensor) -> Tensor:
        """ids [...] -> float32 [..., H]."""
        with torch.inference_mode():
            parts = [self.target.embed(part) for part in ids.flatten().split(_ROWS)]
        return torch.cat([part.float() for part in parts]).clone().unflatten(0, ids.shape)

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
