"""What the benchmark scripts share: the machine's name, alternating timing, and where results go."""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ddtree.bench.report import cpu_name

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Date, processor, GPU, threads, versions and the command."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": " ".join(["python", *sys.argv]),
    }


def alternate(functions: Mapping[str, Callable[[], Any]], turns: int) -> dict[str, float]:
    """Median milliseconds of each function; they take turns, so that a busy moment meets all of them."""
    for function in functions.values():
        function()
        function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(turns):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(1000 * (time.perf_counter() - started))
    return {name: round(statistics.median(values), 3) for name, values in times.items()}


def finish(report: dict[str, Any], output: Path | None) -> None:
    """Print the report as one JSON line, the last of stdout, and write it where asked."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every script has."""
    made = argparse.ArgumentParser(description=doc)
    made.add_argument("--output", type=Path, help="write the JSON here too")
    return made
