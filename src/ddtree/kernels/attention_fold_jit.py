# ruff: noqa: N803 - compile-time parameters are in capitals
# mypy: ignore-errors
"""States of keys: what a program of `attention_jit` makes of a run of chunks, or of a row's tail."""

import triton
import triton.language as tl

from ddtree.kernels.attention_places_jit import edge_of, join, tail_begin


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
def _empty(ROWS: tl.constexpr, HDP: tl.constexpr):
    """The state of no keys."""
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    return peak, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, HDP], tl.float32)


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
def store_state(
    peak_out, total_out, acc_out, at, ok, peak, total, acc, HD: tl.constexpr, HDP: tl.constexpr
):  # fmt: skip
    """Keep the states of rows at `at`, where ok."""
    d = tl.arange(0, HDP)
    tl.store(peak_out + at, peak, mask=ok)
    tl.store(total_out + at, total, mask=ok)
    tl.store(acc_out + at[:, None] * HD + d[None, :], acc, mask=ok[:, None] & (d < HD)[None, :])


@triton.jit
def _fold_chunk(
    q, keys, values, depths, ancestors, begin, end, committed, last,
    row, b, start, position, tail, n, depths_b, ancestors_b, ancestors_n,
    SCALE: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """The state of the keys begin .. end - 1 of one chunk, for ROWS packed query rows q."""
    peak, total, acc = _empty(ROWS, HDP)
    for first in range(begin, tl.minimum(end, committed), KEYS):
        place = first + tl.arange(0, KEYS)
        k = _load(keys, place, True, HD, HDP, False)
        v = _load(values, place, True, HD, HDP, False)
        seen = (row >= 0)[:, None]
        if WINDOW:
            seen = tl.abs(position[:, None] - place[None, :]) < WINDOW
        peak, total, acc = _fold(q, k, v, seen, peak, total, acc, SCALE, WINDOW > 0)
    for first in tl.range(tl.maximum(begin, committed), end, KEYS, num_stages=1):
        place = first + tl.arange(0, KEYS)
        k = _load(keys, place, place < last, HD, HDP, INSIDE > 0)
        v = _load(values, place, place < last, HD, HDP, INSIDE > 0)
        if INSIDE > 0:
            seen = _visible(
                place, position, row, start, n, b, depths, ancestors, depths_b, ancestors_b, ancestors_n,
                KEYS, INSIDE, WINDOW,
            )  # fmt: skip
        else:  # the whole tile is in a row's tail, or before it
            seen = (first < tail)[:, None]
            if WINDOW:
                seen = seen & (tl.abs(position[:, None] - place[None, :]) < WINDOW)
        peak, total, acc = _fold(q, k, v, seen, peak, total, acc, SCALE, True)
    return peak, total, acc


@triton.jit
def fold_run(
    query, keys, values, depths, ancestors, chunk, left, committed, last,
    row, r, b, head, start, position, tail, n, depths_b, ancestors_b, ancestors_n,
    SCALE: tl.constexpr, G: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr, FIRST: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, INSIDE: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """The state of UNITS chunks, from `chunk` on, for ROWS packed query rows: of their keys left .. last - 1.

    Every chunk's state is made apart and joined to those before, as `merge_states` does with states that were kept.
    committed: on a tile's edge; every row sees all keys before it. tail: [ROWS], INSIDE 0: where the rows' tails begin.
    """
    d, live = tl.arange(0, HDP), row < n
    at = (b.to(tl.int64) * n + row) * (KV * G) + head * G + r % G
    q = tl.load(query + at[:, None] * HD + d[None, :], mask=live[:, None] & (d < HD)[None, :], other=0.0)
    if UNITS == 1:
        begin, end = tl.maximum(edge_of(chunk, FIRST), left), tl.minimum(edge_of(chunk + 1, FIRST), last)
        run_peak, run_total, run_acc = _fold_chunk(
            q, keys, values, depths, ancestors, begin, end, committed, last,
            row, b, start, position, tail, n, depths_b, ancestors_b, ancestors_n,
            SCALE, HD, HDP, ROWS, KEYS, WINDOW, INSIDE,
        )  # fmt: skip
    else:
        run_peak, run_total, run_acc = _empty(ROWS, HDP)
        for unit in range(UNITS):
            begin = tl.maximum(edge_of(chunk + unit, FIRST), left)
            end = tl.minimum(edge_of(chunk + unit + 1, FIRST), last)
            peak, total, acc = _fold_chunk(
                q, keys, values, depths, ancestors, begin, end, committed, last,
                row, b, start, position, tail, n, depths_b, ancestors_b, ancestors_n,
                SCALE, HD, HDP, ROWS, KEYS, WINDOW, INSIDE,
            )  # fmt: skip
            run_peak, run_total, run_acc = join(run_peak, run_total, run_acc, peak, total, acc)
    return run_peak, run_total, run_acc


@triton.jit
def _fold_path(
    query, keys, values, path, i, begin, start, position, peak, total, acc,
    SCALE: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """KEYS keys of a tail, from position `begin` on, into the state."""
    place = begin + tl.arange(0, KEYS)
    seen = place <= position
    if WINDOW:
        seen = seen & (position - place < WINDOW)
    link = tl.load(path + (place - start), mask=(place > start) & seen, other=0)
    link = tl.where((place == start) & (position == start), i, link)  # padding is its own root; else that is row 0
    place = tl.where(place >= start, start + link, place)
    k = _load(keys, place, seen, HD, HDP, True)
    v = _load(values, place, seen, HD, HDP, True)
    return _fold(query, k, v, seen[None, :], peak, total, acc, SCALE, True)


@triton.jit
def fold_tail(
    query, keys, values, paths, i, b, head, start, position, n,
    SCALE: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr,
    TAIL_ROWS: tl.constexpr, KEYS: tl.constexpr, DEEPEST: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The state of the tail of row i, its keys gathered in the order of its path; head h of the group in rows
    h * TAIL_ROWS / GP and on, all the same, since a product has at least 16 rows."""
    g, d = tl.arange(0, TAIL_ROWS) // (TAIL_ROWS // GP), tl.arange(0, HDP)
    at = (b.to(tl.int64) * n + i) * (KV * G) + head * G + g
    begin, path = tail_begin(position, KEYS, DEEPEST), paths + (b.to(tl.int64) * n + i) * n
    q = tl.load(query + at[:, None] * HD + d[None, :], mask=(g < G)[:, None] & (d < HD)[None, :], other=0.0)
    peak, total, acc = _empty(TAIL_ROWS, HDP)
    peak, total, acc = _fold_path(
        q, keys, values, path, i, begin, start, position, peak, total, acc, SCALE, HD, HDP, KEYS, WINDOW
    )
    for more in tl.range(begin + KEYS, position + 1, 16, num_stages=1):
        peak, total, acc = _fold_path(
            q, keys, values, path, i, more, start, position, peak, total, acc, SCALE, HD, HDP, 16, WINDOW
        )
    return peak, total, acc
