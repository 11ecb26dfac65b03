"""The drafter's head: the target's own, read for the best few tokens of every depth. Runs in the draft graph."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddtree.errors import UnsupportedModel
from ddtree.kernels.select import select
from ddtree.tree import Proposal


@dataclass(frozen=True, kw_only=True)
class Drafted(Proposal):
    """The candidates of B requests, and the drafter's last hidden states, which they were read from."""

    states: Tensor  # [B, D, H]


class TopKHead:
    """Stands in for SGLang's greedy draft sampler: it is called with the block's hidden states, and fills buffers.

    With tensor parallelism every rank reads its own part of the vocabulary and all see the same candidates.
    """

    def __init__(self, lm_head: Any, group: Any, block: int, ranks: int, batch: int) -> None:
        """For up to `batch` requests. lm_head: the target's; group: SGLang's tensor-parallel group.

        Raises UnsupportedModel for heads that a product with plain weights does not replace.
        """
        self.weight, self.first = plain_weight(lm_head, group.world_size)
        self.group, self.block, self.ranks = group, block, min(ranks, self.weight.shape[0])
        device, depths = self.weight.device, batch * (block - 1)
        self.log_q = torch.empty((depths, self.ranks), dtype=torch.float32, device=device)
        self.tokens = torch.zeros((depths, self.ranks), dtype=torch.int64, device=device)
        self.states = torch.zeros((depths, self.weight.shape[1]), dtype=self.weight.dtype, device=device)

    @property
    def batch(self) -> int:
        """The most requests that the buffers hold."""
        return self.log_q.shape[0] // (self.block - 1)

    def __call__(self, hidden: Tensor, input_ids: Tensor | None = None) -> None:
        """hidden: [B * block, H], the block's first row of each request is the root's. input_ids: SGLang's, unused."""
        blocks = hidden.view(-1, self.block, hidden.shape[-1])
        rows = blocks.shape[0] * (self.block - 1)
        states = self.states[:rows]
        states.view(-1, self.block - 1, states.shape[1]).copy_(blocks[:, 1:])
        found = select(states @ self.weight.T, self.ranks)
        if self.group.world_size == 1:
            self.log_q[:rows].copy_(found.log_q)
            self.tokens[:rows].copy_(found.ids)
            return
        values = self._gathered(found.values)  # [ranks of the group, rows, K]
        ids = self._gathered(found.ids + self.first)
        norm = self._gathered(found.norm).logsumexp(0)  # [rows]
        values, ids = values.transpose(0, 1).flatten(1), ids.transpose(0, 1).flatten(1)
        best, place = values.topk(self.ranks, -1)
        self.log_q[:rows].copy_((best - norm[:, None]).clamp_(max=0.0))
        self.tokens[:rows].copy_(ids.gather(1, place))

    def read(self, batch: int) -> Drafted:
        """What the last call found."""
        depths = self.block - 1
        log_q, tokens, states = (
            part[: batch * depths].view(batch, depths, -1) for part in (self.log_q, self.tokens, self.states)
        )
        return Drafted(tokens=tokens, log_q=log_q, states=states)

    def _gathered(self, part: Tensor) -> Tensor:
        whole = part.new_empty((self.group.world_size * part.shape[0], *part.shape[1:]))
        self.group.all_gather_into_tensor(whole, part.contiguous())
        return whole.view(self.group.world_size, *part.shape)


def plain_weight(lm_head: Any, world: int) -> tuple[Tensor, int]:
    """This rank's rows of the vocabulary [V, H], and the token of the first.

    lm_head: the target's; world: ranks of the tensor-parallel group. Raises UnsupportedModel for what has no such rows.
    """
    weight = getattr(lm_head, "weight", None)
    if weight is None or not torch.is_floating_point(weight) or weight.element_size() < 2:
        method = type(getattr(lm_head, "quant_method", None)).__name__
        kind = "has no weight" if weight is None else f"is in {str(weight.dtype).removeprefix('torch.')}"
        raise UnsupportedModel(
            f"DDTREE reads the drafter's candidates by the target's lm_head in 16 or 32 bits; this one {kind} "
            f"({method}): take a checkpoint whose lm_head is not quantised. The other layers may be"
        )
    shard = getattr(lm_head, "shard_indices", None)
    if shard is None:
        if world != 1:
            raise UnsupportedModel(
                "DDTREE with tensor parallelism needs an lm_head that says which tokens a rank has, and this target's "
                "does not: use one GPU (--tp-size 1)"
            )
        return weight, 0
    if int(shard.num_added_elements):
        raise UnsupportedModel(
            "DDTREE does not know added vocabulary in the target's lm_head: use --speculative-ddtree-mode linear, or a "
            "checkpoint without it"
        )
    return weight[: int(shard.num_org_elements)], int(shard.org_vocab_start_index)
