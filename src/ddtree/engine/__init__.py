"""The only decode loop: every mode is a choice of rows and of what is committed."""

from ddtree.engine.engine import Chunk, Engine, Generation, Shadow
from ddtree.engine.observer import Observer, StageTimer
from ddtree.engine.text import Text

__all__ = ["Chunk", "Engine", "Generation", "Observer", "Shadow", "StageTimer", "Text"]
