"""Compile the kernels of attention, qkv and commit for cards that need not be there; run as a script, without the
interpreter. Prints one JSON object: name -> bytes of shared memory, the card's limit, see fold_of."""

import json
import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ddtree.kernels.attention import DEEPEST, Tiles, merge_width, pick_tiles, tail_keys

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


def attention(capability: int, dtype: torch.dtype, dim: int, inside: int, window: int = 0) -> Iterator[tuple[str, Any]]:
    """Both kernels of a head size, for 4 query heads to a key head."""
    from ddtree.kernels import attention_jit as jit

    tiles: Tiles = pick_tiles(dtype, dim, SHARED[capability])
    shape = {
        "G": 4, "GP": 4, "KV": 2, "HD": dim, "HDP": 1 << (dim - 1).bit_length(), "KEYS": tiles.keys, "FIRST": 128,
        "WINDOW": window, "INSIDE": inside, "MERGE": merge_width(4, dim), "DEEPEST": DEEPEST,
    }  # fmt: skip
    at = f"sm_{capability} {TYPES[dtype]} hd{dim} inside{inside} window{window}"
    folds = shape | {"SCALE": 0.1, "ROWS": tiles.rows, "TAIL_ROWS": 16, "TAIL_KEYS": tail_keys(tiles)}
    for whole in (False, True):
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        yield (
            f"attend{whole:d} {at}",
            build(jit.attend_kernel, capability, TYPES[dtype], folds | {"WHOLE": whole}, **options),
        )
    yield f"merge {at}", build(jit.merge_kernel, capability, TYPES[dtype], shape, num_warps=4)


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
                report[name] = [compiled.metadata.shared, SHARED[capability], fold_of(compiled.asm["ptx"])]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
