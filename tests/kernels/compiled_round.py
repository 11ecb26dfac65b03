"""Compile a round's kernels beside attention and products for cards that need not be there; run as a script, without
the interpreter. Prints one JSON object: name -> bytes of shared memory, registers and bytes of spills."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ddtree.kernels import (
    accept_jit,
    build_jit,
    choose_jit,
    context_build_jit,
    context_jit,
    context_rows_jit,
    filter_jit,
    gather_jit,
    matmul_jit,
    norm_jit,
    pair_jit,
    penalty_jit,
    report_jit,
    select_jit,
)
from ddtree.kernels.pair import warps_of as pair_warps

# What a pointer points to, where it is not int64.
POINTERS = {
    **dict.fromkeys(["maxima", "masks"], "i32"),
    **dict.fromkeys(["peaks", "sums", "values", "log_q", "norms", "edges", "changed"], "fp32"),
    **dict.fromkeys(["member", "tree", "done", "ended", "limited", "active", "changes", "places"], "u8"),
    **dict.fromkeys(["temperatures", "drops", "top_ps"], "fp64"),
}
INT64 = {
    *(
        "ids",
        "candidates",
        "settings",
        "tokens",
        "parents",
        "depths",
        "ancestors",
        "seeds",
        "positions",
        "keys",
        "own",
        "vocabulary",
    ),
    *("path", "count", "chosen", "remaining", "ends", "kept", "position"),
}


HALF = {"delta": "*bf16", "bias": "*bf16", "out": "*bf16", "kept": "*bf16"}
LAYERS = {"x": "*fp32", "scale": "*fp32", "floor": "fp32", **HALF}  # of the kernels of a layer


def compiled(
    kernel: Any,
    capability: int,
    constants: Mapping[str, Any],
    dtype: str = "bf16",
    warps: int = 4,
    types: Mapping[str, str] | None = None,
    fuses: bool = True,
) -> Any:
    """The kernel for a card; pointers and pitches are aligned, as they are in a round. types: those that differ.
    fuses: products and sums may be one instruction.
    """
    constants = {**constants, "overlap": 2 if capability >= 90 else 0}
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif types is not None and name in types:
            signature[name] = types[name]
            if types[name].startswith("*"):
                attributes[(place,)] = [["tt.divisibility", 16]]
        elif name == "logits" or name in POINTERS or name in INT64:
            signature[name] = "*" + (dtype if name == "logits" else POINTERS.get(name, "i64"))
            attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
            if kernel.params[place].do_not_specialize is False and (name.startswith("pitch") or name == "columns"):
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "enable_fp_fusion": fuses}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def kernels(capability: int, *, every: bool) -> Iterator[tuple[str, Any]]:
    """All of them, at the sizes that need the most; `every` adds the other dtypes and sizes."""
    for dtype in ("bf16", "fp16", "fp32") if every else ("bf16",):
        shape = {"width": 128, "per_segment": 32}
        yield f"select.scan {dtype}", compiled(select_jit.scan, capability, shape, dtype)
        for masked in (False, True):
            shape = {"block": 4096, "masked": masked, "filtered": True, "penalized": True}
            yield f"choose.scan {dtype} masked{masked:d}", compiled(choose_jit.scan, capability, shape, dtype)
            yield from filters(capability, dtype, masked)
        yield from penalties(capability, dtype, every=every)
    yield "choose.merge", compiled(choose_jit.merge, capability, {"block": 64}, warps=1)
    for k, bitonic in [(16, False), (32, False), (16, True), (32, True)] if every else [(16, False)]:
        shape = {
            "width": 128,
            "chunk_block": 2048,
            "segment_block": 64,
            "k_block": k,
            "bitonic": bitonic,
            "named": True,
        }
        yield f"select.merge k{k} bitonic{bitonic:d}", compiled(select_jit.merge, capability, shape, warps=8)
    for block in (32, 64, 128, 256) if every else (64,):
        for paired, chained, first in ((False, False, False), (True, False, True), (True, True, False)):
            shape = {"block": block, "words": -(-block // 64), "paired": paired, "chained": chained}
            shape["chain_first"] = first
            name = f"build {block} paired{paired:d} chained{chained:d} first{first:d}"
            yield name, compiled(build_jit.build, capability, shape, warps=max(block // 128, 1))
    yield from pairs(capability, every=every)
    yield from contexts(capability, every=every)
    for block in (64, 256) if every else (64,):
        shape = {"block": block, "words": block // 64, "column_block": 16, "end_block": 4}
        shape |= {"has_member": True, "cuts": True, "settles": True}
        yield f"accept {block}", compiled(accept_jit.accept, capability, shape)
    yield "accept.advance", compiled(accept_jit.advance, capability, {"block": 32}, warps=1)
    yield from layers(capability, every=every)


def filters(capability: int, dtype: str, masked: bool) -> Iterator[tuple[str, Any]]:
    """What top_k, top_p and min_p add to the choice, for 262,144 tokens."""
    types = {"weights": "*i64", "counts": "*i32", "scores": "*fp64", "tokens": "*i32", "chosen": "*i32"}
    types |= {"top_ks": "*i64"}
    shape = {"width": 128, "segment_block": 64, "steps": 6, "unit": 2.0**43, "masked": masked, "penalized": True}
    kernel, name = filter_jit.weigh, f"{dtype} masked{masked:d}"
    yield f"filter.weigh {name}", compiled(kernel, capability, shape | {"block": 4096}, dtype, warps=16, types=types)
    shape |= {"chunk_block": 2048, "tile": 8, "step_block": 8}
    yield f"filter.pick {name}", compiled(filter_jit.pick, capability, shape, dtype, warps=8, types=types)


def penalties(capability: int, dtype: str, *, every: bool) -> Iterator[tuple[str, Any]]:
    """Rows of logits changed by histories and their own paths, and what is committed counted."""
    types = {"words": "*i32", "biases": "*fp64", "numbers": "*fp64"}
    types |= dict.fromkeys(("slots", "committed", "n_committed"), "*i64")
    for nodes in (1, 64, 256) if every else (64,):
        shape = {"block": 1024, "node_block": nodes, "depth_block": 16 if nodes > 1 else 0}
        binary = compiled(penalty_jit.penalize, capability, shape, dtype, types=types, fuses=False)
        assert "fma" not in binary.asm["ptx"], "it rounds once where the reference rounds twice"
        yield f"penalize {dtype} {nodes}", binary
    yield "penalty.count", compiled(penalty_jit.count, capability, {"column_block": 16}, warps=1, types=types)


def contexts(capability: int, *, every: bool) -> Iterator[tuple[str, Any]]:
    """Rows laid with a context, and the texts that it is looked up in."""
    names = ("text", "lengths", "tables", "matches", "levels", "said_tokens", "said_levels")
    types = dict.fromkeys(names, "*i32") | dict.fromkeys(("confidence", "said_shares", "shares"), "*fp64")
    types |= dict.fromkeys(("hits", "rests", "scores"), "*fp32")
    types |= dict.fromkeys(("slots", "factors", "committed"), "*i64")
    for block in (32, 64, 128, 256) if every else (64,):
        for paired in (False, True):
            shape = {"block": block, "words": -(-block // 64), "rank_block": 32, "paired": paired}
            name, warps = f"context.build {block} paired{paired:d}", max(block // 128, 1)
            yield name, compiled(context_build_jit.build, capability, shape, warps=warps, types=types)
    for block in (2, 8, 32) if every else (32,):
        for paired in (False, True):
            shape = {"rank_block": block, "paired": paired}
            name = f"context.weigh {block} paired{paired:d}"
            yield name, compiled(context_rows_jit.weigh, capability, shape, types=types)
    shape = {"column_block": 32}
    yield "context.note", compiled(context_jit.note, capability, shape, warps=1, types=types)
    yield "context.lay", compiled(context_jit.lay, capability, {"block": 256}, types=types)


def pairs(capability: int, *, every: bool) -> Iterator[tuple[str, Any]]:
    """Scores of candidates behind candidates: ranks, rank of the head."""
    types = dict.fromkeys(("before", "behind", "rest", "parts", "scores"), "*fp32") | {"table": "*i64"}
    for ranks, rank in ((8, 16), (16, 64), (16, 128), (32, 64), (32, 256)) if every else ((16, 64),):
        shape = {"rank_block": ranks, "factor_block": rank, "gated": True}
        warps = pair_warps(ranks, rank)
        yield f"pair {ranks} {rank}", compiled(pair_jit.pair, capability, shape, warps=warps, types=types)


def layers(capability: int, *, every: bool) -> Iterator[tuple[str, Any]]:
    """Norm, gated unit, digits, rows of a table, and the report."""
    for block in (1024, 4096, 8192) if every else (4096,):
        flags = {"block": block, "adds": True, "biased": True, "keeps": True}
        warps = min(16, block // 256)
        yield f"add_norm {block}", compiled(norm_jit.add_norm_kernel, capability, flags, warps=warps, types=LAYERS)
        types = {"x": "*bf16", "digits": "*i8", "scale": "*fp32"}
        warps = min(16, block // 512)
        yield (
            f"digits {block}",
            compiled(matmul_jit.digits_kernel, capability, {"BLOCK": block}, warps=warps, types=types),
        )
    for turns in (False, True):
        types = {"gate_up": "*bf16", "out": "*bf16"}
        yield (
            f"swiglu{turns:d}",
            compiled(norm_jit.swiglu_kernel, capability, {"block": 1024, "turns": turns}, types=types),
        )
    types = {"ids": "*i64", "table": "*bf16", "out": "*bf16"}
    yield "rows", compiled(gather_jit.rows_kernel, capability, {"block": 1024}, types=types)
    shape = {"block": 64, "column_block": 16, "has_tree": True}
    names = ("committed", "n_accepted", "n_committed", "tree_count", "tree_tokens", "out")
    types = dict.fromkeys(names, "*i64")
    yield "report", compiled(report_jit.report_kernel, capability, shape, warps=1, types=types)


def resources(binary: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its local memory (spills), by cuobjdump."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (-1, -1)


def main() -> None:
    """Arguments: capabilities, then --every."""
    report = {}
    for capability in map(int, sys.argv[1].split(",")):
        for name, binary in kernels(capability, every="--every" in sys.argv):
            registers, stack = resources(binary.asm["cubin"])
            report[f"sm_{capability} {name}"] = [binary.metadata.shared, registers, stack]
            print(f"sm_{capability} {name}", report[f"sm_{capability} {name}"], file=sys.stderr)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
