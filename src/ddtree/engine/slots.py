"""Cache slots: a running sequence has one to itself, a finished one leaves its context there for whoever can use it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ddtree.drafter import Drafter
from ddtree.errors import InvalidOption
from ddtree.layers import KVCache
from ddtree.plan import MemoryPlan
from ddtree.target import Target


@dataclass
class Slot:
    """What one slot of the caches holds."""

    index: int
    tokens: Sequence[int] = ()  # of the sequence that is or was here
    held: int = 0  # first positions whose keys and values the target's cache holds
    drafted: int = 0  # first positions whose features the drafter's context holds
    busy: bool = False
    used: int = 0  # when it was last taken; larger is later


@dataclass
class SlotStore:
    """The caches of target and drafter, and who has which slot of them.

    A slot's prefix can be reused as far as both caches hold it: a drafter without the context of a reused prefix would
    draft worse, silently.
    """

    target: Target
    drafter: Drafter | None
    count: int
    length: int  # positions per slot, scratch included
    plan: MemoryPlan | None = None  # what their engine was found to need
    slots: list[Slot] = field(init=False)
    cache: KVCache = field(init=False)
    drafter_cache: KVCache | None = field(init=False)
    _clock: int = 0

    def __post_init__(self) -> None:
        """Raises InvalidOption where the memory is not there."""
        self.slots = [Slot(index) for index in range(self.count)]
        try:
            # One more than sequences can have: the padding of a batch writes there.
            self.cache = self.target.allocate(self.count + 1, self.length)
            self.drafter_cache = self.drafter.allocate(self.count + 1, self.length) if self.drafter else None
        except (OSError, MemoryError, RuntimeError, torch.OutOfMemoryError) as error:
            raise InvalidOption(
                f"there is no memory for the context of {self.count} requests of {self.length} positions each "
                f"({error}): lower max_model_len or max_running_requests",
                param="max_model_len",
            ) from error

    @property
    def spare(self) -> int:
        """The slot that no sequence has."""
        return self.count

    @property
    def tokens_held(self) -> int:
        """Positions in use or kept for reuse, over all slots."""
        return sum(slot.held for slot in self.slots)

    def acquire(self, prompt: Sequence[int], *, reuse: bool, drafts: bool) -> tuple[Slot, int] | None:
        """A slot for a prompt, and how many of its first tokens the slot holds already; None when all are busy.

        drafts: whether the reused prefix must lie in the drafter's context too. At least one token is left to compute,
        since its logits are needed.
        """
        free = sorted((slot for slot in self.slots if not slot.busy), key=lambda slot: slot.used)
        if not free:
            return None
        source, shared = free[0], 0
        for slot in self.slots if reuse else ():
            limit = min(slot.held, slot.drafted if drafts else slot.held, len(prompt) - 1)
            common = _common(slot.tokens, prompt, limit)
            if common > shared:
                source, shared = slot, common
        slot = free[0]
        if shared and not source.busy and (2 * shared >= source.held or len(free) == 1):
            slot = source  # most of what lies there is of use: go on in place
        elif shared:
            slot = next(s for s in free if s is not source)
            self._copy(source, slot, shared)
        self._clock += 1
        slot.tokens, slot.held, slot.drafted = prompt, shared, shared if drafts else 0
        slot.busy, slot.used = True, self._clock
        return slot, shared

    def release(self, slot: Slot) -> None:
        """The sequence is over; its context stays until somebody needs the slot."""
        slot.tokens = tuple(slot.tokens[: slot.held])
        slot.busy = False

    def drop_idle(self) -> None:
        """What finished sequences left is not reused; those that run keep their slots as they are."""
        for slot in self.slots:
            if not slot.busy:
                slot.tokens, slot.held, slot.drafted = (), 0, 0

    def forget(self) -> None:
        """Nothing that lies in the caches may be reused: a forward failed half-way."""
        for slot in self.slots:
            slot.busy = False
        self.drop_idle()

    def _copy(self, source: Slot, target: Slot, count: int) -> None:
        self.cache.copy(source.index, target.index, count)
        if self.drafter_cache is not None:
            self.drafter_cache.copy(source.index, target.index, min(count, source.drafted))


def _common(one: Sequence[int], two: Sequence[int], limit: int) -> int:
    """Length of the longest common beginning, at most `limit`."""
    one, two = list(one[:limit]), list(two[:limit])
    low, high = 0, min(len(one), len(two))
    while low < high:  # comparing slices is far faster than a loop over tokens
        middle = (low + high + 1) // 2
        if one[low:middle] == two[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
