"""The tensors that live from round to round, and the mask's buffer."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddtree.kernels import Plan, PlanRow
from ddtree.kernels.backend import power_of_two
from ddtree.sglang.rows import Block, Links
from ddtree.tree import RoundState, Rows

PACKING_BACKENDS = ("flashinfer",)  # pack a mask of their own from ours, that of the cached tokens too


@dataclass(frozen=True)
class View:
    """The room's part of a batch of B requests; made once for each B, since every slice costs the host time."""

    rows: Rows  # [B, N]
    member: Tensor  # [B, N] bool: rows that may be committed
    tree: Tensor  # [B, N] bool
    block: Block
    links: Links
    index: Tensor  # [B, N] int64: 0, 1, 2, ...
    shadows: Tensor  # [B] bool


class Room:
    """Tensors that live from round to round: they are read only by launches of the round that wrote them."""

    def __init__(self, worker: Any, size: int) -> None:
        runner, device = worker.model_runner, worker.device
        self.size = size = power_of_two(max(size, 16))
        self.width = width = worker.width
        self.state = RoundState.allocate(size, width, worker.depth, device)
        self.plan = Plan.allocate(size, device)
        self.planned = [worker.usual] * size  # what `plan` says, so that it is written only where that changes
        self.plan.write(self.planned, width)
        self.shadows = torch.full((size,), worker.usual.tree and worker.usual.chain, dtype=torch.bool, device=device)
        self.index = torch.arange(size * width, device=device).view(size, width)
        self.block = Block.allocate(size, worker.depth + 1, width, device)
        self.links = Links.allocate(size, width, device)
        self.commits = torch.zeros(1, dtype=torch.int64, device=device)  # see rows.stage
        # Deterministic inference has a triton kernel of its own, which reads the cached tokens' columns too.
        whole = worker.sglang.setting(runner.server_args, "enable_deterministic_inference")
        context, packs = runner.model_config.context_len, verifying(worker.sglang, runner) in PACKING_BACKENDS
        self.mask = MaskRoom(runner.attn_backend, context, width, packs or bool(whole), packs)
        self._views: dict[int, View] = {}

    def tell(self, plans: list[PlanRow], width: int) -> bool:
        """Write the plans of these requests, if they are not those of the last. Returns whether any is shadowed."""
        size = len(plans)
        if plans != self.planned[:size]:
            self.planned[:size] = plans
            self.plan.write(self.planned, width)
            self.shadows.copy_(torch.tensor([plan.tree and plan.chain for plan in self.planned]), non_blocking=True)
        return any(plan.tree and plan.chain for plan in plans)

    def view(self, size: int) -> View:
        """The part of the first `size` requests."""
        found = self._views.get(size)
        if found is None:
            state, width = self.state, self.width
            found = self._views[size] = View(
                Rows(state.tokens[:size], state.parents[:size], state.depths[:size], state.ancestors[:size]),
                state.member[:size, :width],
                state.tree[:size, :width],
                self.block.first(size),
                self.links.first(size),
                self.index[:size],
                self.shadows[:size],
            )
        return found


def verifying(release: Any, runner: Any) -> str:
    """The attention backend of verify forwards. release: the adapter; runner: SGLang's, of the target."""
    prefill, decode = release.attention_backends(runner)
    mode = release.setting(runner.server_args, "speculative_attention_mode")
    return str(decode if mode == "decode" else prefill)


class MaskRoom:
    """Where a round's mask is written: the backend's own graph buffer where it has one, else a buffer of ours.

    prefix: the cached tokens' columns are read too; packs: the backend's graphs read no mask that we could write.
    """

    def __init__(self, backend: Any, context: int, width: int, prefix: bool, packs: bool = False) -> None:
        self.backend, self.context, self.width, self.prefix, self.packs = backend, context, width, prefix, packs
        self._own: Tensor | None = None

    def graphs(self, size: int) -> Tensor | None:
        """The uint8 buffer that graphs of `size` requests read; None where there is none."""
        graph = None if self.packs else getattr(self.backend, "verify_mask", None)
        return graph.buffer.view(torch.uint8) if graph is not None and graph.fits(size) else None

    def take(self, lengths: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """A uint8 buffer for these requests, and what the verify input carries. longest: sum of lengths, at most."""
        graph = self.graphs(len(lengths))
        if graph is not None:
            # Every replay copies the carried mask into this very buffer: one element that is there already will do.
            return graph, self.backend.verify_mask.buffer[:1]
        need = self.width * (longest + len(lengths) * self.width)
        if self._own is None or self._own.numel() < need:
            most = self.width * len(lengths) * (self.context + 2 * self.width)
            self._own = torch.ones(max(need, min(2 * need, most)), dtype=torch.uint8, device=lengths.device)
        return self._own, self._own[:need].view(torch.bool) if self.prefix else self._own[:need]
