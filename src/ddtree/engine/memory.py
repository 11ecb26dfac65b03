"""How much memory target, drafter, caches and rounds take at their fullest: what `ddtree.plan` weighs at the start."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddtree.config import Speculation
from ddtree.drafter import Drafter
from ddtree.engine.consult import mask_words
from ddtree.engine.modes import MODES, depths_needed, max_rows
from ddtree.engine.prompts import PADDED
from ddtree.engine.shapes import bucket, buckets
from ddtree.kernels import AttentionWorkspace, HistoryStore
from ddtree.kernels.backend import usable
from ddtree.kernels.build import MOST_RANKS
from ddtree.kernels.context import GUESSES, TextStore
from ddtree.plan import Load, Memory, MemoryPlan, Part, machine_memory
from ddtree.target import LlamaTarget, Target

LIBRARIES = 256 * 2**20  # bytes on a GPU: cuBLAS's own, compiled kernels, the nodes of graphs, the allocator's rounding
_FLOAT, _COPIES = 4, 4  # bytes of a float32; copies of its rows in float32 that a sampler on the host makes
# A product by kernels keeps its sum in up to 8 parts, fewer where there are many columns (kernels.matmul.pick_splits).
_PARTS, _MOST_COLUMNS = 8, 24_576


def device_memory(device: torch.device) -> Memory | None:
    """What the device has; None where nobody knows."""
    if device.type != "cuda":
        return machine_memory()
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for whoever asks next
    return Memory(str(device), free + kept, total)


@dataclass(frozen=True)
class _Model:
    """What of a model the sum depends on; sizes in bytes where nothing else is said."""

    weights: int
    position: int  # keys and values of one position, all layers
    kv_heads: int
    head_dim: int
    queries: int  # heads
    hidden: int  # columns
    inner: int  # columns of the gated unit
    features: int  # columns
    dtype: torch.dtype

    def states(self, rows: int) -> int:
        """A forward's: the stream in float32, its norm, heads, the gated unit, features."""
        size = self.dtype.itemsize
        heads = (self.queries + 2 * self.kv_heads) * self.head_dim * (size + _FLOAT)
        return rows * (self.hidden * (2 * _FLOAT + 3 * size) + heads + (3 * self.inner + self.features) * size)

    def masks(self, rows: int, span: int) -> int:
        """What attention by masks takes for one sequence: see layers.attention_mask. A row alone needs none."""
        if rows == 1:
            return 0
        groups = self.queries // self.kv_heads
        return rows * span * (2 + (1 + 2 * groups) * self.dtype.itemsize)

    def workspace(self, batch: int, rows: int, length: int) -> int:
        """What attention by kernels takes."""
        query = torch.empty(batch, rows, self.queries, self.head_dim, dtype=self.dtype, device="meta")
        cache = torch.empty(1, 2 * self.kv_heads, length, self.head_dim, dtype=self.dtype, device="meta")
        return sum(tensor.nbytes for tensor in vars(AttentionWorkspace.allocate(query, cache)).values()
                   if isinstance(tensor, Tensor))  # fmt: skip


class Planner:
    """The memory plan of a target and its drafter for any load. Nothing is allocated but two caches of one position."""

    def __init__(self, target: Target, drafter: Drafter | None, chunk: int, speculation: Speculation | None) -> None:
        """chunk: rows of a prefill. speculation: whose rounds are captured at the start; None where none are."""
        spec = target.spec
        self._vocab, self._dtype, self._chunk = spec.vocab_size, spec.dtype, chunk
        self._kernels, self._cuda = usable(spec.device), spec.device.type == "cuda"
        cache = target.allocate(1, 1).data
        _, _, lines, _, head_dim = cache.shape
        queries, inner = lines // 2, 4 * spec.hidden_size
        if isinstance(target, LlamaTarget):
            queries, inner = target.config.num_heads, target.config.intermediate_size
        self._target = _Model(
            weights=tensor_bytes(target), position=cache.nbytes, kv_heads=lines // 2, head_dim=head_dim,
            queries=queries, hidden=spec.hidden_size, inner=inner,
            features=len(target.feature_layers) * spec.hidden_size, dtype=cache.dtype,
        )  # fmt: skip
        self._drafter = None if drafter is None else _drafter_model(drafter)
        cut = None if drafter is None else drafter.vocabulary
        self._drafted = self._vocab if cut is None else len(cut)  # tokens that a draft has logits of
        self._pairwise = drafter is not None and drafter.pairwise is not None
        self._depths, self._block = (drafter.config.depths, drafter.config.block_size) if drafter else (0, 0)
        self._captured = None  # rows of the rounds that are captured at the start
        if speculation is not None:
            mode = MODES[speculation.mode]
            self._captured = max_rows(mode, speculation, depths_needed(mode, speculation, self._depths))

    def rows(self, load: Load) -> int:
        """The most that a round may have for one sequence: the drafter's chain and the largest tree."""
        return 1 + self._depths + load.budget if self._drafter else 1

    def length(self, load: Load) -> int:
        """Positions of a slot: the context, and behind it room for the rows of a round."""
        return load.context + max(1 + self._depths + load.budget, self._block)

    def __call__(self, load: Load) -> MemoryPlan:
        """The plan of a load: of its fullest moment, all slots in use."""
        slots, length = load.requests + 1, self.length(load)  # one more: the padding of a batch writes there
        batch, rows = bucket(load.requests) if self._kernels else load.requests, self.rows(load)
        context, round_of = f"{load.requests} requests of {length} positions", f"a round of {batch} x {rows} rows"
        parts = [
            Part("target_weights", self._target.weights, "loaded already", there=True),
            Part("target_context", slots * length * self._target.position, context),
            Part("attention", self._attention(batch, rows, length), round_of),
            Part("logits", self._logits(batch, rows) + self._choices(batch, rows), round_of),
            Part("states", self._states(batch, rows), round_of),
            Part("prefill", self._prefill(length), f"{self._chunk} rows"),
        ]
        if self._drafter is not None:
            parts.insert(1, Part("drafter_weights", self._drafter.weights, "loaded already", there=True))
            parts.insert(3, Part("drafter_context", slots * length * self._drafter.position, context))
        if self._drafter is not None and self._kernels:
            note = f"{load.requests} requests of {load.context} tokens"
            parts.append(Part("texts", TextStore.bytes(slots, load.context), note))
        if self._kernels:
            note = f"{load.requests} requests of {self._vocab} tokens to choose from"
            parts.append(Part("histories", HistoryStore.bytes(slots, self._vocab), note))
        if self._captured is not None:
            note = f"rounds of up to {batch} x {self._captured} rows"
            parts.append(Part("graphs", self._graphs(load.requests, length), note))
        if self._cuda:
            parts.append(Part("libraries", LIBRARIES))
        return MemoryPlan(tuple(parts))

    def _attention(self, batch: int, rows: int, length: int) -> int:
        if not self._kernels:
            return batch * self._target.masks(rows, length)
        turns = length * self._target.head_dim * _FLOAT  # of all positions
        size = self._target.workspace(batch, rows, length) + turns
        if self._drafter is not None:
            size += self._drafter.workspace(batch, self._block, length) + length * self._drafter.head_dim * _FLOAT
        return size

    def _logits(self, batch: int, rows: int) -> int:
        """The target's."""
        return batch * rows * self._vocab * self._dtype.itemsize

    def _choices(self, batch: int, rows: int) -> int:
        """The draft's logits, also as float32; one sequence's rows in a sampler, or the rows of all as kernels change
        them; the noise that each one keeps; pair scores, and these in order.
        """
        draft = batch * self._depths * (self._dtype.itemsize + _FLOAT)
        noise = batch * (1 + self._depths) * _FLOAT
        of_pairs = MOST_RANKS**2 * (2 * _FLOAT + 1) + GUESSES * (MOST_RANKS + 1) ** 2  # and guesses behind each of them
        pairs = batch * self._depths * of_pairs if self._pairwise else 0
        copies = max(batch, _COPIES) if self._kernels else _COPIES
        return pairs + self._drafted * draft + self._vocab * (noise + rows * copies * _FLOAT)

    def _states(self, batch: int, rows: int) -> int:
        size = self._target.states(batch * rows)
        if self._kernels:
            size += batch * rows * min(_PARTS * self._target.hidden, _MOST_COLUMNS) * _FLOAT
        if self._drafter is not None:
            kept = batch * (1 + self._depths) * self._target.features * self._dtype.itemsize
            size += kept + self._drafter.states(batch * self._block)
        return size

    def _prefill(self, length: int) -> int:
        size = self._target.states(self._chunk) + self._target.masks(self._chunk, length)
        size += 0 if self._drafter is None else self._drafter.states(self._chunk)
        if self._kernels:  # short pieces keep their attention's memory
            size += sum(self._target.workspace(1, rows, length) for rows in PADDED)
        if self._captured is not None:  # their graphs share the rest, apart from what longer pieces take
            size += self._states(1, PADDED[-1]) + self._logits(len(PADDED), 1)
        return size

    def _graphs(self, requests: int, length: int) -> int:
        """Each graph keeps its logits; what else a round takes, graphs share. Attention's memory is that of the
        largest, and as much again, since it doubles where a request's round is larger: see layers.place.Workspaces.
        """
        rows, most = self._captured or 1, bucket(requests)
        own = sum(self._logits(batch, rows) + self._split(batch, rows) for batch in buckets(requests))
        return own + 2 * self._attention(most, rows, length) + self._choices(most, rows) + self._states(most, rows)

    def _split(self, batch: int, rows: int) -> int:
        """What a round in two graphs keeps between them beside: its own logits, features, and a mask of every row."""
        features = batch * rows * self._target.features * self._dtype.itemsize
        return self._logits(batch, rows) + features + batch * rows * mask_words(self._vocab) * 4


def _drafter_model(drafter: Drafter) -> _Model:
    config, cache = drafter.config, drafter.allocate(1, 1).data
    return _Model(
        weights=tensor_bytes(drafter), position=cache.nbytes, kv_heads=config.num_kv_heads,
        head_dim=config.head_dim, queries=config.num_heads, hidden=config.hidden_size, inner=config.intermediate_size,
        features=len(config.target_layer_ids) * config.hidden_size, dtype=cache.dtype,
    )  # fmt: skip


def tensor_bytes(model: object) -> int:
    """Bytes of all tensors that a model's own objects hold; what two of them share counts once."""
    found: dict[Any, int] = {}
    seen: set[int] = set()
    todo: list[object] = [model]
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            _count(thing, found)
        elif isinstance(thing, dict):
            todo += thing.values()
        elif isinstance(thing, list | tuple):
            todo += thing
        elif type(thing).__module__.startswith("ddtree."):
            todo += vars(thing).values()
    return sum(found.values())


def _count(tensor: Tensor, found: dict[Any, int]) -> None:
    if tensor.layout is torch.strided:
        storage = tensor.untyped_storage()
        found[storage.data_ptr(), tensor.device] = storage.nbytes()
    else:  # packed for the processor: it has no storage that it would tell
        found[id(tensor)] = tensor.numel() * tensor.element_size()
