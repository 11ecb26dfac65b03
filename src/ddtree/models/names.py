"""What a name given as --model or --drafter stands for, in the order in which it is tried."""

import re
from importlib.resources import files
from pathlib import Path

from ddtree.config import EMBEDDED
from ddtree.errors import DamagedFile, ModelNotFound, UnsupportedModel
from ddtree.models import convert, hub, store, wheel
from ddtree.models.folder import check_folder
from ddtree.models.wording import brief

BUNDLED_DRAFTER = "smollm2-135m-dflash"  # package data; made for EMBEDDED
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
KINDS = (
    f"A name is {EMBEDDED} or another one that `ddtree models` lists, a local folder in Hugging Face format, "
    "a .gguf file, or a hub id (org/name)"
)


def resolve_model(name: str) -> Path:
    """The local folder (config.json, *.safetensors, tokenizer files) of the target called `name`.

    Tried in turn: the embedded model, a local folder or .gguf file, a model that was converted before, a hub id.
    May download and convert, with progress bars on stderr. Raises ModelNotFound, DownloadFailed, DamagedFile or
    UnsupportedModel.
    """
    if name == EMBEDDED:
        return store.prepare(EMBEDDED, wheel.make_embedded)
    path = _local(name)
    if path is not None:
        return _from_folder(path) if path.is_dir() else _from_file(path)
    if name == Path(name).name and not name.startswith(".") and _local(str(store.models_dir() / name)) is not None:
        return _converted(store.models_dir() / name)
    return check_folder(_from_hub(name, "model"), tokenizer=True)


def resolve_drafter(name: str, model: str) -> Path | None:
    """The local folder of the drafter called `name`; None for "none".

    "auto" is the bundled drafter where `model` is the embedded model. Otherwise as `resolve_model`, without a
    tokenizer, and safetensors only. Raises as `resolve_model` does.
    """
    if name == "none":
        return None
    if name == "auto":
        if not _is_embedded(model):
            raise ModelNotFound(
                f"no drafter is known for {brief(model)}: "
                "pass --drafter FOLDER_OR_HUB_ID, or --mode ar with --drafter none",
                param="drafter",
            )
        name = BUNDLED_DRAFTER
    path = _local(name)
    if path is not None and path.is_file():
        raise UnsupportedModel(f"the drafter {name} is a file: give the folder with its config.json", param="drafter")
    if path is not None:
        return check_folder(path, tokenizer=False)
    if name == BUNDLED_DRAFTER:
        return check_folder(bundled_drafter(), tokenizer=False)
    return check_folder(_from_hub(name, "drafter"), tokenizer=False)


def bundled_drafter() -> Path:
    """The folder of the drafter that ships with the package."""
    return Path(str(files("ddtree"))) / "data" / BUNDLED_DRAFTER


def _is_embedded(model: str) -> bool:
    path = _local(model)
    return model == EMBEDDED or (path is not None and path.resolve() == (store.models_dir() / EMBEDDED).resolve())


def _local(name: str) -> Path | None:
    """The folder or file of that name, if there is one."""
    try:
        path = Path(name).expanduser()
        return path if name and (path.is_dir() or path.is_file()) else None
    except (OSError, RuntimeError):  # too long for a path, or the home folder of nobody: then it is no path
        return None


def _from_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        found = sorted(folder.glob("*.gguf"))
        if len(found) > 1:
            names = ", ".join(file.name for file in found)
            raise ModelNotFound(f"{folder} holds several .gguf files ({names}): give the path of one", param="model")
        if found:
            return convert.cached(found[0])
    return check_folder(folder, tokenizer=True)


def _converted(folder: Path) -> Path:
    if not store.is_whole(folder):
        raise DamagedFile(
            f"the converted model in {folder} is damaged, or another version of ddtree made it: "
            "pass the .gguf file that it was converted from, and it is made anew",
            param="model",
        )
    return folder


def _from_file(path: Path) -> Path:
    if path.suffix.lower() == ".gguf":
        return convert.cached(path)
    raise ModelNotFound(f"{path} is a file, but not a .gguf file. {KINDS}", param="model")


def _from_hub(name: str, param: str) -> Path:
    if not HUB_ID.fullmatch(name):
        raise ModelNotFound(
            f"there is no {param} called {brief(repr(name))} and no such folder or file. "
            + (KINDS.replace(EMBEDDED, BUNDLED_DRAFTER) if param == "drafter" else KINDS),
            param=param,
        )
    return hub.download(name, param)
