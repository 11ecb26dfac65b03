"""KVCache: what is written is read, and a commit keeps the rows of a path."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ddtree.layers import KVCache

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
LAYERS, KV, DIM, SLOTS = 2, 2, 4, 20


def new(batch: int, dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache.allocate(LAYERS, batch, SLOTS, KV, DIM, dtype, CPU)


def random_heads(batch: int, rows: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, rows, 2 * KV, DIM, generator=torch.Generator().manual_seed(seed))


def test_a_new_cache_is_zero() -> None:
    """A masked NaN in memory never written would poison attention."""
    cache = new(3)
    assert cache.length == SLOTS
    assert cache.data.shape == (LAYERS, 3, 2 * KV, SLOTS, DIM)
    assert not cache.data.any()


@pytest.mark.parametrize("start", [[0], [6], [3, 0, 11]])
def test_what_is_written_is_read(start: list[int]) -> None:
    cache = new(len(start))
    heads = [random_heads(len(start), 5, layer) for layer in range(LAYERS)]
    segments = cache.segments(start, [5] * len(start))
    for layer in range(LAYERS):
        cache.write(layer, segments, heads[layer].flatten(0, 1))
    for layer in range(LAYERS):
        for b, first in enumerate(start):
            keys, values = cache.read(layer, segments[b])
            assert keys.shape == values.shape == (1, KV, first + 5, DIM)
            assert torch.equal(keys[0, :, first:], heads[layer][b, :, :KV].transpose(0, 1))
            assert torch.equal(values[0, :, first:], heads[layer][b, :, KV:].transpose(0, 1))
            assert not cache.data[layer, b, :, :first].any()
            assert not cache.data[layer, b, :, first + 5 :].any()


@pytest.mark.parametrize("batch", [1, 2])
def test_rows_are_rounded_to_the_dtype_of_the_cache(batch: int) -> None:
    cache, heads = new(batch, torch.bfloat16), random_heads(batch, 3)
    cache.write(1, cache.segments([4] * batch, [3] * batch), heads.flatten(0, 1))
    assert torch.equal(cache.data[1, :, :, 4:7].transpose(1, 2), heads.bfloat16())


def test_a_view_shares_the_memory() -> None:
    cache, heads = new(3), random_heads(1, 4)
    one = cache.view([1])
    assert one.slots == (1,)
    segments = one.segments([2], [4])
    one.write(0, segments, heads[0])
    assert torch.equal(cache.data[0, 1, :, 2:6].transpose(0, 1), heads[0])
    assert not cache.data[:, 0].any()
    assert not cache.data[:, 2].any()
    keys, _ = one.read(0, segments[0])
    assert keys.data_ptr() == cache.data[0, 1].data_ptr()
    assert cache.view([2, 0, 1]).view([1, 0]).slots == (0, 2)


def test_rows_of_several_sizes_lie_one_sequence_after_another() -> None:
    cache, heads = new(3), random_heads(1, 6)[0]
    segments = cache.view([2, 0]).segments([4, 9], [2, 4])
    cache.write(1, segments, heads)
    assert [s.rows for s in segments] == [slice(0, 2), slice(2, 6)]
    assert torch.equal(cache.data[1, 2, :, 4:6].transpose(0, 1), heads[:2])
    assert torch.equal(cache.data[1, 0, :, 9:13].transpose(0, 1), heads[2:])
    assert not cache.data[:, 1].any()


def test_a_copy_gives_the_beginning_of_one_slot_to_another() -> None:
    cache = new(3)
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(1)))
    before = cache.data.clone()
    cache.copy(2, 0, 7)
    assert torch.equal(cache.data[:, 0, :, :7], before[:, 2, :, :7])
    assert torch.equal(cache.data[:, 0, :, 7:], before[:, 0, :, 7:])
    assert torch.equal(cache.data[:, 1:], before[:, 1:])


def test_memory_is_taken_as_it_is_written() -> None:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("no /proc here")  # resident memory is read from Linux's files

    def resident() -> int:
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    cache = KVCache.allocate(4, 8, 2**15, 2, 64, torch.float32, CPU)  # 1 GiB
    cache.data[:, 3, :, :64] = 1
    assert resident() - before < 2**26


def commit_by_hand(data: Tensor, path: list[list[int]], position: list[int]) -> tuple[Tensor, Tensor]:
    """The data after a commit, and which slots it fixes: all but the scratch behind the kept rows."""
    after, fixed = data.clone(), torch.zeros(len(path), SLOTS, dtype=torch.bool)
    for b, rows in enumerate(path):
        kept = [row for row in rows if row >= 0]
        for order, row in enumerate(kept):
            after[:, b, :, position[b] + order] = data[:, b, :, position[b] + row]
        fixed[b, : position[b] + len(kept)] = True
    return after, fixed


COMMITS = [
    ([[0, -1, -1]], [5]),  # the root alone
    ([[0, 1, 2, 3]], [5]),  # a chain
    ([[0, 2, 5, 6]], [0]),
    ([[0, 1, 4, -1, -1]], [7]),
    ([[0, 3]], [13]),
    ([[0, 3, *[-1] * 9]], [14]),  # a path's padding may reach past the end of the cache
    ([[0, 6, -1], [0, 1, 2], [0, 2, 4], [-1, -1, -1]], [3, 12, 0, 8]),
    ([[0, 1, -1], [0, -1, -1]], [3, 12]),
    ([[-1, -1]], [4]),  # a finished sequence
]


@pytest.mark.parametrize(("path", "position"), COMMITS)
def test_commit_moves_the_rows_of_a_path(path: list[list[int]], position: list[int]) -> None:
    cache = new(len(path))
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(1)))
    expected, fixed = commit_by_hand(cache.data, path, position)
    cache.commit(torch.tensor(path), torch.tensor(position))
    assert torch.equal(cache.data.transpose(2, 3)[:, fixed], expected.transpose(2, 3)[:, fixed])


def test_commit_of_one_sequence_leaves_its_neighbours() -> None:
    whole = new(2)
    whole.data.copy_(torch.randn(whole.data.shape, generator=torch.Generator().manual_seed(1)))
    before = whole.data.clone()
    whole.view([1]).commit(torch.tensor([[0, 2, 4]]), torch.tensor([3]))
    assert torch.equal(whole.data[:, 0], before[:, 0])
    assert torch.equal(whole.data[:, 1, :, 5], before[:, 1, :, 7])
