"""Compile the products for a card that need not be there; run as a script, without the interpreter. Argument: its
capability. Prints one JSON object: name -> shared memory and its limit, registers, stack, counts of instructions."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ddtree.kernels import matmul_jit
from ddtree.kernels.matmul import ProductTiles, pick_tiles, pick_whole_tiles

SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
POINTERS = {"weight", "bias", "out", "parts", "arrived", "x", "w", "scale"}
INSTRUCTIONS = ("wgmma", "mma.sync", "tcgen05.mma", "cp.async", "griddepcontrol", "prefetch.L2")


def build(kernel: Any, capability: int, types: dict[str, str], constants: dict[str, Any], **options: Any) -> Any:
    """The compiled kernel; pointers and pitches are aligned, as a model's are."""
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        kind = "constexpr" if name in constants else types.get(name, "fp32" if name == "floor" else "i32")
        signature[name] = kind
        if kind.startswith("*") or name in ("columns", "inner", "span"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def product(
    capability: int, dtype: str, tiles: ProductTiles, kind: str, *, split: bool, overlap: int = 0, whole: bool = False
) -> Any:
    """One of the products."""
    rows = tiles.rows
    bulk = capability >= 90
    narrow = "i8" if whole else dtype
    types = dict.fromkeys(("bias", "out"), "*" + dtype) | dict.fromkeys(("weight", "x", "w"), "*" + narrow)
    types |= {"parts": "*fp32", "x_scale": "*fp32", "w_scale": "*fp32", "arrived": "*i32"}
    if bulk:
        types |= {"x": f"tensordesc<{narrow}[{rows}, {tiles.depth}]>"}
        types |= {"w": f"tensordesc<{narrow}[{tiles.columns}, {tiles.depth}]>"}
    if kind == "parts":
        types["out"] = "*fp32"
    constants = {
        "ROWS": rows, "COLUMNS": tiles.columns, "DEPTH": tiles.depth, "KIND": kind, "SPLIT": split, "BIAS": True,
        "BULK": bulk, "WHOLE": whole, "overlap": overlap,
    }  # fmt: skip
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages, "launch_pdl": overlap > 0}
    return build(matmul_jit.product_kernel, capability, types, constants, **options)


def all_tiles(capability: int) -> list[ProductTiles]:
    """Every shape that is ever picked, the one for few rows first."""
    large = SHARED[capability] >= 200 * 1024
    cases = [(rows, columns) for rows in (1, 32, 64, 128) for columns in (576, 8192, 16384, 151936)]
    return list(dict.fromkeys(pick_tiles(rows, columns, 1, large) for rows, columns in cases))


def products(capability: int) -> Iterator[tuple[str, Any]]:
    """Every number of rows, every kind."""
    for dtype in TYPES.values():
        for tiles in all_tiles(capability):
            for kind, split in (("plain", False), ("gated", True), ("parts", True)):
                if dtype == "fp16" and kind != "gated":
                    continue
                compiled = product(capability, dtype, tiles, kind, split=split)
                yield f"{kind} {dtype} {tiles}", compiled
    for rows in (1, 32):
        tiles = pick_whole_tiles(rows)
        for kind, split in (("plain", False), ("gated", True), ("parts", True)):
            yield f"8 bits {kind} {tiles}", product(capability, "bf16", tiles, kind, split=split, whole=True)
    if capability >= 90:
        tiles = all_tiles(capability)[0]
        yield "plain bf16 16 overlapped", product(capability, "bf16", tiles, "plain", split=True, overlap=2)


def resources(compiled: Any, capability: int) -> dict[str, int]:
    """What a program needs and what it is made of."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    registers, stack = (int(found[1]), int(found[2])) if found else (-1, -1)
    counts = {name: compiled.asm["ptx"].count(name) for name in INSTRUCTIONS}
    sizes = {"shared": compiled.metadata.shared, "limit": SHARED[capability]}
    return sizes | {"registers": registers, "stack": stack} | counts


def main() -> None:
    capability = int(sys.argv[1])
    print(json.dumps({name: resources(compiled, capability) for name, compiled in products(capability)}))


if __name__ == "__main__":
    main()
