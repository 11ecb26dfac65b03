"""The static batches of a device's rounds, by shape, and the graphs over them: which are kept, and for how long."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from ddtree.drafter import Drafter
from ddtree.engine.consult import HostPart
from ddtree.engine.graphs import SplitRound, WholeRound
from ddtree.engine.observer import Unobserved
from ddtree.engine.ops import DeviceOps
from ddtree.engine.round import Batch
from ddtree.engine.shapes import Shape
from ddtree.engine.slots import SlotStore
from ddtree.kernels import HistoryStore, PairFactors
from ddtree.kernels.context import TextStore
from ddtree.layers import KVCache
from ddtree.target import Target
from ddtree.tree import RoundState

NO_TOKEN = -2  # fills the lists of end ids
MOST_OTHERS = 16  # shapes that requests chose, beside those that were prepared: each keeps logits of its own


@dataclass
class Captured:
    """The static batch of a shape, and its graphs."""

    shape: Shape
    batch: Batch
    alone: DeviceOps  # for batches whose tokens the device chooses by itself
    told: DeviceOps  # the same tensors, for batches that the host has a part in
    whole: WholeRound | None = None
    split: SplitRound | None = None
    drafting: list[bool] = field(default_factory=list)  # who drafts, as the plan says
    stays: bool = False  # it was prepared, and the memory is planned for it
    starved: bool = False  # there was no memory to capture it: its rounds are single launches


class StaticBatches:
    """One for each shape: those that were prepared, and of the others the latest used, as long as there is memory."""

    def __init__(self, make: Callable[[Shape], Captured], short: Callable[[], bool] = lambda: False) -> None:
        """make: allocates one; short: whether the memory is: what a plan counts has to stay free beside the others."""
        self._make, self._short = make, short
        self._made: dict[Shape, Captured] = {}  # the latest used is the last

    def get(self, shape: Shape, stays: bool = False) -> Captured:
        """The one of a shape, made where there is none. stays: it is never given up from now on.

        Raises torch.OutOfMemoryError where giving up all others does not help.
        """
        captured = self._made.pop(shape, None)
        if captured is None:
            if not stays:
                self._make_room()
            captured = self._try(shape)
        if captured is None:
            self.give_up()
            captured = self._make(shape)
        captured.stays |= stays
        self._made[shape] = captured
        return captured

    def _try(self, shape: Shape) -> Captured | None:
        """None where there is no memory. Only behind an error is what it holds free: its frames have tensors."""
        try:
            return self._make(shape)
        except torch.OutOfMemoryError:
            return None

    def all(self) -> list[Captured]:
        """Those that are kept, the latest used last."""
        return list(self._made.values())

    def give_up(self, but: Captured | None = None) -> int:
        """Drop all that were not prepared, but one. Returns: how many."""
        others = [shape for shape in self._others() if self._made[shape] is not but]
        for shape in others:
            self._drop(shape)
        if others and torch.cuda.is_available():
            torch.cuda.empty_cache()
        return len(others)

    def _others(self) -> list[Shape]:
        return [shape for shape, made in self._made.items() if not made.stays]

    def _make_room(self) -> None:
        """Give up what was not used for longest. Its memory goes to the graphs that come after it."""
        while (others := self._others()) and (len(others) >= MOST_OTHERS or self._short()):
            self._drop(others[0])

    def _drop(self, shape: Shape) -> None:
        device = self._made[shape].batch.ends.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a part that was launched for a sequence that left may still run
        del self._made[shape]


def allocate(
    shape: Shape,
    target: Target,
    drafter: Drafter | None,
    store: SlotStore,
    histories: HistoryStore,
    texts: TextStore | None,
    factors: PairFactors | None,
) -> Captured:
    """A shape's static tensors, on the target's device.

    histories, texts: of all slots, texts only where the shape drafts from them; factors: of the drafter's pairwise
    head, where it has one.
    """
    spec, slots = target.spec, [0] * shape.batch
    sizes = shape.batch, shape.width, shape.depth, shape.ranks
    ops = DeviceOps.allocate(*sizes, histories, spec.device, texts, factors)
    host = HostPart.allocate(shape.batch, shape.width, spec.vocab_size, spec.device)
    batch = Batch(
        target=target,
        target_cache=_static(store.cache, slots),
        drafter=drafter,
        drafter_cache=_static(store.drafter_cache, slots) if drafter and store.drafter_cache else None,
        lanes=(),
        state=RoundState.allocate(shape.batch, shape.width, shape.depth, spec.device),
        ends=torch.full((shape.batch, shape.ends), NO_TOKEN, dtype=torch.int64, device=spec.device),
        observer=Unobserved(),
        ops=ops,
    )
    batch.state.lay_roots()
    return Captured(shape, batch, ops, replace(ops, host=host))


def _static(cache: KVCache, slots: list[int]) -> KVCache:
    """A view whose slots lie in a tensor of its own, which stays where it is."""
    return replace(cache, slots=tuple(slots), index=torch.tensor(slots, device=cache.data.device))
