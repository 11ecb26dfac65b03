"""From target features and the root token, returns per-depth logits."""

from ddtree.drafter.base import Drafter
from ddtree.drafter.config import DrafterConfig
from ddtree.drafter.model import DFlashDrafter

__all__ = ["DFlashDrafter", "Drafter", "DrafterConfig"]
