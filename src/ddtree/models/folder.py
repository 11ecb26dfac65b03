"""Is a folder a whole model in Hugging Face format? Reads headers and sizes only, never the weights."""

import json
from pathlib import Path
from typing import Any

from ddtree.errors import DamagedFile, ModelNotFound, UnsupportedModel

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
PICKLED = ("*.bin", "*.pt", "*.pth")
INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes; the limit that safetensors itself sets


def check_folder(folder: Path, *, tokenizer: bool) -> Path:
    """Return `folder` when it holds config.json, sound safetensors files and, if asked for, a tokenizer.

    Raises ModelNotFound (something is not there), DamagedFile (there, but cut short or not what its name says) or
    UnsupportedModel (weights in pickled files, which may run code when they are loaded).
    """
    if not (folder / "config.json").is_file():
        raise ModelNotFound(
            f"{folder} is not a model folder: it has no config.json. "
            "Give a folder in Hugging Face format, or the path of a .gguf file"
        )
    read_json(folder / "config.json")
    for file in weight_files(folder):
        check_safetensors(file)
    if tokenizer and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelNotFound(f"{folder} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}): copy the model's there")
    return folder


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: those its index names, else all there are."""
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise DamagedFile(f"{folder / INDEX} has no weight_map: copy or download it again")
        return [folder / name for name in sorted(set(weight_map.values()))]
    files = sorted(folder.glob("*.safetensors"))
    if not files and any(next(folder.glob(pattern), None) for pattern in PICKLED):
        raise UnsupportedModel(
            f"{folder} has its weights in pickled files (.bin) only, which may run code when loaded. "
            "Convert them once: transformers' save_pretrained writes safetensors"
        )
    if not files:
        raise ModelNotFound(f"{folder} has a config.json but no weights (*.safetensors): copy or download them again")
    return files


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises DamagedFile when it is something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedFile(f"{path} cannot be read as JSON ({error}): copy or download it again") from error
    if not isinstance(value, dict):
        raise DamagedFile(f"{path} should hold a JSON object: copy or download it again")
    return value


def check_safetensors(path: Path) -> None:
    """Raise DamagedFile unless the header of a safetensors file is sound and the file as long as the header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER, size - 8):
                raise ValueError("it does not begin with a safetensors header")
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
        if size != expected:
            raise ValueError(f"it has {size} bytes, its header asks for {expected}")
    except FileNotFoundError as error:
        raise DamagedFile(f"{path} is missing, though the index names it: copy or download it again") from error
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        reason = str(error) if isinstance(error, (OSError, ValueError)) else "its header is not sound"
        raise DamagedFile(f"{path} is damaged ({reason}): copy or download it again") from error
