"""One part of run.py in a process of its own: GPU, then what to do as JSON. The result goes to a JSON file."""

import faulthandler
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any


def _prepare(config: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """The target is converted once, before many processes ask for it."""
    from ddtree import models

    return {"folder": str(models.resolve_model(config.target.model))}


def _data(config: Any, asked: dict[str, Any]) -> dict[str, Any]:
    from ddtree.training.data import generate_data

    index, count = asked["worker"]
    return generate_data(config, max_minutes=asked["minutes"], quiet=True, worker=(index, count))


def _check(config: Any, asked: dict[str, Any]) -> dict[str, Any]:
    from ddtree.training.data import check_data

    return check_data(config)


def _fit(config: Any, asked: dict[str, Any]) -> dict[str, Any]:
    from ddtree.training.fit import fit

    return fit(config, ends_at=asked["ends_at"], quiet=True)


def _judge(config: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Export first, then one set of prompts after another, as far as the time goes."""
    from ddtree.training.evaluate import evaluate
    from ddtree.training.export import export

    end, output = asked["ends_at"], Path(asked["output"])
    found: dict[str, Any] = {"export": {}, "sets": {}, "short": {}}
    for which in ("best", "last"):
        folder = output if which == "best" else output.with_name(f"{output.name}-last")
        if not folder.exists():
            found["export"][which] = export(config, folder, which)
    from dataclasses import replace

    for heat in (0.0, 1.0):
        pooled: dict[str, list[float]] = {}
        warm = replace(config, eval=replace(config.eval, temperature=heat))
        for name, prompts in asked["prompts"].items():
            if time.time() > end - 15:
                logging.warning("no time for %s at temperature %g", name, heat)
                continue
            report = evaluate(warm, str(output), prompts, quiet=True)
            found["sets"][f"{name}@{heat:g}"] = report
            lengths = report["acceptance_length"]
            found["short"][f"{name}@{heat:g}"] = {k: round(v, 3) for k, v in lengths.items()}
            if name != "suite":
                for k, v in lengths.items():
                    both = pooled.setdefault(k, [0.0, 0.0])
                    both[0] += v * report["rounds"][k]
                    both[1] += report["rounds"][k]
            _write(asked, found)  # what is there, should the time run out
        if pooled:
            found["short"][f"sets together@{heat:g}"] = {k: round(a / max(b, 1), 3) for k, (a, b) in pooled.items()}
    return found


PARTS = {"prepare": _prepare, "data": _data, "check": _check, "fit": _fit, "judge": _judge}


def _write(asked: dict[str, Any], found: dict[str, Any]) -> None:
    Path(asked["result"]).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """GPU and JSON from the command line."""
    faulthandler.enable()
    gpu, asked = sys.argv[1], json.loads(sys.argv[2])
    os.environ["CUDA_VISIBLE_DEVICES"] = "" if gpu == "cpu" else gpu  # before torch looks
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    logging.info("%s on %s: %s", asked["kind"], gpu, json.dumps(asked))
    from ddtree.training.config import read

    found = PARTS[asked["kind"]](read(Path(asked["config"]), asked["sets"]), asked)
    logging.info("done: %s", json.dumps(found)[:2000])
    _write(asked, found)


if __name__ == "__main__":
    main()
