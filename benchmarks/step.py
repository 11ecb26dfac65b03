"""What one forward costs: a bare pass of matrix products over the weights, one token, and 2 to 64 rows.

    python benchmarks/step.py --output benchmarks/results/step.json

`bare_plain` is torch's F.linear over the same weights, `bare_packed` the same products in the layout that the engine
uses (oneDNN's blocked one, where the processor has it); neither does attention, norms or anything else.
"""

import torch
import torch.nn.functional as F

from common import alternate, finish, machine, parser
from ddtree.config import EngineConfig, SamplingParams, Speculation
from ddtree.engine import Engine
from ddtree.layers import Linear
from ddtree.tree import Nodes, RoundState

ROWS = (1, 2, 4, 8, 16, 24, 28, 32, 48, 64)
DEPTH = 15


def products(engine: Engine) -> list[Linear]:
    """Every projection of the target, the head included."""
    target = engine.target
    return [w for layer in target.layers for w in (layer.qkv, layer.out, layer.gate_up, layer.down)] + [target.lm_head]


def bare(weights: list[Linear], plain: list[torch.Tensor], rows: int, packed: bool):
    """A pass over all weights with `rows` rows."""
    inputs = {w.in_features: torch.randn(rows, w.in_features, dtype=plain[0].dtype) for w in weights}

    def run() -> None:
        if packed:
            for weight in weights:
                weight(inputs[weight.in_features])
        else:
            for matrix in plain:
                F.linear(inputs[matrix.shape[1]], matrix)

    return run


def verify(engine: Engine, rows: int, context: int):
    """A verify of a bushy tree of `rows` rows behind `context` tokens."""
    nodes = Nodes.root()
    for row in range(1, rows):
        nodes.add(max(0, row - 3) if nodes.depths[max(0, row - 3)] < DEPTH else 0, 0)
    state = RoundState.allocate(1, rows, DEPTH)
    cache = engine.target.allocate(1, context + rows)
    state.position[:] = context
    state.lay([nodes], [[[5]] * DEPTH])
    return lambda: engine.target.verify(cache, state.rows, state.position)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--dtype", default="auto")
    options.add_argument("--context", type=int, default=300)
    options.add_argument("--turns", type=int, default=30)
    args = options.parse_args()
    engine = Engine.load(EngineConfig(dtype=args.dtype, device="cpu", prefix_caching=False))
    weights = products(engine)
    plain = [torch.randn(w.out_features, w.in_features, dtype=engine.target.spec.dtype) * 0.02 for w in weights]
    with torch.inference_mode():
        functions = {}
        for rows in ROWS:
            functions[f"bare_plain_{rows}"] = bare(weights, plain, rows, packed=False)
            functions[f"bare_packed_{rows}"] = bare(weights, plain, rows, packed=True)
            functions[f"verify_{rows}"] = verify(engine, rows, args.context)
        times = alternate(functions, args.turns)
    prompt = engine.text.chat([{"role": "user", "content": "Tell me a story about the sea."}])
    alone = Engine(engine.target, None, engine.text, EngineConfig(speculation=Speculation(mode="ar")))
    run = alone.generate([prompt], [SamplingParams(max_tokens=128, ignore_eos=True)])[0]
    one = times["verify_1"]
    report = {
        "engine": engine.info(),
        "context": args.context,
        "ms": times,
        "ar_round_ms": round(1000 * run.decode_seconds / run.rounds, 3),
        "ratios": {
            "one_token_over_bare_plain": round(one / times["bare_plain_1"], 3),
            "one_token_over_bare_packed": round(one / times["bare_packed_1"], 3),
            **{f"verify_{rows}_over_one_token": round(times[f"verify_{rows}"] / one, 3) for rows in ROWS[1:]},
        },
        **machine(),
    }
    finish(report, args.output)


if __name__ == "__main__":
    main()
