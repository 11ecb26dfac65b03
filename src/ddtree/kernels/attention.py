"""Attention of a forward's rows to the committed context and to their own path, for CUDA.

The GPU's twin of `ddtree.layers.attend_segments` with `attention_mask`. Keys are read in tiles at fixed absolute
positions, split over programs in chunks at fixed absolute positions (`chunk_bounds`), and merged in a fixed order: by
the last program of a sequence and key head where a forward has few rows, else by a second launch.

Row-invariant form (the default for trees): a row's last 64 to 127 keys, its tail, are gathered in the order of its path
into a state of their own; all before them is committed and in chunks. Where the tail begins depends on the row's
position alone, so a row's result is equal to the last bit in `ar`, on a chain, in a tree and in a batch. The plain form
reads the tree's rows where they lie, masked by the ancestor bits.
"""

from dataclasses import dataclass
from math import e, log2, prod, sqrt

import torch
from torch import Tensor

from ddtree.kernels.backend import jit, overlap, power_of_two

DEEPEST = 64  # a row of the row-invariant form has at most 63 ancestors among the rows
_INVARIANT, _TREE, _BLOCK, _CAUSAL = range(4)
_SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}  # others: 99


@dataclass(frozen=True)
class AttentionRows:
    """Where the rows of a forward stand; the same for all its layers. All tensors are on the cache's device."""

    slot: Tensor  # [B] int64: the sequence's place in the cache
    start: Tensor  # [B] int64: committed length; the rows' keys and values lie at start .. start + N - 1
    depths: Tensor | None = None  # [B, N] int64: position = start + depth; None: a block, whose row i has depth i
    ancestors: Tensor | None = None  # [B, N, W] int64, see ddtree.tree.Rows; None: a block
    causal: bool = False  # a block's rows see the rows before them and themselves; else all of them


@dataclass(frozen=True)
class Tiles:
    """Shapes of the programs. A row's bits depend on them: use one choice for all forwards of a target."""

    rows: int  # packed query rows of a program
    keys: int  # keys of a tile
    warps: int
    stages: int
    merged: int = 2  # up to so many rows are merged by the launch that folds them; the bits are the same


@dataclass(frozen=True)
class AttentionWorkspace:
    """Preallocated memory of the attention of B sequences of N rows; layers run one after another and share it."""

    peak: Tensor  # [B, kv_heads, C + 1, N * groups] float32: largest score, of C chunks of keys and of the tail
    total: Tensor  # the same: sum of weights
    acc: Tensor  # [B, kv_heads, C + 1, N * groups, hd] float32: weighted values
    arrived: Tensor  # [B * kv_heads] int32: programs that are done; 0 between launches
    paths: Tensor  # [B, N, N] int32: the row at each depth of a row's path
    tiles: Tiles
    first_chunk: int
    invariant: bool

    @staticmethod
    def floats(query: Tensor, cache: Tensor, first_chunk: int = 128) -> int:
        """How many numbers of memory `allocate` lays its states into."""
        count = prod(_states(query, cache, first_chunk))
        return 2 * _aligned(count) + count * query.shape[3]

    @classmethod
    def allocate(
        cls,
        query: Tensor,
        cache: Tensor,
        tiles: Tiles | None = None,
        invariant: bool = True,
        first_chunk: int = 128,
        memory: Tensor | None = None,
    ) -> "AttentionWorkspace":
        """Memory for queries [B, N, heads, hd] like this one over a layer's cache [S, 2 * kv_heads, T, hd] like this.

        Args:
            tiles: None takes what suits the dtype, the head size and the device.
            invariant: rows of a tree get the same bits as in any other tree that holds their path.
            first_chunk: keys of the first chunks, whole tiles, see chunk_bounds; rows' bits depend on it.
            memory: [at least `floats`] float32 that others may use in between: nothing in it outlives one layer's
                attention. None: its own.
        Raises ValueError for a first chunk that is not whole tiles.
        """
        batch, n, _, dim = query.shape
        kv, device = cache.shape[1] // 2, cache.device
        tiles = tiles or pick_tiles(query.dtype, dim, _shared_memory(device))
        if first_chunk < 1 or first_chunk % tiles.keys:
            raise ValueError(f"first_chunk {first_chunk} must be a multiple of the {tiles.keys} keys of a tile")
        if memory is None:
            memory = torch.empty(cls.floats(query, cache, first_chunk), device=device, dtype=torch.float32)
        states = _states(query, cache, first_chunk)
        count, behind = prod(states), _aligned(prod(states))
        return cls(
            peak=memory[:count].view(states),
            total=memory[behind : behind + count].view(states),
            acc=memory[2 * behind : 2 * behind + count * dim].view(*states, dim),
            arrived=torch.zeros(batch * kv, device=device, dtype=torch.int32),
            paths=torch.zeros(batch, n, n, device=device, dtype=torch.int32),
            tiles=tiles,
            first_chunk=first_chunk,
            invariant=invariant,
        )


def _states(query: Tensor, cache: Tensor, first_chunk: int) -> tuple[int, int, int, int]:
    """The shape of AttentionWorkspace.peak."""
    batch, n, heads, _ = query.shape
    kv = cache.shape[1] // 2
    return batch, kv, len(chunk_bounds(cache.shape[2], first_chunk)), n * (heads // kv)


def _aligned(count: int) -> int:
    """Numbers of float32 up to the next edge of 256 bytes, where allocations of their own would begin too."""
    return -(-count // 64) * 64


def chunk_bounds(length: int, first: int = 128) -> list[int]:
    """Edges of the chunks that cover `length` positions: 16 of `first` keys, then 8 to every doubling of the context.

    A short context needs many small chunks to fill the card; a long one would drown in the states of as many. The
    edges do not depend on the context's length, so neither does the result of a row.
    """
    edges, size = [0], first
    while edges[-1] < length:
        if edges[-1] == 16 * size:
            size *= 2
        edges.append(edges[-1] + size)
    return edges


def pick_tiles(dtype: torch.dtype, head_dim: int, shared_memory: int) -> Tiles:
    """Tiles that fit the shared memory (bytes) of a program on the card.

    64 rows suit wgmma; float32 has no matrix unit of its own precision, so its tiles are small. With three stages
    both tiles of a small chunk are fetched at once.
    """
    padded = padded_dim(head_dim)
    if dtype == torch.float32:
        return Tiles(rows=16, keys=32, warps=4, stages=2 if padded < 256 else 1)
    keys = 64 if padded < 256 else 32
    pair = 2 * keys * padded * dtype.itemsize  # one tile of keys and of values
    rest = 64 * (padded + keys) * dtype.itemsize + 4096  # the queries, the weights, reductions
    return Tiles(rows=64, keys=keys, warps=4, stages=max(1, min(3, (shared_memory - rest) // pair)))


def locate(rows: AttentionRows, work: AttentionWorkspace) -> None:
    """Once per forward, before its first layer: write the rows' paths for the row-invariant form."""
    if not work.invariant or rows.ancestors is None or rows.depths is None:
        return
    batch, n, _ = rows.ancestors.shape
    bits, depths = _dense(rows.ancestors, "ancestors"), _dense(rows.depths, "depths")
    jit("attention").paths_kernel[(n, batch)](
        bits, depths, work.paths, n, depths.stride(0), bits.stride(0), bits.stride(1),
        NP=power_of_two(n), num_warps=1 if n <= 64 else 4, **overlap(bits.device),
    )  # fmt: skip


def tree_attention(
    query: Tensor,
    cache: Tensor,
    rows: AttentionRows,
    work: AttentionWorkspace,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Scaled dot-product attention of all rows of a forward in one layer; `locate` must have been called.

    Args:
        query: [B, N, heads, hd], dense, float16, bfloat16 or float32.
        cache: [S, 2 * kv_heads, T, hd], dense, the same dtype: one layer of KVCache.data, the rows already written.
        work: made for these shapes. Depths of trees are below DEEPEST.
        window: rows see only positions less than this far away (in a block, position = place).
        out: [B * N, heads * hd], written and returned; None allocates it.
    Equal to `attend_segments` of the same rows up to rounding. Padding rows (ancestors: themselves alone) are computed
    too. Memory past start + N is never read; in the row-invariant form nor are rows off a row's path, while in the
    plain form a NaN in a row's values reaches all rows of its sequence.
    Raises ValueError for shapes, dtypes or strides that do not fit.
    """
    mode = _mode(rows, work)
    batch, n, heads, dim = query.shape
    kv, tiles, chunks = cache.shape[1] // 2, work.tiles, work.peak.shape[2] - 1
    _check(query, cache, work)
    if out is None:
        out = torch.empty(batch * n, heads * dim, dtype=query.dtype, device=query.device)
    depths = _dense(rows.depths, "depths") if rows.depths is not None else rows.start.unsqueeze(1)
    bits = _dense(rows.ancestors, "ancestors") if rows.ancestors is not None else depths.unsqueeze(1)
    groups = heads // kv
    packed, blocks = power_of_two(groups), -(-n * groups // tiles.rows)
    whole = n <= tiles.merged and blocks == 1
    shape = {
        "G": groups, "GP": packed, "KV": kv, "HD": dim, "HDP": padded_dim(dim), "KEYS": tiles.keys, "DEEPEST": DEEPEST,
        "FIRST": work.first_chunk, "WINDOW": window or 0, "INSIDE": mode, "MERGE": merge_width(packed, dim),
    }  # fmt: skip
    kernels, launch = jit("attention"), {"enable_fp_fusion": False, **overlap(query.device)}
    kernels.attend_kernel[((n if mode == _INVARIANT else 0) + blocks * chunks, batch * kv)](
        query, cache, rows.slot, rows.start, depths, bits, work.paths, work.peak, work.total, work.acc, work.arrived,
        out, n, cache.shape[2], chunks, blocks, cache.shape[0], depths.stride(0), bits.stride(0), bits.stride(1),
        **shape, **launch, SCALE=log2(e) / sqrt(dim), ROWS=tiles.rows, TAIL_ROWS=max(16, packed),
        TAIL_KEYS=tail_keys(tiles), WHOLE=whole, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if not whole:
        kernels.merge_kernel[(n, kv, batch)](
            rows.start, depths, work.peak, work.total, work.acc, out, n, chunks, depths.stride(0),
            **shape, **launch, num_warps=tiles.warps,
        )  # fmt: skip
    return out


def padded_dim(head_dim: int) -> int:
    """Columns that a program holds of a head: what matrix units multiply has at least 16."""
    return max(16, power_of_two(head_dim))


def tail_keys(tiles: Tiles) -> int:
    """Keys of a tail's tile: the whole tail at once where keys are short."""
    return 128 if tiles.keys == 64 else tiles.keys


def merge_width(packed: int, head_dim: int) -> int:
    """States merged at once, so that a program holds at most 16,384 numbers of them."""
    return max(1, min(32, 16384 // (packed * padded_dim(head_dim))))


def _mode(rows: AttentionRows, work: AttentionWorkspace) -> int:
    if rows.ancestors is None:
        return _CAUSAL if rows.causal else _BLOCK
    if rows.depths is None:
        raise ValueError("rows with ancestors need their depths")
    return _INVARIANT if work.invariant else _TREE


def _check(query: Tensor, cache: Tensor, work: AttentionWorkspace) -> None:
    batch, n, heads, dim = query.shape
    kv, length = cache.shape[1] // 2, cache.shape[2]
    if query.dtype != cache.dtype or query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"query {query.dtype} and cache {cache.dtype} must be one of float16, bfloat16, float32")
    if not (query.is_contiguous() and cache.is_contiguous()):
        raise ValueError("query and cache must be dense")
    if cache.shape[3] != dim or heads % kv or heads // kv > work.tiles.rows:
        raise ValueError(f"{heads} query heads of {dim} do not fit {kv} key heads of {cache.shape[3]}")
    if work.acc.shape != (batch, kv, work.peak.shape[2], n * (heads // kv), dim) or work.paths.shape[1] != n:
        raise ValueError(f"the workspace {tuple(work.acc.shape)} was not made for queries {tuple(query.shape)}")
    if len(chunk_bounds(length, work.first_chunk)) != work.peak.shape[2]:
        raise ValueError(f"the workspace was not made for a cache of {length} positions")


def _dense(tensor: Tensor, name: str) -> Tensor:
    if tensor.stride(-1) != 1 or tensor.dtype != torch.int64:
        raise ValueError(f"{name} must be int64 and dense in its last dimension")
    return tensor


def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may take.

    Source: CUDA C++ Programming Guide, table of compute capabilities.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return _SHARED_KIB.get(capability, 99) * 1024
