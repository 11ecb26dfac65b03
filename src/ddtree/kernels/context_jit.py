# mypy: ignore-errors
"""A text on the device: its tables, its matches, and what became of its guesses. See ddtree.kernels.context."""

import triton
import triton.language as tl

from ddtree.kernels.common_jit import follow

ORDERS = tl.constexpr(6)  # as ddtree.tree.matches has them
LONGEST = tl.constexpr(32)
LEAST = tl.constexpr(0.01)
MOST = tl.constexpr(0.99)


@triton.jit
def place_of(sums, shift):
    """Where an n-gram of this hash is kept: the hash's highest bits."""
    return (sums.to(tl.uint64, bitcast=True) >> shift.to(tl.uint64)).to(tl.int64, bitcast=True)


@triton.jit
def int_at(values, node, row):
    """One row's int32, as a scalar."""
    return tl.sum(tl.where(node == row, values, 0), 0)


@triton.jit
def look_up(tables, text, f0, f1, f2, f3, f4, f5, t0, t1, t2, t3, t4, t5, have, shift):
    """The most recent longest match of a text that ends with `have` tokens, the last six of them t5 .. t0: the position
    behind it, its length and the token there; 0, 0, 0 without one. Equals TextIndex._find. Six scalars
    instead of a vector of them save the exchange between a warp's threads.
    """
    size = 1 << (64 - shift)
    s0 = (t0.to(tl.int64) + 1) * f0
    s1 = s0 + (t1.to(tl.int64) + 1) * f1
    s2 = s1 + (t2.to(tl.int64) + 1) * f2
    s3 = s2 + (t3.to(tl.int64) + 1) * f3
    s4 = s3 + (t4.to(tl.int64) + 1) * f4
    s5 = s4 + (t5.to(tl.int64) + 1) * f5
    a0 = tl.load(tables + place_of(s0, shift), mask=have > 0, other=0, cache_modifier=".cg")
    a1 = tl.load(tables + size + place_of(s1, shift), mask=have > 1, other=0, cache_modifier=".cg")
    a2 = tl.load(tables + 2 * size + place_of(s2, shift), mask=have > 2, other=0, cache_modifier=".cg")
    a3 = tl.load(tables + 3 * size + place_of(s3, shift), mask=have > 3, other=0, cache_modifier=".cg")
    a4 = tl.load(tables + 4 * size + place_of(s4, shift), mask=have > 4, other=0, cache_modifier=".cg")
    a5 = tl.load(tables + 5 * size + place_of(s5, shift), mask=have > 5, other=0, cache_modifier=".cg")
    # Row r of 8 x 8 compares the match of r + 1 tokens; column 6 has the token behind it.
    r, c = tl.arange(0, 64) >> 3, tl.arange(0, 64) & 7
    high = tl.where(r == 3, a3, tl.where(r == 4, a4, tl.where(r == 5, a5, 0)))
    position = tl.where(r == 0, a0, tl.where(r == 1, a1, tl.where(r == 2, a2, high)))
    back = tl.where(c == 3, t3, tl.where(c == 4, t4, t5))
    wanted = tl.where(c == 0, t0, tl.where(c == 1, t1, tl.where(c == 2, t2, back)))
    compared = (c <= r) & (r < ORDERS)
    at = tl.where(c == 6, position, position - 1 - c)
    read = (position > 0) & (compared | (c == 6)) & (at >= 0)
    there = tl.load(text + at, mask=read, other=-1, cache_modifier=".cg")
    wrong = compared & ((position <= 0) | (there != wanted))
    failed = tl.sum(tl.where(wrong, 1 << (3 * r), 0), 0)  # how many of each row, three bits a row
    order = tl.full([], 0, tl.int32)
    for row in tl.static_range(ORDERS):
        order = tl.where(((failed >> (3 * row)) & 7) == 0, row + 1, order)
    chosen = (r + 1 == order) & (c == 6)
    return tl.sum(tl.where(chosen, position, 0), 0), order, tl.sum(tl.where(chosen, there, 0), 0)


@triton.jit
def _enter(tables, factors, position, mask, text, committed, before, shift):
    """Enter the n-grams that end before each position. Tokens from `before` on are in `committed`.

    The latest position stays, whoever is first: the result does not depend on the order of the programs.
    """
    sums = tl.zeros(position.shape, tl.int64)
    for order in tl.static_range(ORDERS):
        at = position - 1 - order
        held = mask & (at >= 0)
        old = tl.load(text + at, mask=held & (at < before), other=0, cache_modifier=".cg")
        new = tl.load(committed + (at - before), mask=held & (at >= before), other=0).to(tl.int32)
        sums += (tl.where(at < before, old, new).to(tl.int64) + 1) * tl.load(factors + order)
        line = tables + (order << (64 - shift))
        tl.atomic_max(line + place_of(sums, shift), position, mask=held)


@triton.jit(do_not_specialize=["length", "capacity", "slot", "shift"])
def lay(text, tables, factors, length, capacity, slot, shift, block: tl.constexpr, overlap: tl.constexpr):
    """Enter a slot's whole text, `block` positions a program. The tables are zero before."""
    follow(overlap)
    where = slot.to(tl.int64)
    text += where * capacity
    tables += where * (ORDERS << (64 - shift))
    position = tl.program_id(0) * block + tl.arange(0, block)
    inside = (position > 0) & (position < length)
    _enter(tables, factors, position, inside, text, text, length, shift)


@triton.jit
def _learn(confidence, path, committed, said_tokens, said_levels, said_shares, column, real):
    """A guess that came true counts as far as the drafter did not expect it: Confidence.learn, token by token."""
    row = tl.load(path + column, mask=real, other=-1)
    said = real & (row >= 0)
    level = tl.load(said_levels + row, mask=said, other=-1)
    share = tl.load(said_shares + row, mask=said, other=0.0)
    token = tl.load(committed + column, mask=real, other=-1)
    right = (said & (tl.load(said_tokens + row, mask=said, other=-1) == token)).to(tl.int32)
    share_bits = share.to(tl.int64, bitcast=True)
    low, high = share_bits.to(tl.int32), (share_bits >> 32).to(tl.int32)
    lane = tl.arange(0, 16)
    hits = tl.load(confidence + lane)
    seen = tl.load(confidence + 16 + lane)
    levels = tl.load(confidence + 32 + lane)
    last = tl.max(tl.where(level >= 0, column, -1), 0)
    depth = tl.full([], 0, tl.int32)
    while depth <= last:
        hit = int_at(right, column, depth)
        # By its halves: whole numbers of 32 bits are summed over a warp in one instruction.
        bits = (int_at(high, column, depth).to(tl.int64) << 32) | (int_at(low, column, depth).to(tl.int64) & 0xFFFFFFFF)
        q = bits.to(tl.float64, bitcast=True)
        mine = lane == int_at(level, column, depth)
        hits += tl.where(mine & (hit != 0), levels / (levels + (1.0 - levels) * q), 0.0)
        seen += tl.where(mine, 1.0, 0.0)
        levels = tl.where(mine, tl.minimum(tl.maximum(hits / seen, LEAST), MOST), levels)
        depth += 1
    tl.store(confidence + lane, hits)
    tl.store(confidence + 16 + lane, seen)
    tl.store(confidence + 32 + lane, levels)


@triton.jit(do_not_specialize=["columns", "pitch_said", "capacity", "shift"])
def note(
    settings,
    slots,
    path,
    committed,
    kept,
    said_tokens,
    said_levels,
    said_shares,
    text,
    lengths,
    tables,
    matches,
    confidence,
    factors,
    columns,
    pitch_said,
    capacity,
    shift,
    column_block: tl.constexpr,
    overlap: tl.constexpr,
):
    """One sequence: learn from a round's tokens, append them, and look where the end of the text stood before."""
    follow(overlap)
    batch = tl.program_id(0).to(tl.int64)
    if tl.load(settings + batch * 7 + 6) == 0:
        return
    slot = tl.load(slots + batch)
    text += slot * capacity
    tables += slot * (ORDERS << (64 - shift))
    committed += batch * columns
    before = tl.load(lengths + slot)
    count = tl.minimum(tl.load(kept + batch).to(tl.int32), capacity - before)
    column = tl.arange(0, column_block)
    real = (column < columns) & (column < count)
    said = batch * pitch_said
    position = before + column
    _enter(tables, factors, position, real & (position > 0), text, committed, before, shift)
    tl.store(text + position, tl.load(committed + column, mask=real, other=0).to(tl.int32), mask=real)
    # It learns while that is on its way.
    _learn(
        confidence + slot * 48, path + batch * columns, committed,
        said_tokens + said, said_levels + said, said_shares + said, column, real,
    )  # fmt: skip
    tl.debug_barrier()  # what is looked up now was written just now
    end = before + count
    ends = text + end - 1
    found, order, _ = look_up(
        tables, text,
        tl.load(factors), tl.load(factors + 1), tl.load(factors + 2),
        tl.load(factors + 3), tl.load(factors + 4), tl.load(factors + 5),
        tl.load(ends, mask=end > 0, other=0, cache_modifier=".cg"),
        tl.load(ends - 1, mask=end > 1, other=0, cache_modifier=".cg"),
        tl.load(ends - 2, mask=end > 2, other=0, cache_modifier=".cg"),
        tl.load(ends - 3, mask=end > 3, other=0, cache_modifier=".cg"),
        tl.load(ends - 4, mask=end > 4, other=0, cache_modifier=".cg"),
        tl.load(ends - 5, mask=end > 5, other=0, cache_modifier=".cg"),
        end, shift,
    )  # fmt: skip
    back = tl.arange(0, LONGEST)
    held = back < tl.minimum(found, LONGEST)
    there = tl.load(text + found - 1 - back, mask=held, other=-1, cache_modifier=".cg")
    here = tl.load(text + end - 1 - back, mask=held, other=-2, cache_modifier=".cg")
    length = tl.min(tl.where(held & (there == here), LONGEST, back), 0)
    tl.store(matches + slot * 2, found)
    tl.store(matches + slot * 2 + 1, tl.where(found > 0, tl.maximum(length, order), 0))
    tl.store(lengths + slot, end)
