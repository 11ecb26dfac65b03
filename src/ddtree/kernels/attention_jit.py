# ruff: noqa: N803 - compile-time parameters are in capitals
# mypy: ignore-errors
"""Triton kernels of `ddtree.kernels.attention`. Import it only where triton is there.

A state (peak, total, acc) stands for some keys. In the row-invariant form (INSIDE 0) a row at position p has one for
its tail, the keys from `tail_begin(p)` on, gathered in the order of its path, and one for what each chunk holds before
that: chunks are at fixed absolute positions, and all their keys are committed whatever the row's depth. So which states
a row has, and how each is made, depends on its position alone, and they are made independently, in one launch.
What adds up in an order that a layout of threads could change happens in tiles of one shape under one number of warps;
merging runs the same code under that number of warps wherever it is.
Numbers that differ between rounds are never specialised: one binary serves every batch and every number of rows.
Multiplications and additions are not fused by the compiler (`enable_fp_fusion=False` at launch): it would choose place
by place.
"""

import triton
import triton.language as tl

from ddtree.kernels.attention_merge_jit import chunk_of, edge_of, floor_to, merge_kernel, merge_states, tail_begin
from ddtree.kernels.common_jit import announce, await_forerunner, follow

__all__ = ["attend_kernel", "merge_kernel", "paths_kernel"]

_ROUND = ["n", "length", "chunks", "blocks", "spaces", "depths_b", "ancestors_b", "ancestors_n"]


@triton.jit(do_not_specialize=["n", "depths_b", "ancestors_b", "ancestors_n"])
def paths_kernel(
    ancestors, depths, paths, n, depths_b, ancestors_b, ancestors_n, NP: tl.constexpr, overlap: tl.constexpr
):
    """paths[b, i, d] = the row at depth d on the path of row i. One program per row and sequence."""
    follow(overlap)
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
def _prefetch(base, begin, count, HD: tl.constexpr):
    """Ask for `count` keys or values of a head, dense in memory, to be brought into the L2 cache. Not before Hopper."""
    piece = count * HD // 128  # of every thread; whole tiles make multiples of 16 bytes
    size = tl.zeros([128], tl.int32) + piece * (base.dtype.element_ty.primitive_bitwidth // 8)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [base + begin * HD + tl.arange(0, 128) * piece, size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _ask_for_keys(
    cache, slots, starts, spaces, b, head, place, n, length, chunks, blocks,
    KV: tl.constexpr, HD: tl.constexpr, KEYS: tl.constexpr, DEEPEST: tl.constexpr, FIRST: tl.constexpr,
    WINDOW: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """Fetch the committed keys and values of a program of attend_kernel, before the launch before it is done.

    Places and lengths may be out of date: they are kept within the cache, and nothing depends on what is fetched.
    """
    start = tl.load(starts + b, cache_modifier=".cg").to(tl.int32)
    start = tl.minimum(tl.maximum(start, 0), length) // KEYS * KEYS
    slot = tl.minimum(tl.maximum(tl.load(slots + b, cache_modifier=".cg"), 0), spaces - 1)
    keys = cache + (slot * (2 * KV) + head) * length * HD
    tails = 0
    if INSIDE == 0:
        tails = n
    which = tl.maximum(place - tails, 0)
    chunk = chunks - 1 - which // blocks
    begin, end = edge_of(chunk, FIRST), tl.minimum(edge_of(chunk + 1, FIRST), start)
    if WINDOW:
        begin = tl.maximum(begin, floor_to(start - WINDOW + 1, KEYS))
    mine = which % blocks == 0
    if place < tails:
        begin, end, mine = tail_begin(start, KEYS, DEEPEST), start, place == 0
    if mine & (begin < end):
        _prefetch(keys, begin, end - begin, HD)
        _prefetch(keys + tl.cast(length, tl.int64) * (KV * HD), begin, end - begin, HD)


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


@triton.jit
def _store_state(
    peak_out, total_out, acc_out, at, ok, peak, total, acc, HD: tl.constexpr, HDP: tl.constexpr
):  # fmt: skip
    d = tl.arange(0, HDP)
    tl.store(peak_out + at, peak, mask=ok)
    tl.store(total_out + at, total, mask=ok)
    tl.store(acc_out + at[:, None] * HD + d[None, :], acc, mask=ok[:, None] & (d < HD)[None, :])


@triton.jit
def _fold_chunk(
    query, keys, values, depths, ancestors, peak_out, total_out, acc_out, out_at, begin, end, committed, last,
    row, r, b, head, start, position, tail, n, depths_b, ancestors_b, ancestors_n,
    SCALE: tl.constexpr, G: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """The state of the keys begin .. end - 1 for ROWS packed query rows, kept at out_at + r.

    tail: [ROWS], INSIDE 0: where the rows' tails begin. A tile that is not a row's changes nothing of its state.
    """
    d, live = tl.arange(0, HDP), row < n
    at = (b.to(tl.int64) * n + row) * (KV * G) + head * G + r % G
    q = tl.load(query + at[:, None] * HD + d[None, :], mask=live[:, None] & (d < HD)[None, :], other=0.0)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HDP], tl.float32)
    for first in range(begin, tl.minimum(end, committed), KEYS):
        place = first + tl.arange(0, KEYS)
        k = _load(keys, place, True, HD, HDP, False)
        v = _load(values, place, True, HD, HDP, False)
        seen = (first < tail)[:, None]
        if WINDOW:
            seen = seen & (tl.abs(position[:, None] - place[None, :]) < WINDOW)
        peak, total, acc = _fold(q, k, v, seen, peak, total, acc, SCALE, (WINDOW > 0) or (INSIDE == 0))
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
    _store_state(peak_out, total_out, acc_out, out_at + r, live, peak, total, acc, HD, HDP)


@triton.jit
def _fold_tail(
    query, keys, values, paths, peak_out, total_out, acc_out, out_at, i, b, head, start, position, n,
    SCALE: tl.constexpr, G: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr,
    TAIL_ROWS: tl.constexpr, TAIL_KEYS: tl.constexpr, KEYS: tl.constexpr, DEEPEST: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The state of the tail of row i, its keys gathered in the order of its path, kept at out_at + the group's head."""
    g, d = tl.arange(0, TAIL_ROWS), tl.arange(0, HDP)
    live = g < G
    at = (b.to(tl.int64) * n + i) * (KV * G) + head * G + g
    begin = tail_begin(position, KEYS, DEEPEST)
    peak = tl.full([TAIL_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TAIL_ROWS], tl.float32)
    acc = tl.zeros([TAIL_ROWS, HDP], tl.float32)
    for tile in tl.static_range((DEEPEST + KEYS - 2) // TAIL_KEYS + 1):
        place = begin + tile * TAIL_KEYS + tl.arange(0, TAIL_KEYS)
        seen = place <= position
        if WINDOW:
            seen = seen & (position - place < WINDOW)
        link = tl.load(paths + (b * n + i) * n + (place - start), mask=(place > start) & seen, other=0)
        link = tl.where((place == start) & (position == start), i, link)  # padding is its own root; else that is row 0
        place = tl.where(place >= start, start + link, place)
        k = _load(keys, place, seen, HD, HDP, True)
        v = _load(values, place, seen, HD, HDP, True)
        if tile == 0:  # after the keys, for whose products it is waited for
            q = tl.load(query + at[:, None] * HD + d[None, :], mask=live[:, None] & (d < HD)[None, :], other=0.0)
        peak, total, acc = _fold(q, k, v, seen[None, :], peak, total, acc, SCALE, True)
    _store_state(peak_out, total_out, acc_out, out_at + g, live, peak, total, acc, HD, HDP)


@triton.jit(do_not_specialize=_ROUND)
def attend_kernel(
    query, cache, slots, starts, depths, ancestors, paths, peak_io, total_io, acc_io, arrived, out,
    n, length, chunks, blocks, spaces, depths_b, ancestors_b, ancestors_n,
    SCALE: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL_ROWS: tl.constexpr, TAIL_KEYS: tl.constexpr, DEEPEST: tl.constexpr,
    FIRST: tl.constexpr, WINDOW: tl.constexpr, INSIDE: tl.constexpr, MERGE: tl.constexpr, WHOLE: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """One state: of a row's tail (INSIDE 0), or of a chunk for ROWS packed query rows (row * G + head of the group).

    WHOLE: all rows are in one block, and the program that is the last of its sequence and key head merges their states.
    """
    line = tl.program_id(1)
    b, head, place = line // KV, line % KV, tl.program_id(0)
    announce(overlap)
    if overlap > 0:
        _ask_for_keys(
            cache, slots, starts, spaces, b, head, place, n, length, chunks, blocks,
            KV, HD, KEYS, DEEPEST, FIRST, WINDOW, INSIDE,
        )  # fmt: skip
    await_forerunner(overlap)
    tails = 0
    if INSIDE == 0:
        tails = n
    start = tl.load(starts + b).to(tl.int32)
    slot = tl.load(slots + b)
    keys = cache + (slot * (2 * KV) + head) * length * HD
    values = keys + tl.cast(length, tl.int64) * (KV * HD)
    which = tl.maximum(place - tails, 0)
    chunk, block = chunks - 1 - which // blocks, which % blocks  # the largest chunks first
    r = block * ROWS + tl.arange(0, ROWS)
    row = r // G
    depth = row
    if INSIDE < 2:
        depth = tl.load(depths + b * depths_b + row, mask=row < n, other=0).to(tl.int32)
    position = start + depth
    tail, last, committed = position, start + n, start // KEYS * KEYS
    if INSIDE == 0:
        tail = tail_begin(position, KEYS, DEEPEST)
        last = tl.max(tail, 0)
        committed = last
    left = 0
    if WINDOW:
        left = floor_to(start - WINDOW + 1, KEYS)  # no row stands before start
    begin, end = tl.maximum(edge_of(chunk, FIRST), left), tl.minimum(edge_of(chunk + 1, FIRST), last)
    states = line.to(tl.int64) * (chunks + 1)
    if place < tails:
        i = place
        own = start + tl.load(depths + b * depths_b + i).to(tl.int32)
        _fold_tail(
            query, keys, values, paths, peak_io, total_io, acc_io, (states + chunks) * (n * G) + i * G,
            i, b, head, start, own, n,
            SCALE, G, KV, HD, HDP, TAIL_ROWS, TAIL_KEYS, KEYS, DEEPEST, WINDOW,
        )  # fmt: skip
    elif begin < end:
        _fold_chunk(
            query, keys, values, depths, ancestors, peak_io, total_io, acc_io, (states + chunk) * (n * G),
            begin, end, committed, last, row, r, b, head, start, position, tail, n, depths_b, ancestors_b, ancestors_n,
            SCALE, G, KV, HD, HDP, ROWS, KEYS, WINDOW, INSIDE,
        )  # fmt: skip
    if WHOLE and ((place < tails) | (begin < end)):
        full = tl.where(left < last, chunk_of(tl.maximum(last - 1, 0), FIRST) - chunk_of(left, FIRST) + 1, 0)
        tl.debug_barrier()  # this program's state is written before it is announced
        before = tl.atomic_add(arrived + line, 1, sem="acq_rel")
        if before == tails + full - 1:
            tl.store(arrived + line, 0)  # for the next launch
            for i in range(n):
                own = i
                if INSIDE < 2:
                    own = tl.load(depths + b * depths_b + i).to(tl.int32)
                merge_states(
                    peak_io, total_io, acc_io, out, i, b, head, start, own, n, chunks,
                    G, GP, KV, HD, HDP, KEYS, DEEPEST, FIRST, WINDOW, INSIDE, MERGE,
                )  # fmt: skip
