# ruff: noqa: N803 - compile-time parameters are in capitals
# mypy: ignore-errors
"""Triton kernels of `ddtree.kernels.attention`. Import it only where triton is there.

Both kernels fold tiles of KEYS keys at fixed absolute positions into a state (peak, total, acc) by one function,
`_fold`, with the same tile shapes and the same number of warps, so that it does not matter which of them folds a tile.
Numbers that differ between rounds are never specialised: one binary serves every batch and every number of rows.
Multiplications and additions are not fused by the compiler (`enable_fp_fusion=False` at launch): it would choose place
by place.
"""

import triton
import triton.language as tl

_ROUND = ["n", "length", "chunks", "depths_b", "ancestors_b", "ancestors_n"]


@triton.jit(do_not_specialize=["n", "depths_b", "ancestors_b", "ancestors_n"])
def paths_kernel(ancestors, depths, paths, n, depths_b, ancestors_b, ancestors_n, NP: tl.constexpr):
    """paths[b, i, d] = the row at depth d on the path of row i. One program per row and sequence."""
    i, b = tl.program_id(0), tl.program_id(1)
    j = tl.arange(0, NP)
    word = tl.load(ancestors + b * ancestors_b + i * ancestors_n + j // 64, mask=j < n, other=0)
    on = (((word >> (j % 64)) & 1) != 0) & (j < n)
    depth = tl.load(depths + b * depths_b + j, mask=on, other=0)
    tl.store(paths + (b * n + i) * n + depth, j, mask=on & (depth < n))


@triton.jit
def _fold(query, key, value, seen, peak, total, acc, SCALE: tl.constexpr, MASKED: tl.constexpr):
    """One tile into the state: the largest score so far (log2 units), the sum of weights, the weighted values."""
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * SCALE
    if MASKED:
        score = tl.where(seen, score, float("-inf"))
    new = tl.maximum(peak, tl.max(score, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)  # a row that has seen nothing yet: -inf minus -inf would be NaN
    weight = tl.exp2(score - safe[:, None])
    alpha = tl.exp2(peak - safe)
    total = tl.fma(total, alpha, tl.sum(weight, 1))
    acc = tl.dot(weight.to(value.dtype), value, acc * alpha[:, None], input_precision="ieee")
    return new, total, acc


@triton.jit
def _load(base, place, ok, HD: tl.constexpr, HDP: tl.constexpr, MASKED: tl.constexpr):
    """[KEYS, HDP] of a head's keys or values; 0 where not ok, since 0 * NaN would poison the sum."""
    d = tl.arange(0, HDP)
    at = base + place[:, None] * HD + d[None, :]
    if MASKED:
        return tl.load(at, mask=ok[:, None] & (d < HD)[None, :], other=0.0)
    if HD < HDP:
        return tl.load(at, mask=(d < HD)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def _floor(value, step: tl.constexpr):
    """The largest multiple of step that is not above value, and not below 0."""
    return tl.maximum(value, 0) // step * step


@triton.jit
def _chunk_of(position, FIRST: tl.constexpr):
    """The chunk that holds a position: see chunk_bounds in ddtree.kernels.attention."""
    doubling = (tl.maximum(position // (16 * FIRST), 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    far = 16 + 8 * doubling + ((position // (2 * FIRST) >> doubling) - 8)
    return tl.where(position < 16 * FIRST, position // FIRST, far)


@triton.jit
def _edge(chunk, FIRST: tl.constexpr):
    """Where a chunk begins."""
    behind = tl.maximum(chunk - 16, 0)
    far = ((behind % 8 + 8) * (2 * FIRST)) << (behind // 8)
    return tl.where(chunk < 16, chunk * FIRST, far)


@triton.jit
def _visible(
    place, position, row, start, n, b, depths, ancestors, depths_b, ancestors_b, ancestors_n,
    KEYS: tl.constexpr, INSIDE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """[ROWS, KEYS]: which rows see the keys at these places, when some lie among the rows of the forward.

    INSIDE: 1 by ancestor bits, 2 all rows, 3 rows up to its own.
    """
    j = place - start  # [KEYS], the row of a key; negative: committed
    own = (j >= 0) & (j < n)
    at = place
    if INSIDE == 1:
        low = tl.maximum(tl.min(place, 0) - start, 0) // 64  # the rows of a tile lie in two words of bits at most
        words = ancestors + b * ancestors_b + row * ancestors_n + low
        low_bits = tl.load(words, mask=(row < n) & (low * 64 < n), other=0)
        high_bits = tl.load(words + 1, mask=(row < n) & (low * 64 + 64 < n), other=0)
        shift = (tl.maximum(j, 0) % 64)[None, :]
        word = tl.where((j >= low * 64 + 64)[None, :], high_bits[:, None], low_bits[:, None])
        inside = own[None, :] & (((word >> shift) & 1) != 0)
        if WINDOW:
            at = tl.where(own, start + tl.load(depths + b * depths_b + j, mask=own, other=0).to(tl.int32), place)
    elif INSIDE == 2:
        inside = own[None, :] & (row >= 0)[:, None]
    else:
        inside = own[None, :] & (j[None, :] <= row[:, None])
    seen = (j < 0)[None, :] | inside
    if WINDOW:
        seen = seen & (tl.abs(position[:, None] - at[None, :]) < WINDOW)
    return seen


@triton.jit(do_not_specialize=_ROUND)
def partial_kernel(
    query, cache, slots, starts, depths, ancestors, peak_out, total_out, acc_out,
    n, length, chunks, depths_b, ancestors_b, ancestors_n,
    SCALE: tl.constexpr, G: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, FIRST: tl.constexpr, WINDOW: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """The state of one chunk of keys for ROWS packed query rows (row * G + head of the group) of one key head.

    INSIDE 0: only tiles that are wholly committed; the rest is finish_kernel's. Otherwise all keys, see _visible.
    """
    block, b, head = tl.program_id(0), tl.program_id(1) // KV, tl.program_id(1) % KV
    chunk = chunks - 1 - tl.program_id(2)  # the largest chunks first
    start = tl.load(starts + b).to(tl.int32)
    begin, end = _edge(chunk, FIRST), _edge(chunk + 1, FIRST)
    committed = start // KEYS * KEYS
    last = committed if INSIDE == 0 else start + n
    if WINDOW:
        begin = tl.maximum(begin, _floor(start - WINDOW + 1, KEYS))  # no row stands before start
    end = tl.minimum(end, last)
    if begin < end:
        slot = tl.load(slots + b)
        keys = cache + (slot * (2 * KV) + head) * length * HD
        values = keys + tl.cast(length, tl.int64) * (KV * HD)
        r = block * ROWS + tl.arange(0, ROWS)
        row, d = r // G, tl.arange(0, HDP)
        at = (b.to(tl.int64) * n + row) * (KV * G) + head * G + r % G
        live = row < n
        q = tl.load(query + at[:, None] * HD + d[None, :], mask=live[:, None] & (d < HD)[None, :], other=0.0)
        position = start + row
        if (WINDOW > 0) and (INSIDE < 2):
            position = start + tl.load(depths + b * depths_b + row, mask=live, other=0).to(tl.int32)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, HDP], tl.float32)
        for first in range(begin, tl.minimum(end, committed), KEYS):
            place = first + tl.arange(0, KEYS)
            k = _load(keys, place, True, HD, HDP, False)
            v = _load(values, place, True, HD, HDP, False)
            seen = tl.abs(position[:, None] - place[None, :]) < WINDOW
            peak, total, acc = _fold(q, k, v, seen, peak, total, acc, SCALE, WINDOW > 0)
        if INSIDE > 0:
            for first in tl.range(tl.maximum(begin, committed), end, KEYS, num_stages=1):
                place = first + tl.arange(0, KEYS)
                k = _load(keys, place, place < last, HD, HDP, True)
                v = _load(values, place, place < last, HD, HDP, True)
                seen = _visible(
                    place, position, row, start, n, b, depths, ancestors, depths_b, ancestors_b, ancestors_n,
                    KEYS, INSIDE, WINDOW,
                )  # fmt: skip
                peak, total, acc = _fold(q, k, v, seen, peak, total, acc, SCALE, True)
        out = (tl.program_id(1).to(tl.int64) * chunks + chunk) * (n * G) + r
        tl.store(peak_out + out, peak, mask=live)
        tl.store(total_out + out, total, mask=live)
        tl.store(acc_out + out[:, None] * HD + d[None, :], acc, mask=live[:, None] & (d < HD)[None, :])


@triton.jit
def _gather(
    query, cache, slots, paths, peak_io, total_io, acc_io, n, length, chunks, start, position,
    SCALE: tl.constexpr, G: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, FIRST: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Fold the tiles that are not wholly committed for one row, its keys gathered in the order of its path.

    It goes on from the state that partial_kernel left for the first of these tiles' chunk, and leaves its own there.
    """
    i, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    keys = cache + (tl.load(slots + b) * (2 * KV) + head) * length * HD
    values = keys + tl.cast(length, tl.int64) * (KV * HD)
    g, d = tl.arange(0, ROWS), tl.arange(0, HDP)
    live = g < G
    at = (b.to(tl.int64) * n + i) * (KV * G) + head * G + g
    q = tl.load(query + at[:, None] * HD + d[None, :], mask=live[:, None] & (d < HD)[None, :], other=0.0)
    committed = start // KEYS * KEYS
    chunk_0, chunk_1 = _chunk_of(committed, FIRST), _chunk_of(position, FIRST)
    for chunk in range(chunk_0, chunk_1 + 1):
        begin, end = _edge(chunk, FIRST), _edge(chunk + 1, FIRST)
        left = begin  # where partial_kernel began this chunk
        if WINDOW:
            left = tl.maximum(begin, _floor(start - WINDOW + 1, KEYS))
        carried = live & (left < committed)  # false for the chunks behind the first
        out = ((b.to(tl.int64) * KV + head) * chunks + chunk) * (n * G) + i * G + g
        out_d = acc_io + out[:, None] * HD + d[None, :]
        peak = tl.load(peak_io + out, mask=carried, other=float("-inf"))
        total = tl.load(total_io + out, mask=carried, other=0.0)
        acc = tl.load(out_d, mask=carried[:, None] & (d < HD)[None, :], other=0.0)
        for first in range(tl.maximum(begin, committed), tl.minimum(end, position + 1), KEYS):
            place = first + tl.arange(0, KEYS)
            seen = place <= position
            if WINDOW:
                seen = seen & (position - place < WINDOW)
            drafted = place >= start
            link = tl.load(paths + (b * n + i) * n + (place - start), mask=drafted & seen, other=0)
            place = tl.where(drafted, start + link, place)
            k = _load(keys, place, seen, HD, HDP, True)
            v = _load(values, place, seen, HD, HDP, True)
            peak, total, acc = _fold(q, k, v, seen[None, :], peak, total, acc, SCALE, True)
        tl.store(peak_io + out, peak, mask=live)
        tl.store(total_io + out, total, mask=live)
        tl.store(out_d, acc, mask=live[:, None] & (d < HD)[None, :])
    tl.debug_barrier()  # the states just written are read by other threads of this program


@triton.jit(do_not_specialize=_ROUND)
def finish_kernel(
    query, cache, slots, starts, depths, paths, peak_io, total_io, acc_io, out,
    n, length, chunks, depths_b,
    SCALE: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, FIRST: tl.constexpr, WINDOW: tl.constexpr, INSIDE: tl.constexpr,
    MERGE: tl.constexpr,
):  # fmt: skip
    """One row and key head: the tail in path order (INSIDE 0), then the chunks' states merged in a fixed order."""
    i, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + b).to(tl.int32)
    position = start + i
    if INSIDE < 2:
        position = start + tl.load(depths + b * depths_b + i).to(tl.int32)
    last = position if INSIDE == 0 else start + n - 1
    if INSIDE == 0:
        _gather(
            query, cache, slots, paths, peak_io, total_io, acc_io, n, length, chunks, start, position,
            SCALE, G, KV, HD, HDP, ROWS, KEYS, FIRST, WINDOW,
        )  # fmt: skip
    chunk_0, chunk_1 = 0, _chunk_of(last, FIRST)
    if WINDOW:
        chunk_0 = _chunk_of(tl.maximum(position - WINDOW + 1, 0), FIRST)
    g, d, c = tl.arange(0, GP), tl.arange(0, HDP), tl.arange(0, MERGE)
    peak = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, HDP], tl.float32)
    for first in range(chunk_0 // MERGE * MERGE, chunk_1 + 1, MERGE):
        chunk = first + c
        ok = ((chunk >= chunk_0) & (chunk <= chunk_1))[:, None] & (g < G)[None, :]
        at = ((b.to(tl.int64) * KV + head) * chunks + chunk)[:, None] * (n * G) + i * G + g[None, :]
        part_m = tl.load(peak_io + at, mask=ok, other=float("-inf"))
        part_l = tl.load(total_io + at, mask=ok, other=0.0)
        part = tl.load(acc_io + at[:, :, None] * HD + d[None, None, :], mask=ok[:, :, None] & (d < HD), other=0.0)
        new = tl.maximum(peak, tl.max(part_m, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        weight = tl.exp2(part_m - safe[None, :])
        alpha = tl.exp2(peak - safe)
        total = tl.fma(total, alpha, tl.sum(weight * part_l, 0))
        acc = tl.fma(acc, tl.broadcast_to(alpha[:, None], [GP, HDP]), tl.sum(weight[:, :, None] * part, 0))
        peak = new
    at = (b.to(tl.int64) * n + i) * (KV * G) + head * G + g
    whole = tl.where(total == 0.0, 1.0, total)  # the lanes that fill up the group
    answer = (acc / whole[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * HD + d[None, :], answer, mask=(g < G)[:, None] & (d < HD)[None, :])
