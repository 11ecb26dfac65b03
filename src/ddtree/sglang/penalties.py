"""Penalties, counted on the device: every row has those of all committed tokens and of its own path through the tree.

SGLang counts tokens on the host, one a round and, under overlap, a round late. Here the counts live where the rounds
run, on their stream and in their order, so the host waits for nothing, and each row is given what plain decoding
without overlap would give it at that place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ddtree.kernels.backend import power_of_two
from ddtree.tree import Accepted, Rows, unpack


class Penalties:
    """How often each request has said each token, for requests that ask for penalties."""

    def __init__(self, device: Any) -> None:
        self.device = torch.device(device)
        self._rows: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # request -> its row of `_counts`; 0: nobody's
        self._counts: Tensor | None = None  # [rows, V] float32

    def begin(self, reqs: Sequence[Any], info: Any) -> None:
        """Before a prefill: start the counts of its requests with what they have said (before a retraction).

        Args:
            reqs: SGLang's requests.
            info: their SamplingBatchInfo; nothing is done where none of them asks for a penalty.
        """
        if _asked(info):
            for req in reqs:
                if _penalised(req.sampling_params):
                    self._start(req, req.output_ids, info.vocab_size)

    def of(self, reqs: Sequence[Any], info: Any, roots: Tensor, lengths: Tensor) -> "RoundPenalties | None":
        """The penalties of one round, whose roots are counted by it; None where no request asks for any.

        Args:
            roots, lengths: [B] integers, the last committed tokens and the tokens in the cache (without them).
        """
        if not _asked(info):
            return None
        vocabulary, asked = info.vocab_size, [req.sampling_params for req in reqs]
        for req, params in zip(reqs, asked, strict=True):
            if _penalised(params) and req not in self._rows:  # prefilled by another server
                self._start(req, req.output_ids[:-1], vocabulary)
        rates = [(one.frequency_penalty, one.presence_penalty, one.repetition_penalty) for one in asked]
        numbers = [
            (self._rows.get(req, 0), len(req.origin_input_ids), params.min_new_tokens)
            for req, params in zip(reqs, asked, strict=True)
        ]
        whole = self._upload(numbers, torch.int64)
        table = self._table(1, vocabulary)
        found = RoundPenalties(
            table,
            whole[:, 0],
            self._upload(rates, torch.float32),
            [at for at, one in enumerate(asked) if one.repetition_penalty != 1],
            whole[:, 2] - (lengths + 1 - whole[:, 1]),
            self._stops(reqs, vocabulary),
        )
        found.count(roots.unsqueeze(1), torch.ones_like(roots, dtype=torch.float32).unsqueeze(1))
        return found

    def _start(self, req: Any, said: Sequence[int], vocabulary: int) -> None:
        row = self._rows.get(req)
        if row is None:
            # A finished request may live on (its own custom_params hold it); its last round was launched before.
            for gone in [one for one in self._rows if one.finished()]:
                del self._rows[gone]
            taken = {0, *self._rows.values()}
            row = self._rows[req] = next(at for at in range(len(taken) + 1) if at not in taken)
        counts = self._table(row + 1, vocabulary)[row]
        counts.zero_()
        if said:
            tokens = self._upload(list(said), torch.int64)
            counts.scatter_add_(0, tokens, torch.ones_like(tokens, dtype=torch.float32))

    def _table(self, rows: int, vocabulary: int) -> Tensor:
        old = self._counts
        if old is None or len(old) < rows:
            size = power_of_two(max(rows, 8))
            self._counts = torch.zeros((size, vocabulary), dtype=torch.float32, device=self.device)
            if old is not None:
                self._counts[: len(old)] = old
        assert self._counts is not None
        return self._counts

    def _stops(self, reqs: Sequence[Any], vocabulary: int) -> Tensor | None:
        """[B, S] int64: what ends a request that asks for a least length, -1 behind; None where none does."""
        if not any(req.sampling_params.min_new_tokens > 0 for req in reqs):
            return None
        ends = [sorted(end for end in _ends(req) if 0 <= end < vocabulary) for req in reqs]
        longest = max(1, *map(len, ends))
        return self._upload([[*some, *[-1] * (longest - len(some))] for some in ends], torch.int64)

    def _upload(self, values: Any, dtype: torch.dtype) -> Tensor:
        pinned = torch.tensor(values, dtype=dtype, pin_memory=self.device.type == "cuda")
        return pinned.to(self.device, non_blocking=True)


@dataclass(frozen=True)
class RoundPenalties:
    """What one round's requests ask for."""

    table: Tensor  # [rows, V] float32: how often each token was said
    index: Tensor  # [B] int64: rows of `table`; row 0 is of requests without penalties
    rates: Tensor  # [B, 3] float32: frequency, presence, repetition
    repeated: Sequence[int]  # requests whose repetition penalty is not 1
    missing: Tensor  # [B] int64: tokens that must still be said, the one behind the root among them, before an end
    stops: Tensor | None  # [B, S] int64, -1 behind

    def apply(self, logits: Tensor, rows: Rows) -> None:
        """Apply them in place. logits: [B * N, V]; rows: [B, N], verified."""
        batch, width = rows.tokens.shape
        view, said = logits.view(batch, width, -1), self.table[self.index]
        frequency, presence, repetition = self.rates.view(batch, 3, 1, 1).unbind(1)
        # Tokens of the tree are the only ones whose counts differ from row to row.
        path = unpack(rows.ancestors, width)
        path[:, :, 0] = False  # roots are committed
        same = (rows.tokens.unsqueeze(2) == rows.tokens.unsqueeze(1)).float()
        counts = path.float() @ same + said.gather(1, rows.tokens).unsqueeze(1)  # [B, N, N]: row, token
        index = rows.tokens.unsqueeze(1).expand(batch, width, width)
        raw = view.gather(2, index).float()
        raw = _scaled(raw - frequency * counts - presence * (counts > 0), torch.where(counts > 0, repetition, 1.0))
        said = said.unsqueeze(1)
        view.sub_(frequency * said + presence * (said > 0))
        for at in self.repeated:  # one by one: all at once would take several tensors as large as the logits
            view[at] = _scaled(view[at], torch.where(said[at] > 0, repetition[at], 1.0)).to(view.dtype)
        view.scatter_(2, index, raw.to(view.dtype))
        if self.stops is not None:
            early = (rows.depths < self.missing.unsqueeze(1)).unsqueeze(2) & (self.stops >= 0).unsqueeze(1)
            away = torch.where(early, float("-inf"), 0.0).to(view.dtype)
            view.scatter_add_(2, self.stops.clamp(min=0).unsqueeze(1).expand_as(away), away)

    def keep(self, accepted: Accepted) -> None:
        """Count what a round accepted; its bonus is the next round's root, and counted there."""
        columns = torch.arange(accepted.tokens.shape[1], device=accepted.tokens.device)
        self.count(accepted.tokens.clamp(min=0), (columns < accepted.count.unsqueeze(1)).float())

    def count(self, tokens: Tensor, times: Tensor) -> None:
        """tokens: [B, M] int64; times: [B, M] float32."""
        self.table.index_put_((self.index.unsqueeze(1).expand_as(tokens), tokens.long()), times, accumulate=True)


def _scaled(values: Tensor, scale: Tensor) -> Tensor:
    return torch.where(values < 0, values * scale, values / scale)


def _asked(info: Any) -> bool:
    return info is not None and info.acc_additive_penalties is not None


def _penalised(params: Any) -> bool:
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1
        or params.min_new_tokens > 0
    )


def _ends(req: Any) -> set[int]:
    """The tokens that min_new_tokens keeps off, as SGLang has them."""
    tokenizer, ends = req.tokenizer, set(req.sampling_params.stop_token_ids or ())
    if tokenizer is not None:
        ends |= set(tokenizer.additional_stop_token_ids or ())
        ends |= set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    return ends
