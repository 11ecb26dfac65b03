# mypy: ignore-errors
"""The accepted path and the cut of one sequence per program, and the step to the next root."""

import triton
import triton.language as tl

from ddtree.kernels.common_jit import follow

_SIZES = ["pitch", "pitch_batch_words", "pitch_row_words", "pitch_own", "rows", "columns", "end_count"]


@triton.jit(do_not_specialize=_SIZES)
def accept(
    tokens,
    parents,
    depths,
    ancestors,
    own,
    member,
    path,
    count,
    chosen,
    remaining,
    ends,
    done,
    kept,
    ended,
    pitch,
    pitch_batch_words,
    pitch_row_words,
    pitch_own,
    rows,
    columns,
    end_count,
    block: tl.constexpr,
    words: tl.constexpr,
    column_block: tl.constexpr,
    end_block: tl.constexpr,
    has_member: tl.constexpr,
    cuts: tl.constexpr,
    settles: tl.constexpr,
    overlap: tl.constexpr,
):
    """A row is kept when no bit of its ancestors is one of a row that differs from what its parent chose."""
    follow(overlap)
    batch = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, block)
    kept_row = node < rows
    for word in tl.static_range(words):
        bit = tl.arange(0, 64)
        row = word * 64 + bit
        at = batch * pitch + row
        real = row < rows
        parent = tl.load(parents + at, mask=real, other=-1)
        token = tl.load(tokens + at, mask=real, other=-1)
        wanted = tl.load(own + batch * pitch_own + tl.maximum(parent, 0), mask=real, other=-1)
        answer = tl.load(own + batch * pitch_own + row, mask=real, other=-1)
        match = (token == wanted) & (parent >= 0) & (answer >= 0)
        if has_member:
            match = match & (tl.load(member + at, mask=real, other=0) != 0)
        match = match | (row == 0)
        one = tl.full([64], 1, tl.int64)
        misses = tl.sum(tl.where(match, 0, one << bit.to(tl.int64)), 0)
        words_at = ancestors + batch * pitch_batch_words + node * pitch_row_words + word
        kept_row = kept_row & ((tl.load(words_at, mask=node < rows, other=0) & misses) == 0)
    total = tl.sum(kept_row.to(tl.int32), 0)
    depth = tl.load(depths + batch * pitch + node, mask=kept_row, other=-1).to(tl.int32)
    # No scatter: every depth looks for its row. At most one is kept, since siblings differ in their token.
    column = tl.arange(0, column_block)
    found = tl.max(tl.where(depth[None, :] == column[:, None], node[None, :], -1), 1)
    token = tl.load(own + batch * pitch_own + found, mask=found >= 0, other=-1)
    inside = column < columns
    stopped = tl.full([], 0, tl.int1)
    if settles:
        stopped = tl.load(done + batch) != 0
    tl.store(path + batch * columns + column, tl.where(stopped, -1, found).to(tl.int64), mask=inside)
    tl.store(chosen + batch * columns + column, token, mask=inside)
    tl.store(count + batch, (total - 1).to(tl.int64))
    if cuts:
        end = tl.arange(0, end_block)
        known = end < end_count
        last = tl.load(ends + batch * end_count + end, mask=known, other=-2)
        hits = (token[:, None] == last[None, :]) & known[None, :]
        most = tl.minimum(total, tl.load(remaining + batch).to(tl.int32))
        is_end = (tl.max(hits.to(tl.int32), 1) != 0) & (column < most) & inside
        first = tl.min(tl.where(is_end, column, columns), 0)
        tl.store(kept + batch, tl.where(stopped, 0, tl.minimum(most, first + 1)).to(tl.int64))
        tl.store(ended + batch, (first < most).to(tl.uint8))


@triton.jit(do_not_specialize=["pitch", "columns", "batch"])
def advance(
    tokens,
    position,
    remaining,
    done,
    count,
    chosen,
    kept,
    ended,
    pitch,
    columns,
    batch,
    block: tl.constexpr,
    overlap: tl.constexpr,
):
    """All sequences: the bonus becomes the root, behind the accepted rows."""
    follow(overlap)
    lane = tl.arange(0, block)
    real = lane < batch
    running = real & (tl.load(done + lane, mask=real, other=1) == 0)
    accepted = tl.load(count + lane, mask=running, other=0)
    bonus = tl.load(chosen + lane * columns + accepted, mask=running, other=0)
    before = tl.load(position + lane, mask=running, other=0)
    left = tl.load(remaining + lane, mask=running, other=0) - tl.load(kept + lane, mask=running, other=0)
    finished = (tl.load(ended + lane, mask=running, other=0) != 0) | (left <= 0)
    tl.store(tokens + lane * pitch, bonus, mask=running)
    tl.store(position + lane, before + accepted + 1, mask=running)
    tl.store(remaining + lane, left, mask=running)
    tl.store(done + lane, finished.to(tl.uint8), mask=running)
