"""What the target verifies: a tree of fixed width, as SGLang's attention backends take it."""

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from torch import Tensor


class TreeVerifyInput(EagleVerifyInput):  # type: ignore[misc]
    """An irregular tree: its depth and branching are no product of EAGLE's steps."""

    depth = 0

    @property
    def max_tree_depth(self) -> int:
        """Rows of the longest path, the root included."""
        return self.depth + 1

    @property
    def tree_topk(self) -> int:
        """-1: no fixed branching."""
        return -1

    @classmethod
    def of(cls, width: int, depth: int, mask: Tensor | None, **tensors: Any) -> "TreeVerifyInput":
        """tensors: draft_token, positions, retrieve_index, retrieve_next_token, retrieve_next_sibling; or none."""
        names = ("draft_token", "positions", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
        made = cls(
            **{name: tensors.get(name) for name in names},
            custom_mask=mask,
            retrieve_cum_len=None,
            spec_steps=depth,
            topk=2,  # any number above 1: backends then read the mask and the links
            draft_token_num=width,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=None,
            seq_lens_cpu=None,
        )
        made.depth = depth
        return made

    @classmethod
    def dummy(cls, width: int, mask: Tensor | None) -> "TreeVerifyInput":
        """For the capture of graphs."""
        return cls.of(width, 1, mask)


class MaskRoom:
    """Where a round's mask is written: the backend's own graph buffer where it has one, else a buffer of ours."""

    def __init__(self, backend: Any, context: int, width: int, prefix: bool) -> None:
        self.backend, self.context, self.width, self.prefix = backend, context, width, prefix
        self._own: Tensor | None = None

    def take(self, lengths: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """A uint8 buffer for these requests, and what the verify input carries. longest: sum of lengths, at most."""
        graph = None if self.prefix else getattr(self.backend, "verify_mask", None)
        if graph is not None and graph.fits(len(lengths)):
            # Every replay copies the carried mask into this very buffer: one element that is there already will do.
            buffer = graph.buffer.view(torch.uint8)
            return buffer, graph.buffer[:1]
        need = self.width * (longest + len(lengths) * self.width)
        if self._own is None or self._own.numel() < need:
            most = self.width * len(lengths) * (self.context + 2 * self.width)
            self._own = torch.ones(max(need, most), dtype=torch.uint8, device=lengths.device)
        return self._own, self._own[:need].view(torch.bool) if self.prefix else self._own
