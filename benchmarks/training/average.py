"""The weighted mean of drafters that began with the same weights: often better than each of them.

    python benchmarks/training/average.py OUT one=0.7 other=0.3

Each is a folder in z-lab's format; OUT, a new folder, gets the first one's configuration and the mean in the dtype of
the weights. Model soups: Wortsman et al., 2022 (arXiv 2203.05482), section 2.
"""

import argparse
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def average(parts: Sequence[tuple[Path, float]], output: Path) -> None:
    """parts: folders and weights that add up to 1. Raises ValueError where they do not belong together."""
    if not math.isclose(sum(weight for _, weight in parts), 1.0, rel_tol=0, abs_tol=1e-6):
        raise ValueError(f"the weights must add up to 1, not {sum(weight for _, weight in parts):g}")
    first = parts[0][0]
    for folder, _ in parts[1:]:
        if (folder / "config.json").read_bytes() != (first / "config.json").read_bytes():
            raise ValueError(f"{folder} and {first} have different config.json: average drafters of one shape")
    tensors = [(load_file(folder / "model.safetensors"), weight) for folder, weight in parts]
    mean: dict[str, torch.Tensor] = {}
    for name, like in tensors[0][0].items():
        total = torch.zeros_like(like, dtype=torch.float32)
        for found, weight in tensors:
            total += weight * found[name].float()
        mean[name] = total.to(like.dtype)
    output.mkdir(parents=True)
    save_file(mean, output / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(first / "config.json", output)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the top of the file."""
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    made.add_argument("output", type=Path, metavar="OUT")
    made.add_argument("parts", nargs="+", metavar="FOLDER=WEIGHT")
    given = made.parse_args(arguments)
    parts = []
    for part in given.parts:
        folder, _, weight = part.rpartition("=")
        if not (Path(folder) / "model.safetensors").is_file():
            made.error(f"{part!r}: write FOLDER=WEIGHT, with a folder that holds model.safetensors")
        try:
            parts.append((Path(folder), float(weight)))
        except ValueError:
            made.error(f"{part!r}: {weight!r} is no number")
    if given.output.exists():
        made.error(f"{given.output} exists: name a new folder")
    try:
        average(parts, given.output)
    except ValueError as error:
        made.error(str(error))


if __name__ == "__main__":
    main()
