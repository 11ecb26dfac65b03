"""A checkpoint in AWQ's format from one in half precision, to see a quantised target inside SGLang.

python benchmarks/sglang_awq.py --target DIR --out DIR [--group 64]

The linear layers of the decoder are rounded to 4 bits, each group of inputs with a scale and a zero of its own. AWQ's
search for scales, which makes such a model good, is left out: what is asked of it is that modes agree, not that it is
wise. Layout: qweight [in, out / 8], qzeros [in / group, out / 8] int32, scales [in / group, out] float16.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight neighbours lies in each nibble, the lowest first
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def pack(values: Tensor) -> Tensor:
    """[rows, out] integers from 0 to 15 -> [rows, out / 8] int32."""
    eights = values.to(torch.int64).view(len(values), -1, 8)
    packed = sum(eights[..., which] << (4 * nibble) for nibble, which in enumerate(ORDER))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def quantise(weight: Tensor, group: int) -> dict[str, Tensor]:
    """weight: [out, in]. Raises ValueError where it cannot be cut into groups and eights."""
    outputs, inputs = weight.shape
    if inputs % group or outputs % 8:
        raise ValueError(f"a weight of {outputs} x {inputs} has no groups of {group} inputs and 8 outputs")
    groups = weight.float().t().reshape(inputs // group, group, outputs)
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-6).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    values = (groups / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 15)
    return {"qweight": pack(values.view(inputs, outputs)), "qzeros": pack(zeros), "scales": scales}


def convert(target: Path, out: Path, group: int) -> int:
    """Write the folder; returns how many layers were quantised."""
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    found: dict[str, Tensor] = {}
    for file in sorted(target.glob("*.safetensors")):
        found |= load_file(file)
    told, count = {}, 0
    for name, tensor in found.items():
        stem = name.removesuffix(".weight")
        if stem.rpartition(".")[2] in LAYERS and name != stem:
            told |= {f"{stem}.{part}": value.contiguous() for part, value in quantise(tensor, group).items()}
            count += 1
        else:
            told[name] = tensor.half().contiguous() if tensor.is_floating_point() else tensor
    config |= {"dtype": "float16", "torch_dtype": "float16"}
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    config["quantization_config"] |= {"version": "gemm", "modules_to_not_convert": ["lm_head"]}
    out.mkdir(parents=True, exist_ok=True)
    for file in target.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copy(file, out)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    save_file(told, out / "model.safetensors", metadata={"format": "pt"})
    return count


def main() -> None:
    """See the top of the file."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--target", type=Path, required=True)
    made.add_argument("--out", type=Path, required=True, help="the folder that is written")
    made.add_argument("--group", type=int, default=64, help="inputs that share a scale")
    options = made.parse_args()
    print(f"{convert(options.target, options.out, options.group)} layers in {options.out}")


if __name__ == "__main__":
    main()
