"""What a pairwise head is fitted to: a target and a drafter that learn nothing, and what they say of a batch."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree.errors import InvalidOption
from ddtree.target import Target
from ddtree.training import batches
from ddtree.training.attention import Blocks, flex_works
from ddtree.training.config import TrainConfig
from ddtree.training.model import DraftModel
from ddtree.training.schedule import precision
from ddtree.training.teacher import Teacher


@dataclass(frozen=True)
class Rows:
    """What the frozen drafter says at the slots of a batch that have a label: n of them, C candidates each."""

    hidden: Tensor  # [n, H] float32
    previous: Tensor  # [n, 1] int64, the true token before
    tokens: Tensor  # [n, C] int64, best first
    log_q: Tensor  # [n, C] float32
    place: Tensor  # [n] int64: of the true token among the candidates; C where it is none
    weights: Tensor  # [n, len(counts)] float32: by depth, 0 where a tree of so many candidates cannot be


class Frozen:
    """Target and drafter, which learn nothing here."""

    def __init__(self, config: TrainConfig, target: Target, model: DraftModel, longest: int, ids: Tensor) -> None:
        """longest: tokens of a sequence; ids: [W] int64 on the device, the tokens that are drafted."""
        p, device, self.model, self.ids = config.pairwise, target.spec.device, model, ids
        self.counts = tuple(sorted(min(count, len(ids)) for count in p.candidates))
        self.precision = precision(config.fit.precision, device)
        self.teacher = Teacher(target, model.config.target_layer_ids, longest)
        self.head = self.teacher.head(self.precision)[ids]
        self.length, self.loss_rows = batches.rounded(longest), config.fit.loss_rows
        self.flex, self.why_not = False, None
        if config.fit.attention != "sdpa":
            self.why_not = flex_works(model.config, device, self.precision, self.length, p.anchors, p.batch)
            self.flex = self.why_not is None
            if config.fit.attention == "flex" and not self.flex:
                raise InvalidOption(
                    f"fit.attention flex does not work here ({self.why_not}): use auto or sdpa", param="attention"
                )

    @torch.no_grad()
    def rows(self, batch: batches.Batch) -> Rows:
        """One forward of both; batch: on the device."""
        config, device, most = self.model.config, self.teacher.device, self.counts[-1]
        length = self.length if self.flex else batch.length
        features, _ = self.teacher.features(batch.sequences, length)
        embedded = self.teacher.embed(batch.block_ids(config.block_size, config.mask_token_id))
        blocks = Blocks(config, batch.anchors, length, self.flex)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.precision is torch.bfloat16):
            drafted = self.model(embedded, features.to(self.precision), blocks)
        hidden = drafted.flatten(0, 2)[batch.kept].float()
        parts = [self._candidates(part, most) for part in hidden.split(self.loss_rows)]
        tokens, log_q = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        labels = batch.labels.flatten()[batch.kept]
        same = tokens == labels.unsqueeze(1)
        place = torch.where(same.any(1), same.int().argmax(1), most)
        before = torch.cat([batch.roots.unsqueeze(2), batch.labels[..., :-1]], 2).flatten()[batch.kept]
        return Rows(hidden, before.unsqueeze(1), tokens, log_q, place, self._weights(batch, place))

    def _candidates(self, hidden: Tensor, most: int) -> tuple[Tensor, Tensor]:
        logits = self.model.logits(hidden, self.head)
        values, columns = logits.topk(most, -1)
        return self.ids[columns], values - logits.logsumexp(-1, keepdim=True)

    def _weights(self, batch: batches.Batch, place: Tensor) -> Tensor:
        """A slot counts where all true tokens before it are candidates: a tree comes nowhere else.

        The first depth, whose marginal knows the token before it, does not count.
        """
        grid = torch.full_like(batch.labels, self.counts[-1]).flatten().index_copy_(0, batch.kept, place)
        found = []
        for count in self.counts:
            reached = (grid.view_as(batch.labels) < count).cumprod(2)[..., :-1]
            found.append(F.pad(reached, (1, 0)) * batch.weights)
        return torch.stack(found, -1).flatten(0, 2)[batch.kept]
