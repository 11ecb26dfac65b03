"""A batch of requests from prompt to end: prefill, then rounds."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ddtree.config import SamplingParams, Speculation
from ddtree.drafter import Drafter
from ddtree.engine.modes import MODES
from ddtree.engine.observer import Observer
from ddtree.engine.round import Batch, Verdict, round_depth, run_round
from ddtree.engine.sampling import Sampler
from ddtree.errors import DamagedFile
from ddtree.layers import KVCache
from ddtree.target import Target
from ddtree.tree import RoundState

PREFILL_CHUNK = 256  # rows of one prefill forward; bounds the attention mask and the features held at once
_SLOT_STEP = 512  # caches grow in steps, so that one cache serves requests of different lengths


@dataclass
class Counts:
    """What one sequence's rounds added up to. Acceptance counts before cuts, prefill excluded."""

    rounds: int = 0
    accepted: int = 0
    tree_accepted: int = 0  # shadow-linear: what the tree would have accepted from the same roots
    predictions: dict[int, set[int]] = field(
        default_factory=dict
    )  # shadow-linear: position -> tokens of the tree's runs
    agree: bool = True  # every prediction so far was committed later

    @property
    def acceptance_length(self) -> float | None:
        """(accepted + 1) per round; None without a round."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else None

    @property
    def tree_acceptance_length(self) -> float | None:
        """The tree's counterfactual; None without a round."""
        return (self.tree_accepted + self.rounds) / self.rounds if self.rounds else None

    def check(self, position: int, token: int) -> None:
        """Compare a committed token with what the tree's runs had at its position."""
        self.agree &= self.predictions.pop(position, {token}) == {token}


@dataclass
class CachePool:
    """Caches between requests: they are large, and zeroing them costs more than a round."""

    target: Target
    drafter: Drafter | None
    free: list[tuple[int, KVCache, KVCache | None]] = field(default_factory=list)

    def take(self, batch: int, slots: int) -> tuple[KVCache, KVCache | None]:
        """Caches for `batch` sequences of at least `slots` positions."""
        for index, (size, cache, drafter_cache) in enumerate(self.free):
            if size == batch and cache.slots >= slots:
                del self.free[index]
                return cache, drafter_cache
        self.free.clear()  # what is too small now would only hold memory
        slots = -(-slots // _SLOT_STEP) * _SLOT_STEP
        return self.target.allocate(batch, slots), self.drafter.allocate(batch, slots) if self.drafter else None

    def give(self, batch: int, caches: tuple[KVCache, KVCache | None]) -> None:
        """Hand caches back."""
        self.free = [(batch, *caches)]


class Session:
    """Decodes a batch; the caller asks for the tokens of prefill, then of one round after another."""

    def __init__(
        self,
        pool: CachePool,
        speculation: Speculation,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        remaining: Sequence[int],
        observer: Observer,
    ) -> None:
        """prompts: token ids, at least one each; remaining: tokens each may generate."""
        target, drafter, mode = pool.target, pool.drafter, MODES[speculation.mode]
        depth, rows = round_depth(drafter, mode, speculation)
        block = drafter.config.block_size if drafter else 0
        slots = max(len(p) + r for p, r in zip(prompts, remaining, strict=True)) + max(rows, depth + 1, block)
        caches = pool.take(len(prompts), slots)
        self._pool, self._caches, self._closed = pool, caches, False
        self._prompts, self.counts = prompts, [Counts() for _ in prompts]
        device, vocab = target.spec.device, target.spec.vocab_size
        seeds = [secrets.randbits(63) if p.seed is None else p.seed for p in params]
        self.batch = Batch(
            target=target,
            target_cache=caches[0],
            drafter=drafter,
            drafter_cache=caches[1],
            mode=mode,
            speculation=speculation,
            state=RoundState.allocate(len(prompts), rows, depth, device),
            sampler=Sampler([float(p.temperature) for p in params], seeds, vocab, device),
            ends=_end_ids(target.spec.end_ids, params).to(device),
            observer=observer,
        )
        self.batch.state.remaining.copy_(torch.tensor(remaining))

    def close(self) -> None:
        """Give the caches back; the session is over."""
        if not self._closed:
            self._pool.give(len(self._prompts), self._caches)
            self._closed = True

    @property
    def running(self) -> bool:
        """Whether any sequence still decodes."""
        return not bool(self.batch.state.done.all())

    def finish(self, index: int) -> None:
        """A sequence ended for a reason the device cannot see (a stop string)."""
        self.batch.state.done[index] = True

    @torch.inference_mode()
    def prefill(self) -> list[list[int]]:
        """Run the prompts; returns each sequence's first token."""
        with self.batch.observer.stage("prefill"):
            return [[self._prefill_one(index, ids)] for index, ids in enumerate(self._prompts)]

    def _prefill_one(self, index: int, ids: Sequence[int]) -> int:
        batch, state = self.batch, self.batch.state
        prompt = torch.tensor([list(ids)], device=state.tokens.device)  # [1, T]
        position = state.position[index : index + 1]
        cache = batch.target_cache.sequence(index)
        for chunk in prompt.split(PREFILL_CHUNK, 1):
            features, logits = batch.target.prefill(cache, chunk, position)
            if batch.drafter is not None and batch.drafter_cache is not None:
                batch.drafter.append(batch.drafter_cache.sequence(index), features, position)
            position += chunk.shape[1]
        if bool(logits.isnan().any()):
            raise DamagedFile(
                "the model's logits are not numbers: its weights or its configuration are damaged, or overflow in this"
                " dtype; fetch the model again, or try float32"
            )
        # The last prompt token stands one before the root's position and chooses the root.
        first = int(batch.sampler.choose_one(index, logits[0], int(position)))
        state.tokens[index, 0] = first
        state.remaining[index] -= 1
        state.done[index] = bool((batch.ends[index] == first).any()) or int(state.remaining[index]) <= 0
        return first

    @torch.inference_mode()
    def step(self) -> list[list[int]]:
        """One round; returns each sequence's newly committed tokens, cut at its end."""
        state = self.batch.state
        positions, active = state.position.tolist(), [not d for d in state.done.tolist()]
        verdict = run_round(self.batch)
        tokens = [t[:n] for t, n in zip(state.committed.tolist(), state.n_committed.tolist(), strict=True)]
        for index, counts in enumerate(self.counts):
            if active[index]:
                counts.rounds += 1
                counts.accepted += int(verdict.committed.count[index])
                self._shadow(counts, verdict, index, positions[index], tokens[index])
        return tokens

    def _shadow(self, counts: Counts, verdict: Verdict, index: int, position: int, committed: list[int]) -> None:
        """Note what the tree would have committed, and check earlier notes against what was committed now."""
        if verdict.tree is None:
            return
        size = int(verdict.tree.count[index]) + 1
        counts.tree_accepted += size - 1
        for offset, token in enumerate(verdict.tree.tokens[index, :size].tolist(), start=1):
            counts.predictions.setdefault(position + offset, set()).add(token)
        for offset, token in enumerate(committed, start=1):
            counts.check(position + offset, token)


def _end_ids(ids: Sequence[int], params: Sequence[SamplingParams]) -> torch.Tensor:
    """[B, E] int64; -2, which is no token, where a request ignores the end of sequence."""
    return torch.tensor([[-2] * len(ids) if p.ignore_eos else list(ids) for p in params], dtype=torch.int64)
