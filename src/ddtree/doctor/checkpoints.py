"""What --model and --drafter stand for, read in a child process. Nothing is downloaded and nothing converted.

The embedded engine's own readers say what it refuses, so that both say the same.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree.config import EMBEDDED
from ddtree.doctor import contents
from ddtree.errors import DamagedFile, DDTreeError, ModelNotFound, UnsupportedModel
from ddtree.models import convert, resolve_drafter, resolve_model, store
from ddtree.models.folder import check_folder, read_json
from ddtree.models.names import BUNDLED_DRAFTER, HUB_ID
from ddtree.models.wheel import SMOLLM2

if TYPE_CHECKING:
    from ddtree.drafter.config import DrafterConfig
    from ddtree.target.config import LlamaConfig

KEPT = (
    "model_type", "architectures", "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings",
    "tie_word_embeddings", "block_size", "num_target_layers",
)  # fmt: skip
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
MIB = 1 << 20


def look(model: str, drafter: str, engine: str = "embedded") -> dict[str, Any]:
    """Both as the fields of `facts.Checkpoint`. The drafter is None for "none".

    For sglang, kinds of files that only the embedded engine refuses count as being here.
    """
    target, raw = _target(model, engine)
    target = _judged(target, raw, engine)
    if drafter == "none":
        return {"model": target, "drafter": None}
    draft, draft_raw = _drafter(drafter, model, engine)
    return {"model": target, "drafter": _judged_drafter(draft, draft_raw, raw, engine)}


def _target(name: str, engine: str) -> tuple[dict[str, Any], dict[str, Any]]:
    found: dict[str, Any] = {"name": name, "state": "missing"}
    try:
        path = Path(name).expanduser()
        if name == EMBEDDED:
            folder = store.models_dir() / EMBEDDED
            if not store.is_whole(folder):
                size = 3 * SMOLLM2.wheel_bytes // MIB
                return found | {"state": "to fetch", "weights_mib": size, "to_write": True}, {}
        elif gguf := _gguf(path):
            return _from_gguf(found, gguf)
        elif not path.exists() and not (store.models_dir() / name).is_dir() and HUB_ID.fullmatch(name):
            hub = _cached(name, tokenizer=True)
            if hub is None:
                return found | _not_cached(name, "model"), {}
            folder = hub
        else:
            folder = resolve_model(name)  # a folder, or an error that says what a name may be
            if engine == "sglang" and not path.exists():
                raise ModelNotFound(f"{name} is a name of ddtree's own, which SGLang does not know: give {folder}")
        return _from_folder(found, folder)
    except UnsupportedModel as error:
        return _unread(found) if engine == "sglang" else (found | {"problem": str(error)}, {})
    except DamagedFile as error:
        return found | {"damage": str(error), "folder": name if Path(name).expanduser().exists() else None}, {}
    except DDTreeError as error:
        return found | {"problem": str(error)}, {}
    except (OSError, RuntimeError) as error:
        return found | {"problem": f"{name} cannot be read: {error}"}, {}


def _drafter(name: str, model: str, engine: str) -> tuple[dict[str, Any], dict[str, Any]]:
    found: dict[str, Any] = {"name": name, "state": "missing"}
    try:
        if name not in ("auto", BUNDLED_DRAFTER) and not Path(name).expanduser().exists() and HUB_ID.fullmatch(name):
            hub = _cached(name, tokenizer=False)
            if hub is None:
                return found | _not_cached(name, "drafter"), {}
            folder = hub
        else:
            resolved = resolve_drafter(name, model)
            if resolved is None:
                raise ModelNotFound(f"there is no drafter called {name}")
            folder = resolved
            if engine == "sglang" and name == BUNDLED_DRAFTER and not Path(name).exists():
                raise ModelNotFound(f"{name} is a name of ddtree's own, which SGLang does not know: give {folder}")
        return _from_folder(found, folder)
    except UnsupportedModel as error:
        return _unread(found) if engine == "sglang" else (found | {"problem": str(error)}, {})
    except DamagedFile as error:
        return found | {"damage": str(error), "folder": name if Path(name).expanduser().exists() else None}, {}
    except DDTreeError as error:
        return found | {"problem": str(error)}, {}
    except (OSError, RuntimeError) as error:
        return found | {"problem": f"{name} cannot be read: {error}"}, {}


def _gguf(path: Path) -> Path | None:
    if path.is_file() and path.suffix.lower() == ".gguf":
        return path
    if path.is_dir() and not (path / "config.json").is_file():
        inside = sorted(path.glob("*.gguf"))
        return inside[0] if len(inside) == 1 else None
    return None


def _from_gguf(found: dict[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    plan = convert.read_plan(path)
    raw = json.loads(plan.texts["config.json"])
    size = sum(2 * math.prod(place.shape) for place in plan.places.values())
    converted = store.models_dir().glob(f"{path.stem}-*")
    return found | _here(path, raw, size) | {"to_write": not any(map(store.is_whole, converted))}, raw


def _from_folder(found: dict[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    raw = read_json(folder / "config.json")
    return found | _here(folder, raw, contents.size(folder)), raw


def _here(path: Path, raw: Mapping[str, Any], size: int) -> dict[str, Any]:
    return {"state": "here", "folder": str(path), "config": summary(raw), "weights_mib": -(-size // MIB)}


def summary(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of config.json that are judged; those of a text part inside a larger model are its own."""
    nested = raw.get("text_config")
    whole = {**(nested if isinstance(nested, Mapping) else {}), **{k: v for k, v in raw.items() if v is not None}}
    kept = {name: whole[name] for name in KEPT if name in whole}
    layers = whole.get("layer_types") or []
    linear = "linear_attention" in layers or "full_attention_interval" in whole
    quantised = whole.get("quantization_config")
    method = quantised.get("quant_method", "yes") if isinstance(quantised, Mapping) else None
    return {**kept, "linear_attention": linear, "quantisation": method}


def _unread(found: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Files that are there, in a form that only their engine reads: pickled weights, other kinds of GGUF."""
    path = Path(found["name"]).expanduser()
    raw = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    return found | {"state": "here", "folder": str(path) if path.exists() else None, "config": summary(raw)}, raw


def _cached(name: str, *, tokenizer: bool) -> Path | None:
    """The snapshot of a hub repository, if all of it is on this machine."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except Exception:  # of many kinds, by release: whatever it was, the files are not there
        return None
    try:
        return check_folder(folder, tokenizer=tokenizer)
    except ModelNotFound:  # a part of it: the first start fetches the rest
        return None


def _not_cached(name: str, kind: str) -> dict[str, Any]:
    switch = next((key for key in OFFLINE if os.environ.get(key, "").upper() in ("1", "TRUE", "ON", "YES")), None)
    if switch is None:
        return {"state": "to fetch"}
    return {"problem": f"the {kind} {name} is not in the hub's cache, and {switch} forbids to fetch it"}


def _judged(found: dict[str, Any], raw: Mapping[str, Any], engine: str) -> dict[str, Any]:
    if not raw:
        return found
    try:
        from ddtree.target.config import LlamaConfig
    except Exception:  # torch does not load: that is a finding of its own
        return found
    folder = Path(found["folder"] or "")
    try:
        config = LlamaConfig.read(raw)
        if folder.is_dir():
            contents.check_model(folder, config)
            contents.check_tokenizer(folder)
    except DDTreeError as error:
        return found | _refused(error, engine)
    return found | {"context": _context(config) | {"longest": config.max_position}}


def _context(config: "LlamaConfig | DrafterConfig") -> dict[str, int]:
    return {"layers": config.num_layers, "kv_heads": config.num_kv_heads, "head_dim": config.head_dim}


def _refused(error: DDTreeError, engine: str) -> dict[str, Any]:
    """Damage is mended by other files; what another engine reads otherwise is no damage for it."""
    return {"damage" if isinstance(error, DamagedFile) and engine == "embedded" else "refusal": str(error)}


def _judged_drafter(
    found: dict[str, Any], raw: Mapping[str, Any], target: Mapping[str, Any], engine: str
) -> dict[str, Any]:
    if not raw:
        return found
    try:
        from ddtree.drafter.config import DrafterConfig
    except Exception:  # torch does not load: that is a finding of its own
        return found
    folder = Path(found["folder"] or "")
    try:
        config = DrafterConfig.read(raw)
        if folder.is_dir():
            contents.check_drafter(folder, config)
            found |= {"draft_vocab": contents.draft_vocab(folder, config)}
    except DDTreeError as error:
        return found | _refused(error, engine)
    found |= {"context": _context(config) | {"longest": config.max_position, "block": config.block_size}}
    sizes = [summary(target).get(name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")]
    if not all(isinstance(size, int) for size in sizes):
        return found
    try:
        config.check_fits(*sizes)  # type: ignore[arg-type]  # all are int
    except DDTreeError as error:
        return found | {"misfit": str(error)}
    return found
