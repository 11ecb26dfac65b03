"""`ddtree train export`: a checkpoint as a folder in z-lab's format, which is read back before it counts as done."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ddtree.config import PAIRWISE
from ddtree.drafter import DrafterConfig, PairwiseHead, fingerprint
from ddtree.errors import InvalidOption
from ddtree.training.checkpoint import Run, weights_of
from ddtree.training.config import PRECISIONS, TrainConfig
from ddtree.training.model import DraftModel


def export(config: TrainConfig, output: Path, which: str = "best", dtype: str = "bfloat16") -> dict[str, Any]:
    """Write config.json and model.safetensors, and the run's pairwise head where it was fitted to this checkpoint.

    which: best or last; dtype of the weights: bfloat16 or float32.

    Raises InvalidOption where the folder holds something already.
    """
    if dtype not in PRECISIONS[1:]:
        raise InvalidOption(f"dtype {dtype!r} is unknown: choose one of {', '.join(PRECISIONS[1:])}", param="dtype")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InvalidOption(f"{output} is there already: name a new folder", param="output")
    state = Run(Path(config.folder)).need(which)
    raw: dict[str, Any] = json.loads(state["raw"]) | {"dtype": dtype, "torch_dtype": dtype}
    own = Path(config.folder) / PAIRWISE
    head = PairwiseHead.read(own) if own.exists() else None  # or it is refused before anything is written
    weights = {name: w.to(getattr(torch, dtype)).contiguous() for name, w in weights_of(state).items()}
    output.mkdir(parents=True, exist_ok=True)
    save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
    (output / "config.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    DraftModel.read(DrafterConfig.read(raw), output)
    paired = head is not None and head.drafter == fingerprint(weights["norm.weight"])
    if head is not None and paired:
        shutil.copyfile(own, output / PAIRWISE)
    return {"folder": str(output), "step": state["step"], "heldout_chain": state["best"], "pairwise": paired,
            "parameters": sum(w.numel() for w in weights.values()),
            "bytes": (output / "model.safetensors").stat().st_size}  # fmt: skip
