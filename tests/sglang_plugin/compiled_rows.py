"""Compile the plug-in's kernels for cards that need not be there; run as a script, without the interpreter.

Prints one JSON object: name -> bytes of shared memory.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ddtree.sglang import rows_jit

# What a pointer points to, where it is not int64; the rest are numbers.
POINTERS = {"req_to_token": "i32", "mask": "u8", "told": "u8", "kept": "i32", "tree_kept": "i32", "index": "i32"}
NUMBERS = {"pitch", "state_pitch", "mask_token", "committed", "drafted", "width", "row_words"}


def compiled(kernel: Any, capability: int, constants: Mapping[str, Any], warps: int) -> Any:
    """The kernel for a card."""
    signature = {
        name: "constexpr" if name in constants else "i32" if name in NUMBERS else "*" + POINTERS.get(name, "i64")
        for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=dict(constants))
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


def main() -> None:
    """Argument: a capability."""
    capability, report = int(sys.argv[1]), {}
    for block in (32, 64, 256):
        for prefix in (False, True):
            shape = {"block": block, "tile": 32, "batch_block": 64, "prefix": prefix}
            report[f"lay {block} {prefix}"] = compiled(rows_jit.lay, capability, shape, 4).metadata.shared
        report[f"stage {block}"] = compiled(rows_jit.stage, capability, {"columns": block}, 1).metadata.shared
    for in_graph in (False, True):
        shape = {"columns": 16, "shadows": in_graph, "gated": in_graph}
        report[f"commit {in_graph}"] = compiled(rows_jit.commit, capability, shape, 1).metadata.shared
    print(json.dumps(report))


if __name__ == "__main__":
    main()
