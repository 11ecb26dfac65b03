"""Log lines: on standard error, each with the id of the request it is about; and one of JSON for each round."""

import json
import logging
import sys
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ddtree.server.context import request_id
from ddtree.server.metrics import Metrics

if TYPE_CHECKING:
    from ddtree.engine.observer import RoundRecord

rounds = logging.getLogger("ddtree.rounds")


class Lines(logging.Formatter):
    """`2026-01-31 12:00:00.000 INFO [id] message`; the message alone for the rounds, whose lines are JSON."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)s [%(request_id)s] %(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback behind it where there is one."""
        if record.name == rounds.name:
            return record.getMessage()
        record.request_id = request_id()
        return super().format(record)


def log_to_stderr(level: str) -> None:
    """Lets the server's loggers write to standard error, from `level` up. A second call changes the level."""
    logger = logging.getLogger("ddtree")
    logger.setLevel(level.upper())
    for handler in logger.handlers:
        if isinstance(handler.formatter, Lines):
            logger.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines())
    logger.addHandler(handler)


class RoundLog:
    """An observer that writes one line of JSON for each round, and passes everything on to the metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._before: dict[str, float] = {}

    def stage(self, name: str) -> AbstractContextManager[None]:
        """A context around one stage."""
        return self._metrics.stage(name)

    def round(self, record: "RoundRecord") -> None:
        """A round has ended: logs it, with the stages since the line before."""
        self._metrics.round(record)
        if not rounds.isEnabledFor(logging.DEBUG):
            return
        spent = {name: clock.seconds for name, clock in self._metrics.stages.items()}
        stages = {name: round(seconds - self._before.get(name, 0.0), 6) for name, seconds in spent.items()}
        self._before = spent
        line = {
            "event": "round",
            "time": round(time.time(), 3),
            "sequences": record.batch,
            "waiting": record.waiting,
            "rows": record.rows,
            "drafted": record.drafted,
            "accepted": record.accepted,
            "depths": record.depths,
            "modes": record.modes,
            "ran": record.ran,
            "committed": record.committed,
            "seconds": round(record.seconds, 6),
            "stages": stages,
        }
        rounds.debug(json.dumps(line))
