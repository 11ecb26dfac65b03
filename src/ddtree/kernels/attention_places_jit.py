# ruff: noqa: N803 - compile-time parameters are in capitals
# mypy: ignore-errors
"""Where tails and chunks of `attention_jit` begin, and how two states become one."""

import triton
import triton.language as tl


@triton.jit
def floor_to(value, step: tl.constexpr):
    """The largest multiple of step that is not above value, and not below 0."""
    return tl.maximum(value, 0) // step * step


@triton.jit
def tail_begin(position, KEYS: tl.constexpr, DEEPEST: tl.constexpr):
    """Where a row's tail begins: on a tile's edge, and not after its root, which is less than DEEPEST before it."""
    return floor_to(position - (DEEPEST - 1), KEYS)


@triton.jit
def chunk_of(position, FIRST: tl.constexpr):
    """The chunk that holds a position: see chunk_bounds in ddtree.kernels.attention."""
    doubling = (tl.maximum(position // (16 * FIRST), 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    far = 16 + 8 * doubling + ((position // (2 * FIRST) >> doubling) - 8)
    return tl.where(position < 16 * FIRST, position // FIRST, far)


@triton.jit
def edge_of(chunk, FIRST: tl.constexpr):
    """Where a chunk begins."""
    behind = tl.maximum(chunk - 16, 0)
    far = ((behind % 8 + 8) * (2 * FIRST)) << (behind // 8)
    return tl.where(chunk < 16, chunk * FIRST, far)


@triton.jit
def join(peak, total, acc, next_peak, next_total, next_acc):
    """The state of both states' keys. Element by element, so that no layout of threads changes a bit."""
    new = tl.maximum(peak, next_peak)
    safe = tl.where(new == float("-inf"), 0.0, new)  # nothing seen yet: -inf minus -inf would be NaN
    alpha, beta = tl.exp2(peak - safe), tl.exp2(next_peak - safe)
    total = tl.fma(total, alpha, next_total * beta)
    acc = tl.fma(acc, tl.broadcast_to(tl.expand_dims(alpha, -1), acc.shape), next_acc * tl.expand_dims(beta, -1))
    return new, total, acc
