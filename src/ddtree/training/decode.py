"""Answers for hundreds of prompts at once: the host only counts steps, the device does all the rest.

The engine serves requests: it computes prompts one by one and reads every token. For data neither is needed, so here
all rows stand at one position: a row whose prompt is longer takes the prompt's token instead of its own. On a GPU a
step is one CUDA graph.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ddtree.engine.graphs import Recorded, aside
from ddtree.errors import InvalidOption
from ddtree.layers import HostPlace, Segment
from ddtree.target import LlamaTarget
from ddtree.training.whole import Held, WholePlace

log = logging.getLogger("ddtree.training")

SPAN = 64  # keys that a step reads are a multiple of it: so many graphs there are
LOOK = 32  # steps between two looks at who is done
PROMPT_ROWS = 1 << 15  # rows of prompts computed at once
LEAST = 64  # rows that a batch is not made smaller than


class Rows:
    """Every row's tokens, keys and values, and how far it is, on the device."""

    def __init__(self, target: LlamaTarget, batch: int, length: int) -> None:
        c, spec = target.config, target.spec
        self.batch, self.length, self.device = batch, length, spec.device
        shape = (batch, c.num_kv_heads, -(-length // SPAN) * SPAN, c.head_dim)
        self.keys, self.values = (
            [torch.zeros(shape, dtype=spec.dtype, device=self.device) for _ in range(c.num_layers)] for _ in range(2)
        )
        self.tokens = torch.zeros(batch, length, dtype=torch.int64, device=self.device)
        self.prompts, self.stops, self.lengths = (
            torch.ones(batch, dtype=torch.int64, device=self.device) for _ in range(3)
        )
        self.done = torch.ones(batch, dtype=torch.bool, device=self.device)
        self.heat = torch.zeros(batch, 1, dtype=torch.float32, device=self.device)
        self.position = torch.zeros(1, dtype=torch.int64, device=self.device)  # of the tokens that a step computes

    @property
    def bytes(self) -> int:
        """Of keys and values."""
        return sum(t.numel() * t.element_size() for part in (self.keys, self.values) for t in part)

    def begin(self, prompts: Sequence[Sequence[int]], limits: Sequence[int], heat: Sequence[float]) -> None:
        """Put prompts into the first rows; the others are done."""
        count = len(prompts)
        width = max(map(len, prompts))
        padded = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
        self.tokens[:count, :width] = padded.to(self.device)
        sizes = torch.tensor([len(prompt) for prompt in prompts])
        self.prompts[:count] = self.lengths[:count] = sizes.to(self.device)
        self.stops[:count] = (sizes + torch.tensor(list(limits))).clamp(max=self.length).to(self.device)
        self.heat[:count, 0] = torch.tensor(list(heat), dtype=torch.float32).to(self.device)
        self.done[:count] = False
        self.done[count:] = True
        self.position.fill_(int(sizes.min()) - 1)

    def keep(self, rows: Tensor, span: int) -> None:
        """Move these rows [n] to the front, with their first `span` keys."""
        count = len(rows)
        for part in (self.keys, self.values):
            for layer in part:
                layer[:count, :, :span] = layer[rows, :, :span]
        for tensor in (self.tokens, self.prompts, self.stops, self.lengths, self.done, self.heat):
            tensor[:count] = tensor[rows]


class StepPlace(HostPlace):
    """One row of each sequence, all at one position that the device holds."""

    def __init__(self, rows: Rows, batch: int, span: int, target: LlamaTarget) -> None:
        super().__init__((), rows.position, target.rope, None, target.config.num_heads // target.config.num_kv_heads)
        self._rows, self._batch, self._span = rows, batch, span
        self._seen = (torch.arange(span, device=rows.device) <= rows.position)[None, None, None]

    def attend(self, cache: Any, layer: int, query: Tensor, window: int | None, causal: bool) -> Tensor:
        """See Place.attend; cache: Held, with the rows' own keys and values."""
        if window is not None:
            raise NotImplementedError("a target's layers with a window")  # no adapter has any: a guard
        rows, batch = self._rows, self._batch
        for kept, new in zip((rows.keys, rows.values), cache.heads.chunk(2, 1), strict=True):
            kept[layer][:batch].index_copy_(2, rows.position, new.unsqueeze(2))
        keys, values = (part[layer][:batch, :, : self._span] for part in (rows.keys, rows.values))
        folded = query.unflatten(1, (keys.shape[1], -1))  # the heads that share a key are rows of one query
        mixed = torch.nn.functional.scaled_dot_product_attention(folded, keys, values, attn_mask=self._seen)
        return mixed.flatten(1)


class PromptRows(WholePlace):
    """What the prompts of some rows have in front, all of one length; keys and values are kept."""

    def __init__(self, rows: Rows, first: int, count: int, size: int, target: LlamaTarget) -> None:
        positions = torch.arange(size, device=rows.device).repeat(count)
        segments = [Segment(row, 0, row * size, size) for row in range(count)]
        super().__init__(segments, positions, target.rope, None, target.config.num_heads // target.config.num_kv_heads)
        self._rows, self._at, self._size = rows, slice(first, first + count), size

    def attend(self, cache: Any, layer: int, query: Tensor, window: int | None, causal: bool) -> Tensor:
        """See Place.attend."""
        both = cache.heads.unflatten(0, (-1, self._size)).transpose(1, 2).chunk(2, 1)
        for kept, new in zip((self._rows.keys, self._rows.values), both, strict=True):
            kept[layer][self._at, :, : self._size] = new
        return super().attend(cache, layer, query, window, causal)


class Decoder:
    """A target that answers many prompts at once."""

    def __init__(self, target: LlamaTarget, batch: int, length: int, graphs: bool = False) -> None:
        """batch: prompts at once; length: tokens of prompt and answer, at most; graphs: a step is a CUDA graph."""
        self._uses_graphs = graphs
        self._target, self._batch, self._length = target, batch, length
        self._rows: Rows | None = None
        self._graphs: dict[tuple[int, int], Recorded[None]] = {}
        self._pool: Any = None
        self._ends = torch.tensor(list(target.spec.end_ids), dtype=torch.int64, device=target.spec.device)

    @torch.inference_mode()
    def answer(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], temperatures: Sequence[float], seed: int
    ) -> list[list[int]]:
        """Answers, each up to its limit of tokens or an end id (which is part of it), as the engine's.

        Prompts of like lengths are computed together. seed: of all that is drawn here.
        """
        self._target.tap(())
        torch.manual_seed(seed)
        answers: list[list[int]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        for first in range(0, len(order), self._batch):
            some = order[first : first + self._batch]
            given = [prompts[index] for index in some]
            found = self._run(given, [limits[index] for index in some], [temperatures[index] for index in some])
            for index, answer in zip(some, found, strict=True):
                answers[index] = answer
        return answers

    def _run(self, prompts: list[Sequence[int]], limits: list[int], temperatures: list[float]) -> list[list[int]]:
        rows, count = self._allocated(), len(prompts)
        rows.begin(prompts, limits, temperatures)
        common = min(map(len, prompts)) - 1
        self._begin(common, count)
        end = min(max(len(p) + n for p, n in zip(prompts, limits, strict=True)), self._length) - 1
        batch, who, answers = self._size(count), torch.arange(count), [[0]] * count
        position, hot = common, any(temperatures)
        while position < end:
            steps = min(LOOK, end - position)
            for _ in range(steps):
                self._step(batch, -(-(position + 1) // SPAN) * SPAN, hot)
                position += 1
            going = (~rows.done[: len(who)]).nonzero().squeeze(1)
            smaller = self._size(len(going))
            if position >= end or not len(going) or smaller < batch:
                _collect(rows, who, answers)
                if not len(going):
                    break
                rows.keep(going, position)
                rows.done[len(going) : batch] = True
                who, batch = who[going.cpu()], smaller
        return answers

    def _allocated(self) -> Rows:
        """The rows, made with the first batch. Raises InvalidOption where the memory does not suffice."""
        if self._rows is None:
            try:
                self._rows = Rows(self._target, self._batch, self._length)
            except torch.OutOfMemoryError as error:
                raise InvalidOption(
                    f"there is no memory for keys and values of {self._batch} answers of {self._length} tokens"
                    f" ({error}): lower data.batch or data.max_length",
                    param="batch",
                ) from error
            log.info("answers: %d rows of %d tokens, %.1f GiB of keys and values", self._batch, self._length,
                     self._rows.bytes / 2**30)  # fmt: skip
        return self._rows

    def _size(self, count: int) -> int:
        """Rows of a step for so many that go on."""
        size = self._batch
        while size // 2 >= max(count, LEAST):
            size //= 2
        return size

    def _begin(self, common: int, count: int) -> None:
        """Keys and values of the first `common` tokens of every prompt."""
        rows = self._rows
        assert rows is not None
        if not common:
            return
        most = max(1, PROMPT_ROWS // common)
        for first in range(0, count, most):
            some = min(most, count - first)
            place = PromptRows(rows, first, some, common, self._target)
            held: Any = Held(self._target.spec.dtype)
            self._target._forward(held, rows.tokens[first : first + some, :common].flatten(), place)

    def _step(self, batch: int, span: int, hot: bool) -> None:
        """All rows one token further."""
        if not self._uses_graphs:
            self._compute(batch, span, hot)
            return
        key = (batch, span if hot else -span)
        if key not in self._graphs:
            self._graphs[key] = self._capture(batch, span, hot)
        self._graphs[key].replay()

    def _capture(self, batch: int, span: int, hot: bool) -> Recorded[None]:
        """A step as a graph. The steps that compile its kernels are undone: they wrote a token and its keys, which the
        real step writes again.
        """
        rows = self._rows
        assert rows is not None
        began, drawn = time.monotonic(), torch.cuda.get_rng_state()
        moved = (rows.tokens, rows.lengths, rows.done, rows.position)
        saved = [tensor.clone() for tensor in moved]
        with aside():
            for _ in range(2):
                self._compute(batch, span, hot)
                for tensor, value in zip(moved, saved, strict=True):
                    tensor.copy_(value)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = Recorded(lambda: self._compute(batch, span, hot), self._pool)
        torch.cuda.set_rng_state(drawn)
        log.info("a step of %d rows and %d keys is a graph, made in %.2f s", batch, span, time.monotonic() - began)
        return graph

    def _compute(self, batch: int, span: int, hot: bool) -> None:
        rows, target = self._rows, self._target
        assert rows is not None
        at = rows.position + 1
        ids = rows.tokens[:batch].index_select(1, rows.position).squeeze(1)
        held: Any = Held(target.spec.dtype)
        hidden, _ = target._forward(held, ids, StepPlace(rows, batch, span, target))
        logits = target.lm_head(hidden).float()
        chosen = logits.argmax(-1)
        if hot:  # argmax of p / e with exponential e is a draw from p
            heat = rows.heat[:batch]
            noise = torch.empty_like(logits).exponential_().log_()
            drawn = (logits / heat.clamp(min=1e-6) - noise).argmax(-1)
            chosen = torch.where(heat[:, 0] > 0, drawn, chosen)
        done, prompts = rows.done[:batch], rows.prompts[:batch]
        given = (at < prompts) | done
        new = torch.where(given, rows.tokens[:batch].index_select(1, at).squeeze(1), chosen)
        rows.tokens[:batch].index_copy_(1, at, new.unsqueeze(1))
        rows.lengths[:batch] = torch.where(given, rows.lengths[:batch], at + 1)
        ended = (new.unsqueeze(1) == self._ends).any(1) | (at + 1 >= rows.stops[:batch])
        rows.done[:batch] = done | (~given & ended)
        rows.position += 1


def _collect(rows: Rows, who: Tensor, answers: list[list[int]]) -> None:
    """Write down what the rows of the sequences `who` have so far."""
    count = len(who)
    tokens, prompts, lengths = (t[:count].cpu() for t in (rows.tokens, rows.prompts, rows.lengths))
    for row, index in enumerate(who.tolist()):
        answers[index] = tokens[row, int(prompts[row]) : int(lengths[row])].tolist()
