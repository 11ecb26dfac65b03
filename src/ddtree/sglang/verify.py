"""What the target verifies: a tree of fixed width, as SGLang's attention backends take it."""

from typing import Any

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from torch import Tensor


class TreeVerifyInput(EagleVerifyInput):  # type: ignore[misc]
    """An irregular tree: its depth and branching are no product of EAGLE's steps."""

    depth = 0
    kv_loc_cols = None  # 0.5.23 asks: these are all the rows that the round writes

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
