"""What `ddtree models` shows."""

from dataclasses import dataclass
from pathlib import Path

from ddtree.config import DRAFT_VOCABULARY, EMBEDDED
from ddtree.models import store
from ddtree.models.folder import read_json
from ddtree.models.names import BUNDLED_DRAFTER, bundled_drafter
from ddtree.models.wheel import SMOLLM2


@dataclass(frozen=True)
class ModelEntry:
    """One model that can be named without a path."""

    name: str  # what --model or --drafter takes
    kind: str  # "target" or "drafter"
    size: int  # bytes on disk; 0 when it is not there yet
    licence: str
    source: str  # where it comes from, in words
    path: Path  # its folder, which is not there yet when `cached` is false
    cached: bool  # usable without a download


def list_models() -> list[ModelEntry]:
    """The embedded model (there or not), the bundled drafter, then the GGUF files that were converted, by name."""
    embedded = store.models_dir() / EMBEDDED
    cached = store.is_whole(embedded)
    size = _size(embedded) if cached else 0
    entries = [
        ModelEntry(EMBEDDED, "target", size, SMOLLM2.licence, SMOLLM2.source, embedded, cached),
        _bundled(),
    ]
    folders = sorted(store.models_dir().iterdir()) if store.models_dir().is_dir() else []
    for folder in folders:
        manifest = store.read_manifest(folder)
        if manifest is not None and folder != embedded and store.is_whole(folder):
            entries.append(
                ModelEntry(folder.name, "target", _size(folder), manifest.licence, manifest.source, folder, True)
            )
    return entries


def _bundled() -> ModelEntry:
    folder = bundled_drafter()
    source = f"DFlash drafter for {EMBEDDED}, shipped with ddtree"
    if (folder / DRAFT_VOCABULARY).is_file():
        source += f"; drafts of the {read_json(folder / DRAFT_VOCABULARY)['size']} most frequent tokens"
    return ModelEntry(BUNDLED_DRAFTER, "drafter", _size(folder), "Apache-2.0", source, folder, True)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
