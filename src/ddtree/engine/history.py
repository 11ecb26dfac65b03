"""What a request adds to its logits: biases, and penalties for the tokens that are already there.

On a GPU rounds change the logits by kernels, which keep the histories of all slots (ddtree.kernels.penalty): what the
host does here to a round's logits is their reference, and what a prompt's last row takes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ddtree.config import SamplingParams
from ddtree.engine.rows import HostRows
from ddtree.kernels import HistoryStore

_FINITE = torch.finfo(torch.float32).max


class History:
    """The tokens of one sequence, and the change they make to the logits of what follows.

    Few tokens are ever touched, so nothing here works on the whole vocabulary: the tokens known before a round are
    changed in all its rows at once, and then, row by row, the tokens of its own path.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int], device: torch.device) -> None:
        self._repetition, self._frequency = float(params.repetition_penalty), float(params.frequency_penalty)
        self._presence, self._device = float(params.presence_penalty), device
        self._bias = {token: float(bias) for token, bias in params.logit_bias}
        self._counts: dict[int, int] = {}  # output tokens
        self.counting = self._repetition != 1 or self._frequency != 0 or self._presence != 0
        self.active = self.counting or bool(self._bias)
        self._prompt = set(prompt) if self._repetition != 1 else set()
        known = list(dict.fromkeys([*self._bias, *self._prompt]))
        self._slots = {token: slot for slot, token in enumerate(known)}
        # By slot; the columns grow by doubling, since every round may add a few tokens.
        self._ids = torch.tensor(known, dtype=torch.int64, device=device)
        self._biases = self._column([self._bias.get(token, 0.0) for token in known])
        self._seen = torch.tensor([token in self._prompt for token in known], dtype=torch.bool, device=device)
        self._count = self._column([0.0] * len(known))
        self._fresh: dict[int, None] = {}  # tokens whose columns are out of date

    def _column(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device)

    def commit(self, tokens: Sequence[int]) -> None:
        """Add tokens that the answer really keeps."""
        if not self.counting:
            return
        for token in tokens:
            self._counts[token] = self._counts.get(token, 0) + 1
            self._fresh[token] = None

    @property
    def penalties(self) -> tuple[float, float, float] | None:
        """As kernels.Penalties.write has them; None where no logit is changed."""
        return (self._repetition, self._frequency, self._presence) if self.active else None

    def send(self, store: HistoryStore, slot: int) -> None:
        """To the device, which is told of nothing that it commits itself."""
        store.write(slot, self._prompt, self._counts, self._bias)

    def _refresh(self) -> None:
        """Write what was committed since into the columns."""
        if not self._fresh:
            return
        fresh, self._fresh = list(self._fresh), {}
        for token in fresh:
            self._slots.setdefault(token, len(self._slots))
        self._grow()
        slots = torch.tensor([self._slots[token] for token in fresh], dtype=torch.int64, device=self._device)
        self._ids[slots] = torch.tensor(fresh, dtype=torch.int64, device=self._device)
        self._seen[slots] = True
        self._count[slots] = self._column([float(self._counts[token]) for token in fresh])

    def _grow(self) -> None:
        missing = len(self._slots) - len(self._ids)
        if missing > 0:
            room = max(missing, len(self._ids), 64)
            self._ids = torch.cat([self._ids, self._ids.new_zeros(room)])
            self._biases = torch.cat([self._biases, self._biases.new_zeros(room)])
            self._seen = torch.cat([self._seen, self._seen.new_zeros(room)])
            self._count = torch.cat([self._count, self._count.new_zeros(room)])

    def apply_(self, scores: Tensor, logits: Tensor, rows: HostRows) -> None:
        """Write the changed logits into `scores`.

        Args:
            scores: [n, V] float32, changed in place where a token is biased or has been seen.
            logits: [n, V] of any dtype, what the changes are worked out from; `scores` where they are the same values.
        """
        self._refresh()
        size = len(self._slots)
        ids = self._ids[:size]
        base = logits[:, ids]  # [n, M]; copies, as are the path's below: both are read before scores is written
        own, tokens, counts = self._on_paths(rows)
        at_path = logits[own, tokens]  # [E]
        if size:
            scores[:, ids] = self._changed(base, self._biases[:size], self._seen[:size], self._count[:size])
        if len(own):
            biases = self._column([self._bias.get(token, 0.0) for token in tokens.tolist()])
            seen = torch.ones_like(own, dtype=torch.bool)
            scores[own, tokens] = self._changed(at_path, biases, seen, counts)

    def _on_paths(self, rows: HostRows) -> tuple[Tensor, Tensor, Tensor]:
        """Row, token and count so far (output and path) of every token of every row's path. Returns: [E] each."""
        paths = rows.paths() if self.counting else []
        entries = [
            (row, token, self._counts.get(token, 0) + count)
            for row, path in enumerate(paths)
            for token, count in path.items()
        ]
        table = torch.tensor(entries, dtype=torch.int64, device=self._device).reshape(-1, 3)
        return table[:, 0], table[:, 1], table[:, 2].double()

    def _changed(self, logits: Tensor, bias: Tensor, seen: Tensor, count: Tensor) -> Tensor:
        """Bias, then the penalties in vLLM's order. Worked out in float64 and rounded once. Returns: float32."""
        value = logits.double() + bias
        if self._repetition != 1:
            # On a GPU torch divides by a number through its inverse, which is rounded; by a tensor it really divides.
            by = torch.full((1,), self._repetition, dtype=torch.float64, device=value.device)
            value = torch.where(seen, torch.where(value > 0, value / by, value * by), value)
        value = value - self._frequency * count - self._presence * (count > 0).double()
        # No finite logit becomes infinite, which would forbid a token, or force it.
        return torch.where(value.isfinite(), value.clamp(-_FINITE, _FINITE), value).float()


class DeviceHistories:
    """Whose history lies in which slot of a device."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self.store = HistoryStore.allocate(slots, vocab, device)
        self._there: dict[int, History] = {}

    def bring(self, histories: Sequence[History], slots: Sequence[int]) -> None:
        """Before rounds of these sequences on the device; a sequence that was there in the last ones is there still."""
        for history, slot in zip(histories, slots, strict=True):
            if self._there.get(slot) is not history:
                self._there[slot] = history
                if history.active:
                    history.send(self.store, slot)

    def forget(self, slots: Sequence[int]) -> None:
        """Before rounds of these slots' sequences that the device does not count."""
        for slot in slots:
            self._there.pop(slot, None)
