# mypy: ignore-errors
"""The token of every row where top_k, top_p and min_p say which may be drawn: two launches behind choose_jit's `scan`.

`weigh` looks at a row in segments: a token's weight is exp of its logit's distance to the best, in whole units, so sums
are exact in any order. At a few distances it keeps what lies above: weight, number, and the token of the best score.
`pick` goes on with one program a row. Between two of those distances lies the cut of top_k and of top_p. Where the best
of all above the cut's far side lies above its near side, it may be drawn, and is the answer; nearly always that is so.
Else what is better than it is weighed: it may be drawn, or everything from it on is cut and the next best is looked at.
"""

import triton
import triton.language as tl

from ddtree.kernels.choose_jit import NOTHING, _gumbel, _mix
from ddtree.kernels.common_jit import NAN_ORDER, follow, index_in, logits_at, order_in, order_of, value_of

NO_KEY = tl.constexpr(-0x8000000000000000)
NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _noise_keys(seed, place):
    """What the noise of a row is made of: see engine.sampling._stream."""
    low, high, place = seed.to(tl.uint32), (seed >> 32).to(tl.uint32), place.to(tl.uint32)
    one = _mix(_mix(_mix(low ^ 0x9E3779B9) ^ high) ^ place)
    two = _mix(_mix(_mix(low + 0x85EBCA6B) + high) + place)
    return one, two


@triton.jit
def _weight(x, first, temperature, unit: tl.constexpr):
    """exp of the distance to the best, in whole units: int64."""
    return (tl.exp((x.to(tl.float64) - first.to(tl.float64)) / temperature) * unit).to(tl.int64)


@triton.jit
def _score(x, column, one, two, temperature):
    """What is compared among the tokens that may be drawn: float64."""
    noise = _gumbel(_mix(_mix(column.to(tl.uint32) ^ one) + two))
    return x.to(tl.float64) + temperature * noise.to(tl.float64)


@triton.jit
def _lowest(first, drop):
    """The order of the lowest logit that min_p keeps. -inf is never kept."""
    return tl.maximum(order_of((first.to(tl.float64) + drop).to(tl.float32)), NOTHING + 1)


@triton.jit
def _distance(first, temperature, step, steps: tl.constexpr):
    """The logit that lies 0.75, 2.25, 4.5, 7.5, ... nats below the best; -inf at the last step."""
    at = (first.to(tl.float64) - temperature * ((step + 1) * (step + 2) * 0.375)).to(tl.float32)
    return tl.where(step < steps - 1, at, float("-inf"))


@triton.jit
def _changes(at, penalized: tl.constexpr):
    """Whether the sequence changes its logits."""
    mine = False
    if penalized:
        mine = tl.load(at) != 0
    return mine


@triton.jit
def _allowed(x, words, told, column, inside, masked: tl.constexpr):
    """The logits, -inf where a mask forbids a token."""
    if masked:
        word = tl.load(words + column // 32, mask=inside & told, other=-1)
        x = tl.where(((word >> (column % 32)) & 1) != 0, x, float("-inf"))
    return x


@triton.jit(do_not_specialize=["pitch_depths", "pitch_masks", "pitch_words", "rows", "segments", "chunks"])
def weigh(
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
    drops,
    keys,
    maxima,
    weights,
    counts,
    scores,
    tokens,
    rows,
    columns,
    segments,
    chunks,
    block: tl.constexpr,
    width: tl.constexpr,
    segment_block: tl.constexpr,
    steps: tl.constexpr,
    unit: tl.constexpr,
    masked: tl.constexpr,
    penalized: tl.constexpr,
    overlap: tl.constexpr,
):
    """One segment of one row; nothing where the row's request has no filter."""
    follow(overlap)
    segment, row, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    place = batch * rows + row
    if tl.load(active + batch) != 0:
        every = tl.arange(0, segment_block)
        key = tl.max(tl.load(keys + place * segments + every, mask=every < segments, other=NO_KEY), 0)
        first = value_of(order_in(key))
        if tl.abs(first) < float("inf"):  # nor NaN
            temperature = tl.load(temperatures + batch).to(tl.float64)
            column = segment * block + tl.arange(0, block)
            inside = column < columns
            at = logits + batch * pitch_batch + row.to(tl.int64) * pitch_row
            mine = _changes(changes + batch, penalized)
            x = logits_at(at, changed + place * columns, mine, column, inside, penalized)
            words = masks + batch * pitch_masks + row.to(tl.int64) * pitch_words
            told = tl.load(limited + batch) != 0
            x = _allowed(x, words, told, column, inside, masked)
            order = order_of(x)
            chunk = segment * (block // width) + tl.arange(0, block // width)
            largest = tl.max(tl.reshape(order, [block // width, width]), 1)
            tl.store(maxima + place * chunks + chunk, largest, mask=chunk < chunks)
            seed = tl.load(seeds + batch)
            after = tl.load(positions + batch) + tl.load(depths + batch * pitch_depths + row) + 1
            one, two = _noise_keys(seed, after)
            alive = order >= _lowest(first, tl.load(drops + batch))
            weight = tl.where(alive, _weight(x, first, temperature, unit), 0)
            score = tl.where(alive, _score(x, column, one, two, temperature), float("-inf"))
            for step in tl.static_range(steps):
                above = alive & (x > _distance(first, temperature, step, steps))
                held = tl.where(above, score, float("-inf"))
                best = tl.max(held, 0)
                out = (place * segments + segment) * steps + step
                tl.store(weights + out, tl.sum(tl.where(above, weight, 0), 0))
                tl.store(counts + out, tl.sum(above.to(tl.int32), 0))
                tl.store(scores + out, best)
                tl.store(tokens + out, tl.min(tl.where(above & (held == best), column, NO_TOKEN), 0))


@triton.jit
def _at(values, step, which):
    """One of a few values."""
    return tl.sum(tl.where(step == which, values, 0), 0)


@triton.jit
def _listed(maxima, chosen, bound, chunks, chunk_block: tl.constexpr):
    """Write the chunks that hold a token of at least this order to `chosen`. Returns: their number."""
    chunk = tl.arange(0, chunk_block)
    hit = (chunk < chunks) & (tl.load(maxima + chunk, mask=chunk < chunks, other=NOTHING) >= bound)
    number = hit.to(tl.int32)
    tl.debug_barrier()  # an earlier list is read no more
    tl.store(chosen + tl.cumsum(number, 0) - 1, chunk, mask=hit)
    tl.debug_barrier()
    return tl.sum(number, 0)


@triton.jit
def _better(
    at,
    changed,
    mine,
    words,
    told,
    maxima,
    chosen,
    bound,
    token,
    lowest,
    first,
    temperature,
    one,
    two,
    columns,
    chunks,
    chunk_block: tl.constexpr,
    tile: tl.constexpr,
    width: tl.constexpr,
    unit: tl.constexpr,
    masked: tl.constexpr,
    penalized: tl.constexpr,
    weighs: tl.constexpr,
    draws: tl.constexpr,
):
    """Of the tokens that min_p keeps and that stand before one of order `bound` and id `token`: their number; their
    weight, if asked for; the best score and its token, if asked for."""
    found = _listed(maxima, chosen, tl.maximum(bound, lowest), chunks, chunk_block)
    count, weight = (token * 0).to(tl.int32), (token * 0).to(tl.int64)
    best, taken = (token * 0).to(tl.float64) - float("inf"), (token * 0).to(tl.int32) + NO_TOKEN
    for start in range(0, found, tile):
        entry = start + tl.arange(0, tile)
        chunk = tl.load(chosen + entry, mask=entry < found, other=chunks)
        column = tl.reshape(chunk[:, None] * width + tl.arange(0, width)[None, :], [tile * width])
        inside = column < columns
        x = logits_at(at, changed, mine, column, inside, penalized)
        x = _allowed(x, words, told, column, inside, masked)
        order = order_of(x)
        before = (order >= lowest) & ((order > bound) | ((order == bound) & (column < token)))
        count += tl.sum(before.to(tl.int32), 0)
        if weighs:
            weight += tl.sum(tl.where(before, _weight(x, first, temperature, unit), 0), 0)
        if draws:
            score = tl.where(before, _score(x, column, one, two, temperature), float("-inf"))
            top = tl.max(score, 0)
            where = tl.min(tl.where(before & (score == top), column, NO_TOKEN), 0)
            # Chunks are in order, and so are tiles: of equal scores the earlier one has the lower id.
            taken = tl.where(top > best, where, taken)
            best = tl.maximum(best, top)
    return count, weight, taken


@triton.jit(do_not_specialize=["pitch_depths", "pitch_masks", "pitch_words", "rows", "segments", "chunks"])
def pick(
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
    drops,
    top_ks,
    top_ps,
    keys,
    maxima,
    weights,
    counts,
    scores,
    tokens,
    chosen,
    own,
    rows,
    columns,
    segments,
    chunks,
    segment_block: tl.constexpr,
    chunk_block: tl.constexpr,
    tile: tl.constexpr,
    width: tl.constexpr,
    steps: tl.constexpr,
    step_block: tl.constexpr,
    unit: tl.constexpr,
    masked: tl.constexpr,
    penalized: tl.constexpr,
    overlap: tl.constexpr,
):
    """The token of one row: the best of its segments where there is no filter, as choose_jit's `merge` has it."""
    follow(overlap)
    row, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = batch * rows + row
    segment = tl.arange(0, segment_block)
    key = tl.max(tl.load(keys + place * segments + segment, mask=segment < segments, other=NO_KEY), 0)
    order = order_in(key)
    token = tl.where((order > NOTHING) & (order != NAN_ORDER), index_in(key), -1)
    first = value_of(order)
    if (tl.load(active + batch) != 0) & (tl.abs(first) < float("inf")):
        temperature = tl.load(temperatures + batch).to(tl.float64)
        at = logits + batch * pitch_batch + row.to(tl.int64) * pitch_row
        changed, mine = changed + place * columns, _changes(changes + batch, penalized)
        words = masks + batch * pitch_masks + row.to(tl.int64) * pitch_words
        told = tl.load(limited + batch) != 0
        maxima, chosen = maxima + place * chunks, chosen + place * chunks
        after = tl.load(positions + batch) + tl.load(depths + batch * pitch_depths + row) + 1
        one, two = _noise_keys(tl.load(seeds + batch), after)
        lowest = _lowest(first, tl.load(drops + batch))
        # What lies above each distance, of all segments.
        step = tl.arange(0, step_block)
        real = (segment < segments)[:, None] & (step < steps)[None, :]
        part = (place * segments + segment)[:, None] * steps + step[None, :]
        weight = tl.sum(tl.load(weights + part, mask=real, other=0), 0)
        count = tl.sum(tl.load(counts + part, mask=real, other=0), 0)
        score = tl.load(scores + part, mask=real, other=float("-inf"))
        best = tl.max(score, 0)
        named = tl.load(tokens + part, mask=real, other=NO_TOKEN)
        named = tl.min(tl.where(score == best[None, :], named, NO_TOKEN), 0)
        last = steps - 1
        # The first distance beyond which each filter keeps nothing.
        k, p = tl.load(top_ks + batch), tl.load(top_ps + batch).to(tl.float64)
        by_count = tl.min(tl.where((count >= k) & (step < steps), step, last), 0)
        limit = (first * 0).to(tl.float64) + float("inf")
        if p < 1.0:
            total = _at(weight, step, last)
            if _at(count, step, last) > k:
                # The k-th best's order lies from `low` on and before `high`: halve that until it is met.
                low = tl.maximum(order_of(_distance(first, temperature, by_count, steps)) + 1, lowest).to(tl.int64)
                high = order_of(_distance(first, temperature, tl.maximum(by_count - 1, 0), steps)).to(tl.int64) + 1
                high = tl.where(by_count > 0, high, order.to(tl.int64) + 1)
                while high - low > 1:
                    middle = (low + high) >> 1
                    number, _, _ = _better(
                        at, changed, mine, words, told, maxima, chosen, (middle - 1).to(tl.int32), token * 0, lowest,
                        first, temperature, one, two, columns, chunks, chunk_block, tile, width, unit, masked,
                        penalized, False, False,
                    )  # fmt: skip
                    low = tl.where(number >= k, middle, low)
                    high = tl.where(number == k, middle + 1, tl.where(number > k, high, middle))
                number, total, _ = _better(
                    at, changed, mine, words, told, maxima, chosen, low.to(tl.int32), token * 0, lowest, first,
                    temperature, one, two, columns, chunks, chunk_block, tile, width, unit, masked, penalized,
                    True, False,
                )  # fmt: skip
                total += (k - number) * _weight(value_of(low.to(tl.int32)), first, temperature, unit)
            limit = total.to(tl.float64) * p
        by_weight = tl.min(tl.where((weight.to(tl.float64) >= limit) & (step < steps), step, last), 0)
        cut = tl.minimum(by_count, by_weight)
        token = _at(named, step, cut)
        x = logits_at(at, changed, mine, token, token >= 0, penalized)
        sure = (cut > 0) & (x > _distance(first, temperature, tl.maximum(cut - 1, 0), steps))
        sure = sure | ((_at(count, step, cut) <= k) & (_at(weight, step, cut).to(tl.float64) < limit))
        while sure == 0:
            bound = order_of(logits_at(at, changed, mine, token, token >= 0, penalized))
            number, better, taken = _better(
                at, changed, mine, words, told, maxima, chosen, bound, token, lowest, first, temperature, one, two,
                columns, chunks, chunk_block, tile, width, unit, masked, penalized, True, True,
            )  # fmt: skip
            sure = (number < k) & (better.to(tl.float64) < limit)
            token = tl.where(sure, token, taken)
    tl.store(own + place, token.to(tl.int64))
