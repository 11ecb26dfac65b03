# mypy: ignore-errors
"""What SGLang's caches, masks and links want of a round. See ddtree.sglang.rows."""

import triton
import triton.language as tl

NONE = tl.constexpr(1 << 20)  # beyond every row

# Parts of one allocation: where they begin follows the batch, and no batch may wait for a compiler.
_STAGED = ["bonus", "lengths", "pool"]
_LAID = ["lengths", "positions", "first_child", "next_sibling"]
_KEPT = ["lengths", "kept_tokens", "new_lengths", "bonus", "kept", "tree_kept", "from_slot", "to_slot", "feature"]


@triton.jit(
    do_not_specialize=["pitch", "state_pitch", "mask_token", "committed", "drafted", "width"],
    do_not_specialize_on_alignment=_STAGED,
)
def stage(
    bonus,
    lengths,
    pool,
    req_to_token,
    pitch,
    block_ids,
    block_positions,
    block_slots,
    row_slots,
    block_lengths,
    tokens,
    commits,
    state_pitch,
    mask_token,
    committed,
    drafted,
    width,
    columns: tl.constexpr,
):
    """One request: the drafter's block, the slots of block and rows, and the root's token."""
    batch = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, columns)
    length = tl.load(lengths + batch).to(tl.int64)
    root = tl.load(bonus + batch).to(tl.int64)
    row = req_to_token + tl.load(pool + batch).to(tl.int64) * pitch
    in_block, in_rows = column < drafted, column < width
    slot = tl.load(row + length + column, mask=in_block | in_rows, other=0).to(tl.int64)
    at = batch * drafted + column
    tl.store(block_ids + at, tl.where(column == 0, root, mask_token), mask=in_block)
    tl.store(block_positions + at, length + column, mask=in_block)
    tl.store(block_slots + at, slot, mask=in_block)
    tl.store(row_slots + batch * width + column, slot, mask=in_rows)
    tl.store(block_lengths + batch, length)
    tl.store(tokens + batch * state_pitch, root)
    if batch == 0:
        tl.store(commits, tl.zeros([], tl.int64) + committed)


@triton.jit(do_not_specialize=["pitch", "row_words", "width"], do_not_specialize_on_alignment=_LAID)
def lay(
    parents,
    depths,
    ancestors,
    pitch,
    row_words,
    lengths,
    positions,
    first_child,
    next_sibling,
    mask,
    width,
    block: tl.constexpr,
    tile: tl.constexpr,
    batch_block: tl.constexpr,
    prefix: tl.constexpr,
):
    """A tile of one request's rows: positions, links and mask.

    Padding is linked as further children of the root, so that no row is without a parent; nobody can accept it.
    """
    batch = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * tile + tl.arange(0, tile)
    column = tl.arange(0, block)
    real_row, real_column = row < width, column < width
    at = batch * pitch
    length = tl.load(lengths + batch).to(tl.int64)

    above_row = tl.load(parents + at + row, mask=real_row, other=-1)
    above_row = tl.where((above_row < 0) & (row > 0), 0, above_row)
    above = tl.load(parents + at + column, mask=real_column, other=-1)
    above = tl.where((above < 0) & (column > 0), 0, above)
    other = real_column & (column > 0)
    child = tl.where((above[None, :] == row[:, None]) & other[None, :], column[None, :], NONE)
    sibling = (above[None, :] == above_row[:, None]) & other[None, :] & (column[None, :] > row[:, None])
    sibling = tl.where(sibling & (row[:, None] > 0), column[None, :], NONE)
    child, sibling = tl.min(child, 1), tl.min(sibling, 1)
    out = batch * width + row
    tl.store(first_child + out, tl.where(child == NONE, -1, child).to(tl.int64), mask=real_row)
    tl.store(next_sibling + out, tl.where(sibling == NONE, -1, sibling).to(tl.int64), mask=real_row)
    tl.store(positions + out, length + tl.load(depths + at + row, mask=real_row, other=0), mask=real_row)

    others = tl.arange(0, batch_block)
    before = tl.load(lengths + others, mask=others < batch, other=0).to(tl.int64)
    start = tl.sum(tl.where(others < batch, before + width, 0)) * width
    line = mask + start + row.to(tl.int64) * (length + width)
    bits = tl.load(
        ancestors + (at + row)[:, None] * row_words + (column // 64)[None, :],
        mask=real_row[:, None] & real_column[None, :],
        other=0,
    )
    seen = ((bits >> (column % 64).to(tl.int64)[None, :]) & 1).to(tl.uint8)
    real = real_row[:, None] & real_column[None, :]
    tl.store(line[:, None] + length + column[None, :], seen, mask=real)
    if prefix:
        ones = tl.full([tile, 128], 1, tl.uint8)
        place = tl.arange(0, 128)
        begin = tl.full([], 0, tl.int64)
        while begin < length:
            inside = begin + place < length
            tl.store(line[:, None] + (begin + place)[None, :], ones, mask=real_row[:, None] & inside[None, :])
            begin += 128


@triton.jit(do_not_specialize=["width", "drafted"], do_not_specialize_on_alignment=_KEPT)
def commit(
    path,
    count,
    tokens,
    lengths,
    row_slots,
    other,
    told,
    commits,
    kept_tokens,
    new_lengths,
    bonus,
    kept,
    tree_kept,
    from_slot,
    to_slot,
    feature,
    index,
    width,
    drafted,
    columns: tl.constexpr,
    shadows: tl.constexpr,
    gated: tl.constexpr,
):
    """One request's accepted path: what moves where, what is reported, what the drafter is fed."""
    batch = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, columns)
    real = column < drafted
    at = batch * drafted + column
    accepted = tl.load(count + batch)
    if gated:
        accepted = tl.where(batch < tl.load(commits), accepted, -1)
    on = real & (column <= accepted)
    row = tl.load(path + at, mask=on, other=0)
    token = tl.load(tokens + at, mask=on, other=0)
    slots = row_slots + batch * width
    tl.store(from_slot + at, tl.load(slots + row, mask=on, other=0), mask=real)  # slot 0 is SGLang's own padding
    tl.store(to_slot + at, tl.load(slots + column, mask=on, other=0), mask=real)
    tl.store(feature + at, batch * width + row, mask=real)
    tl.store(index + at, tl.where(on, batch * width + row, -1).to(tl.int32), mask=real)
    tl.store(kept_tokens + at, token, mask=real)
    tl.store(bonus + batch, tl.sum(tl.where(column == accepted, token, 0)))
    tl.store(kept + batch, (accepted + 1).to(tl.int32))
    tl.store(new_lengths + batch, tl.load(lengths + batch).to(tl.int64) + accepted + 1)
    would = accepted
    if shadows:
        would = tl.where(tl.load(told + batch) != 0, tl.load(other + batch), accepted)
    tl.store(tree_kept + batch, (would + 1).to(tl.int32))
