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
def search(tables, text, factors, last, have, shift):
    """The most recent longest match of a text's last tokens: the position behind it and its length; 0, 0 without one.

    last: [8] int32, from the last; have: how many of them there are. Equals TextIndex._find.
    """
    j = tl.arange(0, 8)
    terms = (last.to(tl.int64) + 1) * tl.load(factors + j)
    place = place_of(tl.sum(tl.where(j[None, :] <= j[:, None], terms[None, :], 0), 1), shift)
    size = 1 << (64 - shift)
    known = (j < ORDERS) & (j < have)
    position = tl.load(tables + j * size + place, mask=known, other=0, cache_modifier=".cg")
    compared = (j[None, :] <= j[:, None]) & (position > 0)[:, None]
    at = position[:, None] - 1 - j[None, :]
    there = tl.load(text + at, mask=compared & (at >= 0), other=-1, cache_modifier=".cg")
    wrong = tl.sum((compared & (there != last[None, :])).to(tl.int32), 1)
    order = tl.max(tl.where((position > 0) & (wrong == 0), j + 1, 0), 0)
    return tl.sum(tl.where(j + 1 == order, position, 0), 0), order


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
    lane = tl.arange(0, 16)
    hits = tl.load(confidence + lane)
    seen = tl.load(confidence + 16 + lane)
    levels = tl.load(confidence + 32 + lane)
    last = tl.max(tl.where(level >= 0, column, -1), 0)
    depth = tl.full([], 0, tl.int32)
    while depth <= last:
        here = column == depth
        at = tl.max(tl.where(here, level, -1), 0)
        hit = tl.sum(tl.where(here, right, 0), 0)
        q = tl.sum(tl.where(here, share, 0.0), 0)
        mine = lane == at
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
    _learn(
        confidence + slot * 48, path + batch * columns, committed,
        said_tokens + said, said_levels + said, said_shares + said, column, real,
    )  # fmt: skip
    position = before + column
    _enter(tables, factors, position, real & (position > 0), text, committed, before, shift)
    tl.store(text + position, tl.load(committed + column, mask=real, other=0).to(tl.int32), mask=real)
    tl.debug_barrier()  # what is looked up now was written just now
    end = before + count
    j = tl.arange(0, 8)
    last = tl.load(text + end - 1 - j, mask=j < end, other=0, cache_modifier=".cg")
    found, order = search(tables, text, factors, last, end, shift)
    back = tl.arange(0, LONGEST)
    held = back < tl.minimum(found, LONGEST)
    there = tl.load(text + found - 1 - back, mask=held, other=-1, cache_modifier=".cg")
    here = tl.load(text + end - 1 - back, mask=held, other=-2, cache_modifier=".cg")
    length = tl.min(tl.where(held & (there == here), LONGEST, back), 0)
    tl.store(matches + slot * 2, found)
    tl.store(matches + slot * 2 + 1, tl.where(found > 0, tl.maximum(length, order), 0))
    tl.store(lengths + slot, end)
