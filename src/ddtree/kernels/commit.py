"""Keep the accepted path's keys and values, in all layers, in one launch."""

from torch import Tensor

from ddtree.kernels.backend import jit, overlap, power_of_two


def commit(data: Tensor, slot: Tensor, path: Tensor, position: Tensor) -> None:
    """Move the rows on a path to the front, in order, from `position`. Equals `KVCache.commit`.

    Args:
        data: KVCache.data [L, S, 2 * kv_heads, T, hd], dense, any dtype.
        slot: [B] int64, the sequences' different places in the cache.
        path: [B, M] int64 rows of the last forward in ascending order, the root (row 0) first, -1 behind them.
        position: [B] int64, where row 0 lies.
    Rows that already lie where they belong are not touched. Raises ValueError for data that is not dense.
    """
    layers, slots, lines, length, dim = data.shape
    if not data.is_contiguous() or path.stride(1) != 1:
        raise ValueError("the cache and the path must be dense")
    batch, m = path.shape
    jit("commit").commit_kernel[(lines, layers, batch)](
        data, slot, path, position, m, length, slots, path.stride(0),
        LINES=lines, HD=dim, HDP=power_of_two(dim), MP=power_of_two(m), **overlap(data.device),
    )  # fmt: skip
