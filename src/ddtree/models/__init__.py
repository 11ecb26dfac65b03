"""Names to local files: the embedded model, local folders, GGUF files, hub ids. A leaf: imports errors and config."""

from ddtree.models.listing import ModelEntry, list_models
from ddtree.models.names import resolve_drafter, resolve_model
from ddtree.models.store import cache_dir, drop_unfinished

__all__ = ["ModelEntry", "cache_dir", "drop_unfinished", "list_models", "resolve_drafter", "resolve_model"]
