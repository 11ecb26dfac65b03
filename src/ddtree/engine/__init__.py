"""The only decode loop: every mode is a choice of rows and of what is committed."""

from ddtree.engine.engine import Engine
from ddtree.engine.observer import Observer, RoundRecord, StageTimer
from ddtree.engine.request import Request
from ddtree.engine.result import Chunk, Generation, Shadow, SpeculativeStats
from ddtree.engine.scheduler import Scheduler, SchedulerStats
from ddtree.engine.text import Text

__all__ = [
    "Chunk",
    "Engine",
    "Generation",
    "Observer",
    "Request",
    "RoundRecord",
    "Scheduler",
    "SchedulerStats",
    "Shadow",
    "SpeculativeStats",
    "StageTimer",
    "Text",
]
