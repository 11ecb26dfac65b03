"""What a round costs on a CUDA card, by rows, context and batch: median milliseconds, and ratios to plain decoding.

python benchmarks/gpu.py --output benchmarks/results/gpu.json

Models are made of random weights on the card, with the shapes of real ones (--shapes), so nothing is downloaded; with
them nothing is accepted, and only times count. `copy` is the card's bandwidth (bytes read plus written a second).
"""

import argparse
import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from common import finish, machine, parser
from ddtree.config import EngineConfig, SamplingParams, Speculation
from ddtree.drafter import DFlashDrafter
from ddtree.drafter.config import DrafterConfig
from ddtree.engine import Engine
from ddtree.engine.observer import Unobserved
from ddtree.engine.round import Batch
from ddtree.target import LlamaTarget, TargetSpec
from ddtree.target.config import LlamaConfig

CUDA = torch.device("cuda")
SHAPES: dict[str, dict[str, int]] = {
    "qwen3-8b": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 32768,
    },
    "smollm2-135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 32768,
    },
}  # fmt: skip
LAYERS = {"qwen3-8b": 5, "smollm2-135m": 2}  # of the drafter
BLOCK = 16


class CharText:
    """A tokenizer that is never asked for text."""

    def stream(self) -> "CharText":
        """Itself."""
        return self

    def push(self, token: int) -> str:
        """Nothing."""
        return ""

    def flush(self) -> str:
        """Nothing."""
        return ""


def random_weights(name: str, *shape: int) -> torch.Tensor:
    """A matrix that keeps the size of what it multiplies, a norm of ones."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16, device=CUDA)
    return torch.randn(shape, dtype=torch.bfloat16, device=CUDA) * shape[-1] ** -0.5


def load(name: str, batch: int, context: int, graphs: bool) -> Engine:
    """An engine of random weights with these shapes."""
    shape = SHAPES[name]
    raw: dict[str, Any] = {
        **shape,
        "model_type": "llama",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": name != "qwen3-8b",
    }
    config = LlamaConfig.read(raw)
    spec = TargetSpec(
        config.vocab_size, config.hidden_size, config.num_layers, config.max_position, (), torch.bfloat16, CUDA
    )
    target = LlamaTarget(config, spec, random_weights)
    layers = config.num_layers
    taps = [1 + i * (layers - 4) // 4 for i in range(5)]
    draft = {
        **raw, "architectures": ["DFlashDraftModel"], "num_hidden_layers": LAYERS[name], "block_size": BLOCK,
        "num_target_layers": layers, "dflash_config": {"mask_token_id": 0, "target_layer_ids": taps},
    }  # fmt: skip
    drafter = DFlashDrafter(DrafterConfig.read(draft), random_weights, target.embed, target.head)
    options = EngineConfig(
        speculation=Speculation("tree", 15, 16), max_model_len=context + 1024, max_running_requests=batch,
        max_tree_budget=127, cuda_graphs=graphs, prefix_caching=False,
    )  # fmt: skip
    return Engine(target, drafter, CharText(), options)  # type: ignore[arg-type]


def batch_at(engine: Engine, speculation: Speculation, context: int, batch: int, temperature: float = 0.0) -> Batch:
    """A batch whose sequences stand at `context`; their caches hold zeros, which cost what keys cost."""
    requests = []
    for index in range(batch):
        params = SamplingParams(max_tokens=900, temperature=temperature, seed=index, ignore_eos=True)
        request = engine._request([1] * context, params, speculation)
        found = engine._store.acquire(request.prompt, reuse=False, drafts=True)
        assert found is not None
        request.slot, request.position, request.tokens = found[0], context, [*request.prompt, 1]
        requests.append(request)
    made = engine.scheduler._runner.make(requests, Unobserved())
    for request in requests:
        assert request.slot is not None
        engine._store.release(request.slot)
    return made


def gpu_ms(step: Callable[[], Any], turns: int) -> list[float]:
    """Milliseconds of every step, between CUDA events on the stream."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(turns + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def copy_gb_s() -> float:
    """Bytes read plus written a second by a large copy, in GB/s."""
    source = torch.empty(2**30, dtype=torch.uint8, device=CUDA)
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    return 2 * 2**30 / statistics.median(gpu_ms(lambda: target.copy_(source), 10)) / 1e6


VARIANTS: dict[str, tuple[bool, Speculation]] = {  # whether with a drafter, and how
    "ar": (False, Speculation("ar")),
    "ar, drafter fed": (True, Speculation("ar")),
    "linear 16": (True, Speculation("linear")),
    "tree 8": (True, Speculation("tree", 7, 8)),
    "tree 16": (True, Speculation("tree", 15, 16)),
    "tree 32": (True, Speculation("tree", 31, 16)),
    "tree 64": (True, Speculation("tree", 63, 16)),
    "tree 128": (True, Speculation("tree", 127, 16)),
    "shadow-linear at 15": (True, Speculation("shadow-linear", 15, 16)),
}


def measure(name: str, context: int, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Round times of all variants, alternating in blocks of `turns` rounds."""
    engine = load(name, batch, context, not args.eager)
    plain = engine.without_drafter()
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for turn in range(args.blocks + 1):
        for variant, (drafts, speculation) in VARIANTS.items():
            user = engine if drafts else plain
            made = batch_at(user, speculation, context, batch)
            runner = user.scheduler._runner
            for _ in range(3):
                runner.launch(made)
            found = gpu_ms(lambda r=runner, b=made: r.launch(b), args.turns)
            if turn:  # the first block compiles and captures
                times[variant] += found
    medians = {variant: round(statistics.median(found), 4) for variant, found in times.items()}
    ratios = {variant: round(value / medians["ar"], 3) for variant, value in medians.items()}
    profile: dict[str, Any] = {}
    if args.profile:
        profile["tree 16"] = kernels(engine, VARIANTS["tree 16"][1], context, batch)
        profile["ar"] = kernels(plain, VARIANTS["ar"][1], context, batch)
    weights = sum(t.numel() * t.element_size() for t in _tensors(engine.target))
    return {"ms": medians, "over_ar": ratios, "weights_gb": round(weights / 1e9, 3), "profile": profile}


def _tensors(target: LlamaTarget) -> list[torch.Tensor]:
    linears = [target.lm_head.weight]
    for layer in target.layers:
        linears += [layer.qkv.weight, layer.out.weight, layer.gated.linear.weight, layer.down.weight]
    return linears


def kernels(engine: Engine, speculation: Speculation, context: int, batch: int) -> dict[str, Any]:
    """What runs in one round: launches, calls of the host, microseconds by kernel."""
    made = batch_at(engine, speculation, context, batch)
    runner = engine.scheduler._runner
    runner.launch(made)
    torch.cuda.synchronize()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    ) as prof:
        for _ in range(4):
            runner.launch(made)
        torch.cuda.synchronize()
    table = []
    host: dict[str, int] = {}
    for event in prof.key_averages():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            table.append((event.self_device_time_total / 4, event.count / 4, event.key[:90]))
        elif event.key.startswith("cuda"):
            host[event.key] = event.count
    table.sort(reverse=True)
    return {
        "kernels_a_round": sum(count for _, count, _ in table),
        "kernel_us_a_round": round(sum(us for us, _, _ in table), 1),
        "host_calls_in_4_rounds": host,
        "kernels": [{"us": round(us, 1), "count": count, "name": name} for us, count, name in table[:25]],
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shapes", default=",".join(SHAPES))
    options.add_argument("--contexts", default="512,2048,16384")
    options.add_argument("--batches", default="1,8")
    options.add_argument("--turns", type=int, default=12, help="rounds of a block")
    options.add_argument("--blocks", type=int, default=3, help="alternating blocks a variant")
    options.add_argument("--eager", action="store_true", help="without CUDA graphs")
    options.add_argument("--profile", action="store_true", help="kernels of one round too")
    args = options.parse_args()
    rows: dict[str, Any] = {}
    for name in args.shapes.split(","):
        for context in map(int, args.contexts.split(",")):
            for batch in map(int, args.batches.split(",")):
                label = f"{name}, context {context}, batch {batch}"
                try:
                    rows[label] = measure(name, context, batch, args)
                    print(label, rows[label]["ms"], flush=True)
                except Exception as error:
                    rows[label] = {"error": f"{type(error).__name__}: {error}"[:500]}
                    print(label, rows[label], flush=True)
                torch.cuda.empty_cache()
    finish({"rows": rows, "copy_gb_s": round(copy_gb_s()), "graphs": not args.eager, **machine()}, args.output)


if __name__ == "__main__":
    main()
