"""What SGLang's own triton attention reads of a tree's mask, by Triton's interpreter: that is laid, or refused."""

import warnings
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from ddtree.sglang import rows as lay
from ddtree.tree import RoundState

pytestmark = pytest.mark.filterwarnings("ignore")  # those of SGLang's kernels, which the interpreter makes errors of
PREFIX, HEAD, PARENTS = 40, 16, [-1, 0, 0, 1, 1, 3]
ROWS = len(PARENTS)


@pytest.fixture(scope="module")
def kernels() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = import_module("sglang.kernels.ops.attention.extend_attention")
    with pytest.MonkeyPatch.context() as patch:  # it asks the GPU for them
        patch.setattr(module, "_get_block_sizes_for_extend_attention", lambda *_: (16, 0, 16, 16, 16, 4))
        yield module


class Case:
    """One request: a cached prefix, a tree behind it, and what it must see."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.query, key, value = (torch.randn(ROWS, 1, HEAD, generator=generator) for _ in range(3))
        self.keys, self.values = (torch.randn(64, 1, HEAD, generator=generator) for _ in range(2))
        self.keys[PREFIX : PREFIX + ROWS], self.values[PREFIX : PREFIX + ROWS] = key, value
        state = RoundState.allocate(1, ROWS, 3)
        for row, parent in enumerate(PARENTS):
            state.parents[0, row] = parent
            state.depths[0, row] = 0 if parent < 0 else int(state.depths[0, parent]) + 1
            state.ancestors[0, row] = (0 if parent < 0 else state.ancestors[0, parent]) | 1 << row
        state.width = ROWS
        self.rows, self.depths = state.rows, state.depths[0]
        self.starts = torch.tensor([0, ROWS], dtype=torch.int32)

    def mask(self, prefix: bool) -> Tensor:
        """As a round lays it, over what an earlier one left."""
        mask = torch.zeros(ROWS * (PREFIX + ROWS), dtype=torch.uint8)
        lay.lay(self.rows, torch.tensor([PREFIX]), mask, lay.Links.allocate(1, ROWS, "cpu"), prefix=prefix)
        return mask

    def wanted(self, window: int | None = None) -> Tensor:
        """[N, D]: every row over the prefix and its own path; window: tokens before its own position."""
        bits = (self.rows.ancestors[0] >> torch.arange(ROWS)) & 1
        sees = torch.cat([torch.ones(ROWS, PREFIX), bits], 1) != 0
        at = PREFIX + self.depths
        if window is not None:
            sees &= at.unsqueeze(1) <= torch.cat([torch.arange(PREFIX), at]) + window
        end = PREFIX + ROWS
        scores = self.query[:, 0] @ self.keys[:end, 0].T / HEAD**0.5
        return scores.masked_fill(~sees, -torch.inf).softmax(-1) @ self.values[:end, 0]


def verified(kernels: Any, case: Case, window: int | None = None) -> Tensor:
    """By the kernel of any inference but deterministic one."""
    start = 0 if window is None else PREFIX - window
    out, new = torch.zeros(ROWS, 1, HEAD), slice(PREFIX, PREFIX + ROWS)
    kernels.extend_attention_fwd(
        case.query, case.keys[new].clone(), case.values[new].clone(), out, case.keys, case.values, case.starts,
        torch.tensor([0, PREFIX - start], dtype=torch.int32), torch.arange(start, PREFIX), case.mask(False), True,
        torch.tensor([0, ROWS * (PREFIX + ROWS)]), ROWS, 1.0, 1.0,
        sliding_window_size=window or -1, window_kv_offsets=torch.tensor([start], dtype=torch.int32),
    )  # fmt: skip
    return out[:, 0]


def test_rows_alone_are_read(kernels: Any) -> None:
    case = Case()
    torch.testing.assert_close(verified(kernels, case), case.wanted())


@pytest.mark.parametrize("prefix", [True, False])
def test_deterministic_inference_reads_the_prefix_too(kernels: Any, prefix: bool) -> None:
    case, out, end = Case(), torch.zeros(ROWS, 1, HEAD), PREFIX + ROWS
    kernels.extend_attention_fwd_unified(
        case.query, out, case.keys, case.values, 1.0, 1.0, case.starts, torch.tensor([0, end], dtype=torch.int32),
        torch.arange(end), torch.tensor([PREFIX], dtype=torch.int32), ROWS,
        custom_mask=case.mask(prefix), mask_indptr=torch.tensor([0, ROWS * end]),
    )  # fmt: skip
    assert torch.allclose(out[:, 0], case.wanted(), atol=1e-5) == prefix


def test_windows_are_cut_off_by_a_rows_index(kernels: Any) -> None:
    """Which is why such targets are refused: only rows whose index is their depth are right."""
    case = Case()
    off = (verified(kernels, case, 20) - case.wanted(20)).abs().amax(-1)
    assert ((off > 1e-3) == (torch.arange(ROWS) != case.depths)).all()
