"""The accepted path's keys and values, moved in one launch, against KVCache.commit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.kernels.commit import commit
from ddtree.layers import KVCache

WIDTH, LENGTH = 12, 30
steps = st.lists(st.integers(1, 4), max_size=6)


def path_of(jumps: list[int]) -> list[int]:
    rows = [0]
    for jump in jumps:
        rows.append(min(rows[-1] + jump, WIDTH - 1))
    return sorted(set(rows))


def check(device, paths: list[list[int]], positions: list[int], dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    batch = len(paths)
    cache = KVCache.allocate(2, batch + 1, LENGTH, 1, dim, dtype, device)
    cache.data.copy_(torch.randn(cache.data.shape))
    cache.data[:, 0] = float("nan")  # nobody's slot
    slots = list(range(batch, 0, -1))
    path = torch.full((batch, 9), -1, dtype=torch.int64, device=device)[:, :7]  # not dense
    for b, rows in enumerate(paths):
        path[b, : len(rows)] = torch.tensor(rows)
    position = torch.tensor(positions, device=device)
    expected = KVCache(cache.data.clone())
    expected.view(slots).commit(path, position)
    commit(cache.data, torch.tensor(slots, device=device), path, position)
    torch.testing.assert_close(cache.data, expected.data, atol=0, rtol=0, equal_nan=True)


@settings(deadline=None, max_examples=15)
@given(jumps=st.lists(steps, min_size=1, max_size=3), offset=st.integers(0, LENGTH - WIDTH))
def test_equals_cache(device, jumps, offset):
    check(device, [path_of(j) for j in jumps], [max(0, offset - b) for b in range(len(jumps))], 64, torch.float32)


@pytest.mark.parametrize(("dim", "dtype"), [(96, torch.float16), (128, torch.bfloat16)])
def test_overlap(device, dim, dtype):
    """Every row moves by one, onto the row that is read for the one before it; another sequence keeps its rows."""
    check(device, [[0, 2, 3, 4, 5, 6, 7], [0, 1, 2]], [5, 0], dim, dtype)


def test_refuses_strides(device):
    cache = KVCache.allocate(1, 1, 8, 1, 64, torch.float32, device)
    path = torch.zeros(1, 2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="dense"):
        commit(cache.data.transpose(2, 3), path[0, :1], path, path[0, :1])
