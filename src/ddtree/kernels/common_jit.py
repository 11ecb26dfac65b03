# mypy: ignore-errors
"""What several kernels share."""

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))  # no GPU: the interpreter knows no libdevice
NAN_ORDER = tl.constexpr(0x7FFFFFFF)
DEAD = tl.constexpr(-0x80000000)  # sorts below every float, -inf too


@triton.jit
def order_of(x):
    """float32 as an int32 that sorts alike; -0.0 equals 0.0, and every NaN is above all numbers."""
    bits = tl.where(x == 0.0, 0, x.to(tl.int32, bitcast=True))
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x != x, NAN_ORDER, order)


@triton.jit
def log_of(x):
    """The natural logarithm; on a GPU libdevice's."""
    if INTERPRETED:  # noqa: SIM108 - a conditional expression would be compiled on both sides
        result = tl.log(x)
    else:
        result = libdevice.log(x)
    return result


@triton.jit
def value_of(order):
    """The float32 of an order."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def key_of(order, index):
    """An int64 that sorts by order, then by lowest index (int32, not negative)."""
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def order_in(key):
    """The order that a key was made of."""
    return (key >> 32).to(tl.int32)


@triton.jit
def index_in(key):
    """The index that a key was made of."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def logits_at(logits, changed, mine, column, inside, penalized: tl.constexpr):
    """A row's logits at some columns as float32, -inf outside: of `changed` where the sequence changes its own."""
    if penalized:
        if mine:
            x = tl.load(changed + column, mask=inside, other=float("-inf"))
        else:
            x = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
    else:
        x = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
    return x


@triton.jit
def announce(overlap: tl.constexpr):
    """The first half of `follow`. Between the halves a program may ask for memory to be fetched, and no more."""
    if overlap == 2:
        gdc_launch_dependents()


@triton.jit
def await_forerunner(overlap: tl.constexpr):
    """The second half of `follow`."""
    if overlap > 0:
        gdc_wait()
    if overlap == 1:
        gdc_launch_dependents()


@triton.jit
def follow(overlap: tl.constexpr):
    """A kernel's first line, in every program: wait until the launch before is done, and let the next one be launched.

    overlap: 0: launches are made one after another; 1: wait, then let the next one be launched; 2: the other way round.
    Every program of a kernel waits before it reads or writes anything, so whatever was launched before is done then.
    """
    announce(overlap)
    await_forerunner(overlap)


@triton.jit
def sum_parts(parts, at, size, count, mask):
    """The parts of a sum at `at`, which lie `size` apart, added in their order: float32."""
    total = tl.load(parts + at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    for part in range(1, count):
        total += tl.load(parts + part * size + at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    return total
