# mypy: ignore-errors
"""The k largest of each row with the row's logsumexp, in two launches. See ddtree.kernels.select."""

import triton
import triton.language as tl

from ddtree.kernels.common_jit import follow, index_in, key_of, order_in, order_of, value_of

NO_KEY = tl.constexpr(-0x8000000000000000)


@triton.jit
def _finite(peak):
    """What exponents are taken relative to: the peak, or 0 where that is infinite (inf - inf is NaN)."""
    return tl.where(tl.abs(peak) == float("inf"), 0.0, peak)


@triton.jit(do_not_specialize=["chunks", "segments"])
def scan(
    logits,
    pitch,
    maxima,
    peaks,
    sums,
    columns,
    chunks,
    segments,
    width: tl.constexpr,
    per_segment: tl.constexpr,
    overlap: tl.constexpr,
):
    """One segment of one row: the largest of each chunk of `width` columns, and the segment's part of the sum."""
    follow(overlap)
    segment, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    chunk = segment * per_segment + tl.arange(0, per_segment)
    column = chunk[:, None] * width + tl.arange(0, width)[None, :]
    x = tl.load(logits + row * pitch + column, mask=column < columns, other=float("-inf")).to(tl.float32)
    largest = tl.max(order_of(x), 1)
    tl.store(maxima + row * chunks + chunk, largest, mask=chunk < chunks)
    peak = value_of(tl.max(largest, 0))
    total = tl.sum(tl.sum(tl.exp(x - _finite(peak)), 1), 0)
    tl.store(peaks + row * segments + segment, peak)
    tl.store(sums + row * segments + segment, total)


@triton.jit
def _largest(keys, k, k_block: tl.constexpr, bitonic: tl.constexpr):
    """The k largest of distinct keys, descending, NO_KEY behind them. keys: [a power of two, at least k_block]."""
    if bitonic:
        found = tl.topk(keys, k_block)
    else:
        place = tl.arange(0, k_block)
        found = tl.full([k_block], NO_KEY, tl.int64)
        for i in range(k):
            top = tl.max(keys, 0)
            found = tl.where(place == i, top, found)
            keys = tl.where(keys == top, NO_KEY, keys)
    return tl.where(tl.arange(0, k_block) < k, found, NO_KEY)


@triton.jit(do_not_specialize=["chunks", "segments", "k"])
def merge(
    logits,
    pitch,
    maxima,
    peaks,
    sums,
    values,
    ids,
    log_q,
    norms,
    vocabulary,
    columns,
    chunks,
    segments,
    k,  # no constant: requests choose it, and each constant is a compilation
    width: tl.constexpr,
    chunk_block: tl.constexpr,
    segment_block: tl.constexpr,
    k_block: tl.constexpr,
    bitonic: tl.constexpr,
    named: tl.constexpr,
    overlap: tl.constexpr,
):
    """One row: its logsumexp, the k chunks of largest maximum, and the k largest columns of those."""
    follow(overlap)
    row = tl.program_id(0).to(tl.int64)
    segment = tl.arange(0, segment_block)
    real = segment < segments
    peak = tl.load(peaks + row * segments + segment, mask=real, other=float("-inf"))
    total = tl.load(sums + row * segments + segment, mask=real, other=0.0)
    top = value_of(tl.max(order_of(peak), 0))
    # An empty segment weighs nothing even where exp overflows.
    weighed = tl.where(total == 0.0, 0.0, total * tl.exp(_finite(peak) - _finite(top)))
    norm = tl.log(tl.sum(weighed, 0)) + _finite(top)
    tl.store(norms + row, norm)

    chunk = tl.arange(0, chunk_block)
    order = tl.load(maxima + row * chunks + chunk, mask=chunk < chunks, other=0)
    keys = tl.where(chunk < chunks, key_of(order, chunk), NO_KEY)
    picked = _largest(keys, k, k_block, bitonic)
    start = tl.where(picked == NO_KEY, columns, index_in(picked) * width)
    column = start[:, None] + tl.arange(0, width)[None, :]
    x = tl.load(logits + row * pitch + column, mask=column < columns, other=0.0).to(tl.float32)
    keys = tl.where(column < columns, key_of(order_of(x), column), NO_KEY)
    best = _largest(tl.reshape(keys, [k_block * width]), k, k_block, bitonic)
    place = tl.arange(0, k_block)
    value = value_of(order_in(best))
    at = row * k + place
    tl.store(values + at, value, mask=place < k)
    token = index_in(best).to(tl.int64)
    if named:
        token = tl.load(vocabulary + token, mask=place < k, other=0)
    tl.store(ids + at, token, mask=place < k)
    # Rounding may lift a near-certain token above probability 1. NaN stays: a comparison with it is false.
    scaled = value - norm
    tl.store(log_q + at, tl.where(scaled > 0.0, 0.0, scaled), mask=place < k)
