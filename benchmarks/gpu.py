"""What a round costs on a CUDA card, against plain decoding and against transformers. JSON out.

    python benchmarks/gpu.py --output benchmarks/results/gpu.json          everything
    python benchmarks/gpu.py --quick                                       less of it: no part begun after 150 s
    python benchmarks/gpu.py --device cpu --shapes tiny --contexts 24 --parts copy,rounds,stages,transformers

Parts (--parts):
  copy          the card's bandwidth: bytes read plus written a second by a large copy
  rounds        T_round by rows, context and batch, and its ratio to T_ar
  draft8        rounds whose draft side is in 8 bits, in half precision (a card only)
  stages        draft, build, verify, accept and commit of plain decoding and of trees
  prompts       pieces of prompts, as graphs and as single launches
  transformers  the same weights in transformers: its own generation, and a plain DDTree over it
  static        transformers' generation with its static cache, which it compiles: about a minute a combination
  pair          a real pair (--model, --drafter): tokens a second and acceptance, alone and in batches
  profile       kernels of one round (a card only)
All but `pair` run on random weights made on the device with the shapes of real models (--shapes): nothing is
downloaded for them, next to nothing is accepted, and only times count. Without a card the same code is timed by the
clock and without graphs, which the JSON says. Every figure is the median over alternating blocks, with quartiles and
range. The file is written after every combination; an error is told in its place, and the exit status is 1 then.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import transformers

from common import finish, machine, parser
from ddtree.config import DTYPES, EMBEDDED, Speculation
from ddtree.engine.device import choose_device, choose_dtype
from gpu_pair import HOW as HOW_PAIR
from gpu_pair import compare_pair
from gpu_peers import HOW as HOW_PEERS
from gpu_peers import compare, compare_static
from gpu_rounds import HOW_STAGES, kernels, prompt_times, round_times, round_times_draft8, stage_times, tree_of
from gpu_shapes import LARGEST_BUDGET, SHAPES, Made, make
from gpu_timing import copy_gb_s

PARTS = ("copy", "rounds", "draft8", "stages", "prompts", "transformers", "static", "pair", "profile")
PROMPTS = (16, 43, 128, 300, 1000)  # tokens of a piece
CARD = ("draft8", "profile")  # parts that need one
QUICK = {
    "contexts": "2048", "batches": "1", "rows": "16,64", "stage_rows": "16", "blocks": 3, "turns": 8, "prompts": 2,
    "max_tokens": 48, "parts": "copy,rounds,draft8,stages,transformers,pair", "deadline": 150.0,
}  # fmt: skip


class Report:
    """The document, written anew with every part. Once the deadline is over, parts are left out, and named."""

    def __init__(self, args: argparse.Namespace, about: dict[str, Any]) -> None:
        self._args, self._started = args, time.perf_counter()
        self.body: dict[str, Any] = {**about, "rows": {}, "seconds": {}, "left_out": []}
        self.failed = False

    def part(self, label: str, into: dict[str, Any], name: str, run: Callable[[], Any]) -> None:
        """Run a part and note what came of it, an error too."""
        started, deadline = time.perf_counter(), self._args.deadline
        if deadline is not None and started - self._started > deadline:
            self.body["left_out"].append(f"{label}: {name}")
            return
        try:
            into[name] = run()
        except Exception as error:
            into[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
            self.failed = True
            print(f"{label}: {name}: {into[name]['error']}", file=sys.stderr)
        seconds = self.body["seconds"][f"{label}: {name}"] = round(time.perf_counter() - started, 1)
        print(f"{label}: {name}: {seconds} s", file=sys.stderr, flush=True)
        if self._args.output is not None:
            self._args.output.parent.mkdir(parents=True, exist_ok=True)
            self._args.output.write_text(json.dumps(self.body, indent=1) + "\n", encoding="utf-8")


def measure_shape(args: argparse.Namespace, report: Report, name: str, context: int, batch: int) -> None:
    """Every part of one shape, context and batch."""
    label = f"{name}, context {context}, batch {batch}"
    row = report.body["rows"][label] = {}
    loaded: list[Made] = []
    report.part(label, row, "model", partial(_load, args, loaded, report.body.get("copy_gb_s"), name, context, batch))
    if not loaded:
        return
    made, times = loaded[0], (args.turns, args.blocks)
    if "rounds" in args.parts:
        report.part(label, row, "rounds", partial(round_times, made, context, batch, args.rows, *times))
    if "draft8" in args.parts:
        report.part(label, row, "draft8", partial(round_times_draft8, made, context, batch, args.stage_rows, *times))
    if "stages" in args.parts:
        report.part(label, row, "stages", partial(stage_times, made, context, batch, args.stage_rows, *times))
    if "prompts" in args.parts and batch == 1:
        sizes = [size for size in PROMPTS if size <= context]
        report.part(label, row, "prompts", partial(prompt_times, made, sizes, args.turns, args.blocks))
    if "profile" in args.parts:
        report.part(label, row, "profile", partial(_profile, made, context, batch))
    for part, run in (("transformers", compare), ("static", compare_static)):
        if part in args.parts:
            report.part(label, row, part, partial(run, name, made, context, batch, *times))


def _load(args: argparse.Namespace, into: list[Made], copy: Any, name: str, context: int, batch: int) -> dict[str, Any]:
    """Make the models. Returns: what a step of plain decoding reads, and how long that takes at the copy's rate."""
    made = make(name, batch, context, args.torch_dtype, args.torch_device, not args.eager)
    into.append(made)
    read = made.weight_bytes + batch * made.kv_bytes
    floor = round(read / copy / 1e6, 4) if isinstance(copy, float) else None  # the part may be left out, or fail
    return {
        "rounds": made.engine.info()["rounds"],
        "weights_gb": round(made.weight_bytes / 1e9, 4),
        "read_gb": round(read / 1e9, 4),
        "ar_floor_ms": floor,
        "drafter": {"layers": made.drafter_config.num_layers, "block": made.drafter_config.block_size},
    }


def _profile(made: Made, context: int, batch: int) -> dict[str, Any]:
    return {
        "ar": kernels(made.plain, Speculation("ar"), context, batch),
        "tree 16": kernels(made.engine, tree_of(16), context, batch),
    }


def numbers(low: int, high: int | None = None) -> Callable[[str], list[int]]:
    """A type of option: whole numbers from `low` (to `high`), separated by commas; sorted."""

    def parse(text: str) -> list[int]:
        found = sorted({int(part) for part in text.split(",")})
        if found[0] < low or (high is not None and found[-1] > high):
            raise argparse.ArgumentTypeError(f"{text}: from {low} to {high or 'anything'}")
        return found

    return parse


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A type of option: some of the known names, separated by commas."""

    def parse(text: str) -> list[str]:
        unknown = [name for name in text.split(",") if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is unknown: choose of {', '.join(known)}")
        return text.split(",")

    return parse


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; those of --quick are defaults, so that each can still be given."""
    options = parser(__doc__)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--quick", action="store_true", help="few combinations and blocks, no part begun after 150 s")
    options.add_argument("--parts", type=names(PARTS), help="all that the device can do but profile, unless named")
    options.add_argument("--shapes", type=names(list(SHAPES)), default="qwen3-8b,smollm2-135m")
    options.add_argument("--contexts", type=numbers(1, 31744), default="512,4096,16384")
    options.add_argument("--batches", type=numbers(1), default="1,8")
    options.add_argument("--rows", type=numbers(2, LARGEST_BUDGET + 1), default="8,16,32,64,128", help="of trees")
    options.add_argument(
        "--stage-rows",
        type=numbers(2, LARGEST_BUDGET + 1),
        default="16,64",
        help="of trees whose stages, and whose rounds with drafts in 8 bits, are timed",
    )
    options.add_argument("--turns", type=int, default=12, help="rounds of a block")
    options.add_argument("--blocks", type=int, default=10, help="alternating blocks of a variant")
    options.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    options.add_argument("--dtype", choices=DTYPES, default="auto")
    options.add_argument("--eager", action="store_true", help="without CUDA graphs")
    options.add_argument("--model", default=EMBEDDED, help="target of the real pair: a name, folder or hub id")
    options.add_argument("--drafter", default="auto", help="its drafter")
    options.add_argument("--prompts", type=int, default=4, help="of the suite, for the real pair alone")
    options.add_argument("--max-tokens", type=int, default=128, help="of an answer of the real pair")
    options.add_argument("--at-once", type=numbers(2), default="8", help="prompts that share rounds, for the real pair")
    options.add_argument("--pair-context", type=int, default=4096, help="positions planned for an answer of it")
    options.add_argument("--deadline", type=float, help="seconds after which no part is begun")
    if options.parse_known_args(arguments)[0].quick:
        options.set_defaults(**QUICK)
    args = options.parse_args(arguments)
    args.torch_device = choose_device(args.device)
    args.torch_dtype = choose_dtype(args.dtype, args.torch_device)
    if args.parts is None:
        args.parts = [p for p in PARTS[:-1] if p not in CARD or args.torch_device.type == "cuda"]
    for part in CARD:
        if part in args.parts and args.torch_device.type != "cuda":
            options.error(f"--parts: {part} needs a card, and the device is {args.torch_device}")
    if min(args.turns, args.blocks, args.prompts) < 1:
        options.error("--turns, --blocks and --prompts must be at least 1")
    return args


def about(args: argparse.Namespace) -> dict[str, Any]:
    """The machine, and how the figures came about."""
    card = args.torch_device.type == "cuda"
    launched = "as one CUDA graph each" if card and not args.eager else "launched by the host"
    return {
        **machine(),
        "transformers": transformers.__version__,
        "device": str(args.torch_device),
        "dtype": str(args.torch_dtype).removeprefix("torch."),
        "blocks": args.blocks,
        "turns": args.turns,
        "how": {
            "rounds": "CUDA events around every round on the stream" if card else "the clock around every round",
            "stages": f"{HOW_STAGES}; {launched}",
            "transformers": HOW_PEERS,
            "pair": HOW_PAIR,
        },
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the parts, print the document. Raises SystemExit(1) where a part failed."""
    args = read_options(arguments)
    report = Report(args, about(args))
    if "copy" in args.parts:
        report.part("device", report.body, "copy_gb_s", lambda: round(copy_gb_s(args.torch_device), 1))
    if "pair" in args.parts:
        dtype = str(args.torch_dtype).removeprefix("torch.")
        report.part("pair", report.body, "pair", partial(compare_pair, args, dtype))
        _free(args.torch_device)
    if set(args.parts) - {"copy", "pair"}:
        for name in args.shapes:
            for context in args.contexts:
                for batch in args.batches:
                    measure_shape(args, report, name, context, batch)
                    _free(args.torch_device)
    finish(report.body, args.output)
    if report.failed:
        sys.exit(1)
    return report.body


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
