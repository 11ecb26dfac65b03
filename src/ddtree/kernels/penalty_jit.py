# mypy: ignore-errors
"""The Triton side of ddtree.kernels.penalty. Words of a token there: bit 0 biased, bit 1 seen, above them its count."""

import triton
import triton.language as tl

from ddtree.kernels.common_jit import follow

LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32


@triton.jit
def _changed(x, word, bias, repetition, frequency, presence):
    """float32 of a logit of float64 and its token's word. engine.history has the same operations in the same order."""
    count = (word >> 2).to(tl.float64)
    value = x + bias
    by_repetition = tl.where(value > 0, value / repetition, value * repetition)
    value = tl.where((word & 2) != 0, by_repetition, value)
    value = value - frequency * count - presence * (count > 0).to(tl.float64)
    held = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
    return tl.where(tl.abs(value) < float("inf"), held, value).to(tl.float32)


@triton.jit(do_not_specialize=["pitch", "pitch_batch_words", "pitch_row_words", "pitch_words", "rows", "each"])
def penalize(
    logits,
    pitch_batch,
    pitch_row,
    tokens,
    depths,
    ancestors,
    pitch,
    pitch_batch_words,
    pitch_row_words,
    pitch_words,
    slots,
    active,
    numbers,
    words,
    biases,
    changed,
    rows,
    columns,
    each,
    block: tl.constexpr,
    node_block: tl.constexpr,
    depth_block: tl.constexpr,
    overlap: tl.constexpr,
):
    """A few segments of one row; nothing where the row's request changes no logit. each: their number."""
    follow(overlap)
    part, row, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if tl.load(active + batch) != 0:
        slot = tl.load(slots + batch)
        words, biases = words + slot * columns, biases + slot * columns
        repetition, frequency = tl.load(numbers + 3 * batch), tl.load(numbers + 3 * batch + 1)
        presence = tl.load(numbers + 3 * batch + 2)
        at = logits + batch * pitch_batch + row.to(tl.int64) * pitch_row
        out = changed + (batch * rows + row) * columns
        start, end = part * each * block, tl.minimum((part + 1) * each * block, columns)
        for first in range(start, end, block):
            column = first + tl.arange(0, block)
            inside = column < columns
            x = tl.load(at + column, mask=inside, other=0.0)
            word = tl.load(words + column, mask=inside, other=0)
            bias = tl.load(biases + column, mask=(word & 1) != 0, other=0.0)
            value = _changed(x.to(tl.float64), word, bias, repetition, frequency, presence)
            tl.store(out + column, tl.where(word != 0, value, x.to(tl.float32)), mask=inside)
        if depth_block > 0:
            # The tokens between the root and this row, by depth: the row's own one at the end, -1 behind it.
            node = tl.arange(0, node_block)
            bits = ancestors + batch * pitch_batch_words + row * pitch_row_words + node // 64 * pitch_words
            bits = tl.load(bits, mask=node < rows, other=0)
            above = (node > 0) & (((bits >> (node % 64).to(tl.int64)) & 1) != 0)
            token = tl.load(tokens + batch * pitch + node, mask=above, other=-1)
            depth = tl.load(depths + batch * pitch + node, mask=above, other=0).to(tl.int32)
            level = tl.arange(0, depth_block) + 1
            said = tl.max(tl.where(depth[None, :] == level[:, None], token[None, :], -1), 1)
            times = tl.sum((said[:, None] == said[None, :]).to(tl.int32), 1)
            here = (said >= start) & (said < end)
            own = tl.load(at + said, mask=here, other=0.0)
            known = tl.load(words + said, mask=here, other=0)
            added = tl.load(biases + said, mask=here & ((known & 1) != 0), other=0.0)
            later = _changed(own.to(tl.float64), (known + 4 * times) | 2, added, repetition, frequency, presence)
            tl.debug_barrier()  # what was stored there before is overwritten
            tl.store(out + said, later, mask=here)


@triton.jit(do_not_specialize=["columns", "size"])
def count(
    active,
    slots,
    committed,
    n_committed,
    words,
    columns,
    size,
    column_block: tl.constexpr,
    overlap: tl.constexpr,
):
    """The committed tokens of one sequence, each as often as it is there. size: of a slot's words."""
    follow(overlap)
    batch = tl.program_id(0).to(tl.int64)
    if tl.load(active + batch) != 0:
        column = tl.arange(0, column_block)
        real = (column < columns) & (column < tl.load(n_committed + batch))
        token = tl.load(committed + batch * columns + column, mask=real, other=-1)
        real = token >= 0
        times = tl.sum((token[:, None] == token[None, :]).to(tl.int32), 1)
        at = words + tl.load(slots + batch) * size + token
        word = tl.load(at, mask=real, other=0)
        tl.debug_barrier()  # a token that is there twice is read twice before it is written, twice the same
        tl.store(at, (word + 4 * times) | 2, mask=real)
