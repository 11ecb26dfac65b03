"""The memory of attention on a device: shapes that requests choose must not add up."""

import torch

from ddtree.layers import Heads, KVCache, Workspaces

HEADS = Heads(4, 2, 16)


def pieces(works: Workspaces) -> dict[int, int]:
    """Bytes of every piece of memory that states lie in, by its address."""
    made = works._made.values()
    storages = [part.untyped_storage() for work in made for part in (work.peak, work.total, work.acc)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def test_all_shapes_lie_in_one_piece_where_the_largest_comes_first():
    cache = KVCache.allocate(1, 5, 300, 2, 16, torch.float32, torch.device("cpu"))
    works = Workspaces()
    largest = works.get(4, 64, HEADS, cache)
    for batch in (1, 2, 4):
        for rows in range(1, 64):
            work = works.get(batch, rows, HEADS, cache)
            assert work.acc.shape == (batch, 2, largest.acc.shape[2], 2 * rows, 16)
            for part in (work.peak, work.total, work.acc):
                assert part.is_contiguous()
                assert part.storage_offset() % 64 == 0, "kernels are compiled for pointers that 16 divides"
            ends = [part.storage_offset() + part.numel() for part in (work.peak, work.total, work.acc)]
            assert ends[0] <= work.total.storage_offset()
            assert ends[1] <= work.acc.storage_offset()
            assert work is works.get(batch, rows, HEADS, cache)
    assert len(pieces(works)) == 1


def test_growing_shapes_take_less_than_four_times_the_largest():
    cache = KVCache.allocate(1, 5, 300, 2, 16, torch.float32, torch.device("cpu"))
    works = Workspaces()
    for rows in range(1, 65):
        works.get(4, rows, HEADS, cache)
    alone = Workspaces()
    alone.get(4, 64, HEADS, cache)
    assert sum(pieces(works).values()) < 4 * sum(pieces(alone).values())


def test_every_shape_has_counters_and_paths_of_its_own():
    """Those are read by what comes later: counters must be 0 between launches, paths are written once a forward."""
    cache = KVCache.allocate(1, 5, 300, 2, 16, torch.float32, torch.device("cpu"))
    works = Workspaces()
    one, other = works.get(2, 8, HEADS, cache), works.get(2, 4, HEADS, cache)
    for name in ("arrived", "paths"):
        assert getattr(one, name).data_ptr() != getattr(other, name).data_ptr()
    assert one.peak.data_ptr() == other.peak.data_ptr()
