# mypy: ignore-errors
"""The token of every row, in two launches: per segment of the vocabulary, then over segments."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ddtree.kernels.common_jit import (
    INTERPRETED,
    NAN_ORDER,
    follow,
    index_in,
    key_of,
    log_of,
    logits_at,
    order_in,
    order_of,
)

NOTHING = tl.constexpr(-2139095041)  # order_of(-inf)


@triton.jit
def _mix(x):
    """engine.sampling's 32-bit finaliser. x: uint32, as everything here; products and sums wrap."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _log1p_of_negative(v):
    """log(1 - v) of 0 < v < 1, to the last bits where v is tiny."""
    if INTERPRETED:
        wide = v.to(tl.float64)
        small = -wide * (1.0 + wide * (0.5 + wide * (1.0 / 3 + wide * 0.25)))
        result = tl.where(wide < 1e-4, small, tl.log(1.0 - wide)).to(tl.float32)
    else:
        result = libdevice.log1p(-v)
    return result


@triton.jit
def _gumbel(bits):
    """Standard Gumbel noise of 32 random bits (uint32), float32."""
    # Both halves become floats through the mantissa of 2^23; the low one takes the + 0.5. Exact, as is the product: one
    # rounding, in the sum, as float32((bits + 0.5) * 2^-32) has it.
    high = ((bits >> 16) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    low = ((bits & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388607.5
    v = tl.minimum((high * 65536.0 + low) * 2.3283064365386963e-10, 0.9999999403953552)
    return -log_of(-_log1p_of_negative(v))


@triton.jit(do_not_specialize=["pitch_depths", "pitch_masks", "pitch_words", "rows", "segments"])
def scan(
    logits,
    pitch_batch,
    pitch_row,
    seeds,
    positions,
    depths,
    pitch_depths,
    temperatures,
    masks,
    pitch_masks,
    pitch_words,
    limited,
    changed,
    changes,
    active,
    keys,
    rows,
    columns,
    segments,
    block: tl.constexpr,
    masked: tl.constexpr,
    filtered: tl.constexpr,
    penalized: tl.constexpr,
    overlap: tl.constexpr,
):
    """The best token of one segment of one row, as a key; without noise where filters are to be applied."""
    follow(overlap)
    segment, row, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    column = segment * block + tl.arange(0, block)
    at, mine = logits + batch * pitch_batch + row.to(tl.int64) * pitch_row, False
    if penalized:
        mine = tl.load(changes + batch) != 0
    changed += (batch * rows + row) * columns
    x = logits_at(at, changed, mine, column, column < columns, penalized)
    if masked:
        words = masks + batch * pitch_masks + row.to(tl.int64) * pitch_words + column // 32
        told = tl.load(limited + batch) != 0
        word = tl.load(words, mask=(column < columns) & told, other=-1)
        x = tl.where(((word >> (column % 32)) & 1) != 0, x, float("-inf"))  # also where the logit is NaN
    temperature = tl.load(temperatures + batch).to(tl.float64)
    if filtered:
        temperature = tl.where(tl.load(active + batch) != 0, 0.0, temperature)
    if temperature > 0.0:
        seed = tl.load(seeds + batch)
        place = tl.load(positions + batch) + tl.load(depths + batch * pitch_depths + row) + 1
        low, high, place = seed.to(tl.uint32), (seed >> 32).to(tl.uint32), place.to(tl.uint32)
        one = _mix(_mix(_mix(low ^ 0x9E3779B9) ^ high) ^ place)
        two = _mix(_mix(_mix(low + 0x85EBCA6B) + high) + place)
        noise = _gumbel(_mix(_mix(column.to(tl.uint32) ^ one) + two))
        # Above 1 the whole is divided by the temperature, so that none overflows; the limit keeps -inf from 0 * inf.
        if temperature > 1.0:
            scale = tl.maximum(1.0 / temperature, 1e-30).to(tl.float32)
            x = tl.fma(x, tl.zeros([block], tl.float32) + scale, noise)
        else:
            x = tl.fma(noise, tl.zeros([block], tl.float32) + temperature.to(tl.float32), x)
    order = order_of(x)
    best = tl.max(order, 0)
    token = tl.min(tl.where(order == best, column, 0x7FFFFFFF), 0)
    tl.store(keys + (batch * rows + row) * segments + segment, key_of(best, token))


@triton.jit(do_not_specialize=["segments"])
def merge(keys, own, segments, block: tl.constexpr, overlap: tl.constexpr):
    """The best of all segments of one row; -1 where it is NaN or -inf."""
    follow(overlap)
    row = tl.program_id(0).to(tl.int64)
    segment = tl.arange(0, block)
    key = tl.load(keys + row * segments + segment, mask=segment < segments, other=-0x8000000000000000)
    best = tl.max(key, 0)
    order = order_in(best)
    answered = (order > NOTHING) & (order != NAN_ORDER)
    tl.store(own + row, tl.where(answered, index_in(best), -1).to(tl.int64))
