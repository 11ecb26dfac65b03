"""Data, fits, evaluation and export in one go, on several GPUs and by the clock, with nobody looking on.

    PYTHONPATH=src python benchmarks/training/run.py --gpus 0,1,2 --minutes 22 --work /tmp/train \
        --configs benchmarks/training/warm.toml,benchmarks/training/small.toml --sets /tmp/sets

All GPUs make data first (--data, a share of the time), then each configuration is fitted on a GPU of its own until the
time is nearly up, exported to WORK/export/NAME, and measured on the suite, on the prompts in --sets (evaluation_sets.py
makes them) and at temperature 1. What happens is told in WORK/status.txt; every part has a log in WORK/logs. One
that fails is tried again in a plainer way, and does not stop the others. WORK/summary.json has all results.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PARTS = HERE / "parts.py"
DATA_WAYS = ([], ["data.decoder=plain"], ["data.decoder=engine"])  # what a worker that failed tries next
FIT_WAYS = ([], ["fit.attention=sdpa"], ["fit.attention=sdpa", "fit.micro_batch=8"])
GRACE = 60.0  # seconds that a part gets beyond its time before it is ended


class Show:
    """The whole run: its clock, its status file, its parts."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.work, self.began = given, Path(given.work).absolute(), time.monotonic()
        for folder in ("logs", "results", "export", "runs"):
            (self.work / folder).mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self.results: dict[str, Any] = {}

    def tell(self, text: str) -> None:
        """One line of the status file."""
        line = f"{time.strftime('%H:%M:%S', time.gmtime())} {self.passed:6.0f}s  {text}\n"
        with self._lock, (self.work / "status.txt").open("a", encoding="utf-8") as file:
            file.write(line)
            sys.stdout.write(line)
            sys.stdout.flush()

    @property
    def passed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.began

    @property
    def left(self) -> float:
        """Seconds until the minutes are over."""
        return self.given.minutes * 60 - self.passed

    def part(
        self, kind: str, name: str, gpu: str, config: Path, sets: Sequence[str], seconds: float, **more: Any
    ) -> bool:
        """Run a part in a process of its own; whether it ended well. It is ended when its time is long over."""
        asked = {"kind": kind, "config": str(config), "sets": [*self.given.set, *self._common(gpu), *sets],
                 "result": str(self.work / "results" / f"{name}.json"), **more}  # fmt: skip
        log = self.work / "logs" / f"{name}.log"
        self.tell(f"{name}: begins on {gpu}, {seconds:.0f} s {' '.join(sets)}")
        began = time.monotonic()
        with log.open("a", encoding="utf-8") as out:
            process = subprocess.Popen([sys.executable, str(PARTS), gpu, json.dumps(asked)], stdout=out, stderr=out)
            try:
                code = process.wait(max(seconds, 0) + GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                self.tell(f"{name}: ENDED, it did not come back; see {log}")
                return False
        took = time.monotonic() - began
        if code:
            self.tell(f"{name}: FAILED with {code} after {took:.0f} s: {_last(log)}; see {log}")
            return False
        result = self.results[name] = json.loads(Path(asked["result"]).read_text(encoding="utf-8"))
        self.tell(f"{name}: done in {took:.0f} s: {json.dumps(_brief(result))[:400]}")
        return True

    def _common(self, gpu: str) -> list[str]:
        device = "cpu" if gpu == "cpu" else "cuda"  # the part sees its own GPU alone
        return [f"target.device={device}", f"data.folder={self.work / 'data'}"]

    def data(self) -> bool:
        """Shards by all GPUs; whether there are any."""
        given, config = self.given, Path(self.given.data)
        excluded = [str(path) for path in self.sets()]
        sets = [f"data.exclude={json.dumps(excluded)}"] if excluded else []
        workers = [gpu for gpu in given.gpus for _ in range(given.workers)]
        end = self.passed + given.minutes * 60 * given.data_share

        def work(index: int, gpu: str) -> None:
            for attempt, way in enumerate(DATA_WAYS):
                seconds = end - self.passed
                name = f"data-{index}" + (f"-again{attempt}" if attempt else "")
                more = {"worker": [index, len(workers)], "minutes": max(seconds, 1) / 60}
                if self.part("data", name, gpu, config, [*sets, *way], seconds, **more) or end - self.passed < 20:
                    return

        _together(self.tell, [(work, (index, gpu)) for index, gpu in enumerate(workers)])
        return any((self.work / "data").glob("shard-*.safetensors"))

    def check(self) -> None:
        """Read all shards and count, beside the fits."""
        self.part("check", "data-check", "cpu", Path(self.given.data), [], 120)

    def sets(self) -> list[Path]:
        """Evaluation prompts."""
        return sorted(Path(self.given.sets).glob("*.jsonl")) if self.given.sets else []

    def drafter(self, gpu: str, config: Path) -> None:
        """Fit, export and measure one configuration."""
        name, reserve = config.stem, self.given.reserve * 60
        own = [f"folder={self.work / 'runs' / name}"]
        ends_at = time.time() + max(self.left - reserve, 10)
        for attempt, way in enumerate(FIT_WAYS):
            seconds = ends_at - time.time()
            part = f"fit-{name}" + (f"-again{attempt}" if attempt else "")
            well = self.part("fit", part, gpu, config, [*own, *way], seconds, ends_at=ends_at)
            if well or ends_at - time.time() < 30:
                break
        targets = {"suite": "suite", **{path.stem: str(path) for path in self.sets()}}
        more = {"output": str(self.work / "export" / name), "prompts": targets, "ends_at": time.time() + self.left}
        self.part("judge", f"judge-{name}", gpu, config, own, max(self.left, 20), **more)

    def run(self) -> int:
        """Everything; 0 where at least one drafter was exported."""
        given = self.given
        self.tell(f"begins: {given.minutes:g} minutes on {','.join(given.gpus)}, {given.configs}")
        self.part("prepare", "prepare", "cpu", Path(given.data), [], 240)
        if not self.data():
            self.tell("FAILED: there are no data")
            return 1
        configs = [Path(config) for config in given.configs]
        fits = [(self.drafter, pair) for pair in zip(given.gpus, configs, strict=False)]
        _together(self.tell, [(self.check, ()), *fits])
        summary = self.work / "summary.json"
        summary.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        made = [path.parent.name for path in (self.work / "export").glob("*/model.safetensors")]
        self.tell(f"over: exported {', '.join(made) or 'nothing'}; {summary}")
        return 0 if made else 1


def _together(tell: Callable[[str], None], calls: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
    """Each in a thread; what one raises is told, and stops no other."""

    def guarded(call: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            call(*args)
        except Exception:
            tell(f"FAILED: {' '.join(traceback.format_exc().split())}")

    threads = [threading.Thread(target=guarded, args=pair) for pair in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _last(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def _brief(result: dict[str, Any]) -> dict[str, Any]:
    """What fits into a line."""
    return {name: value for name, value in result.items() if not isinstance(value, dict | list)} | result.get(
        "short", {}
    )


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Exits where it makes no sense."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--gpus", required=True, help="their numbers, as 0,1; cpu stands for a processor")
    parser.add_argument("--minutes", type=float, required=True, help="for everything")
    parser.add_argument("--configs", required=True, help="TOML files, one a GPU at most, comma between them")
    parser.add_argument("--data", default=str(HERE / "data.toml"), help="the TOML file whose [data] is made")
    parser.add_argument("--work", required=True, help="a folder; the same one goes on where it was")
    parser.add_argument("--sets", help="a folder of JSONL files: kept out of the data, and measured")
    parser.add_argument("--set", action="append", default=[], help="FIELD=VALUE, for every part")
    parser.add_argument("--data-share", type=float, default=0.22, help="part of the minutes for data")
    parser.add_argument("--reserve", type=float, default=2.5, help="minutes for export and evaluation")
    parser.add_argument("--workers", type=int, default=2, help="processes that make data on each GPU")
    given = parser.parse_args(arguments)
    given.gpus, given.configs = given.gpus.split(","), given.configs.split(",")
    if len(given.configs) > len(given.gpus):
        parser.error(f"{len(given.configs)} configurations for {len(given.gpus)} GPUs: give one each at most")
    for path in (*given.configs, given.data):
        if not Path(path).is_file():
            parser.error(f"{path} does not exist")
    if given.sets and not Path(given.sets).is_dir():
        parser.error(f"--sets {given.sets} is no folder: make it with evaluation_sets.py")
    return given


if __name__ == "__main__":
    sys.exit(Show(read_arguments()).run())
