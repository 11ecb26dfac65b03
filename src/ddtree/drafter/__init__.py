"""From target features and the root token, returns per-depth logits."""

from ddtree.drafter.base import Drafter
from ddtree.drafter.config import DrafterConfig
from ddtree.drafter.model import DFlashDrafter
from ddtree.drafter.pairwise import PairwiseHead, fingerprint
from ddtree.drafter.vocabulary import by_frequency, choose_vocabulary, read_vocabulary, write_vocabulary

__all__ = [
    "DFlashDrafter",
    "Drafter",
    "DrafterConfig",
    "PairwiseHead",
    "by_frequency",
    "choose_vocabulary",
    "fingerprint",
    "read_vocabulary",
    "write_vocabulary",
]
