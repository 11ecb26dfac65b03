"""Compile the kernels of attention, qkv and commit for cards that need not be there; run as a script, without the
interpreter. Prints one JSON object: name -> bytes of shared memory, the card's limit, see fold_of."""

import json
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ddtree.kernels.attention import DEEPEST, Launch, Tiles, merge_width, pick_launch, pick_tiles

SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_POINTERS = {
    "query", "cache", "out", "slots", "starts", "depths", "ancestors", "paths", "peak_in",
    "total_in", "acc_in", "arrived", "peak_io", "total_io", "acc_io", "heads", "turns", "query_scale", "key_scale",
    "data", "path", "positions",
}  # fmt: skip
_INT64 = {"slots", "starts", "depths", "ancestors", "path", "positions"}
_INT32 = {"paths", "arrived"}
_DATA = {"query", "cache", "out", "heads", "data"}


def build(kernel: Any, capability: int, dtype: str, constants: Mapping[str, Any], **options: Any) -> Any:
    """The compiled kernel; pointers are 16-byte aligned, plain numbers int32 of unknown value."""
    constants = {**constants, "overlap": 2 if capability >= 90 else 0}
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in _POINTERS:
            kind = "i64" if name in _INT64 else "i32" if name in _INT32 else dtype if name in _DATA else "fp32"
            signature[name] = "*" + kind
            attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name == "floor" else "i32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"enable_fp_fusion": False, **options}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def launches(capability: int, tiles: Tiles, dtype: torch.dtype, dim: int) -> dict[str, tuple[Launch, bool]]:
    """Every way to lay work over programs, and whether the last program merges."""
    wide = capability == 90 and dtype != torch.float32
    pick = partial(pick_launch, tiles, dim, wide=wide)
    ways = {"one": (pick(4, 8), True), "few": (pick(64, 8), False), "batch": (pick(64, 64), False)}
    return ways | {"many": (pick(256, 8), False)}


def attention(capability: int, dtype: torch.dtype, dim: int, inside: int, window: int = 0) -> Iterator[tuple[str, Any]]:
    """Both kernels of a head size, for 4 query heads to a key head."""
    from ddtree.kernels import attention_jit as jit

    tiles: Tiles = pick_tiles(dtype, dim, SHARED[capability])
    shape = {
        "SCALE": 0.1, "G": 4, "GP": 4, "KV": 2, "HD": dim, "HDP": 1 << (dim - 1).bit_length(), "KEYS": tiles.keys,
        "TAIL_ROWS": 16, "FIRST": 128, "WINDOW": window, "INSIDE": inside, "MERGE": merge_width(4, dim),
        "DEEPEST": DEEPEST,
    }  # fmt: skip
    at = f"sm_{capability} {TYPES[dtype]} hd{dim} inside{inside} window{window}"
    seen = set()  # without tails some ways are the same
    for way, (how, whole) in launches(capability, tiles, dtype, dim).items():
        if (key := (how.rows, how.units, inside == 0 and how.tails, whole)) in seen:
            continue
        seen.add(key)
        own = shape | {"UNITS": how.units, "TAILS": inside == 0 and how.tails}
        folds = own | {"ROWS": how.rows, "WHOLE": whole, "ASK": how.ask}
        options = {"num_warps": how.warps, "num_stages": how.stages}
        yield f"attend {way} {at}", build(jit.attend_kernel, capability, TYPES[dtype], folds, **options)
        if not whole:
            yield f"merge {way} {at}", build(jit.merge_kernel, capability, TYPES[dtype], own, num_warps=tiles.warps)


def fold_of(ptx: str) -> str:
    """What happens between the products of a tile on Hopper: the operations on scores, without their registers."""
    lines = [line.split()[0] for line in ptx.splitlines() if line.strip()]
    products = [i for i, line in enumerate(lines) if line.startswith("wgmma.mma_async")]
    if not products:
        return ""
    # The first product of the weights with the values; with heads of 64 both products look alike, and are as many.
    second = next((i for i in products if lines[i] != lines[products[0]]), products[len(products) // 2])
    first = max(i for i in products if i < second)
    kept = ("add.", "mul.", "sub.", "fma.", "max.", "ex2.", "shfl.", "cvt.rn.")
    return " ".join(line for line in lines[first:second] if line.startswith(kept) and "64" not in line)


def loops_of(ttir: str) -> list[int]:
    """How many values each loop carries along: Triton 3.6 forgets one that begins as another one's tensor."""
    return [
        line.split("iter_args(")[1].split(") ->")[0].count(" = ") for line in ttir.splitlines() if "iter_args(" in line
    ]


def rest(capability: int, dtype: torch.dtype, dim: int) -> Iterator[tuple[str, Any]]:
    """qkv with norms, and commit."""
    from ddtree.kernels import commit_jit, qkv_jit

    padded, at = 1 << (dim - 1).bit_length(), f"sm_{capability} {TYPES[dtype]} hd{dim}"
    shape = {"QUERIES": 32, "KV": 8, "HD": dim, "HDP": padded, "HEADS": 8}
    flags = {"NORM_QUERY": True, "NORM_KEY": True, "BLOCK": False}
    yield f"qkv {at}", build(qkv_jit.heads_kernel, capability, TYPES[dtype], shape | flags)
    shape = {"LINES": 16, "HD": dim, "HDP": padded, "MP": 16}
    yield f"commit {at}", build(commit_jit.commit_kernel, capability, TYPES[dtype], shape)


def main() -> None:
    """Arguments: capabilities; dtype:head size; kinds of attention (INSIDE); each separated by commas."""
    report = {}
    for capability in map(int, sys.argv[1].split(",")):
        for dtype, dim in [
            (getattr(torch, t), int(d)) for t, d in (pair.split(":") for pair in sys.argv[2].split(","))
        ]:
            kinds = [attention(capability, dtype, dim, inside) for inside in map(int, sys.argv[3].split(","))]
            for name, compiled in chain(*kinds, rest(capability, dtype, dim)):
                report[name] = [
                    compiled.metadata.shared, SHARED[capability], fold_of(compiled.asm["ptx"]),
                    loops_of(compiled.asm["ttir"]),
                ]  # fmt: skip
    print(json.dumps(report))


if __name__ == "__main__":
    main()
