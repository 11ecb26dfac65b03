"""The options that several commands share: spelled and explained once, defaults taken from `ddtree.config`."""

from typing import Annotated

import typer

from ddtree.config import (
    CONTEXTS,
    DRAFT_DTYPES,
    DTYPES,
    MAX_TREE_BUDGET,
    MODES,
    NUMERICS,
    TREES,
    EngineConfig,
    SamplingParams,
    Speculation,
)
from ddtree.errors import InvalidOption

SPECULATION = Speculation()
ENGINE = EngineConfig()
SAMPLING = SamplingParams()

Model = Annotated[
    str, typer.Option("--model", help="A name of `ddtree models`, a local folder or .gguf file, or a hub id.")
]
Drafter = Annotated[
    str,
    typer.Option(
        "--drafter", help="The same kinds; auto: the one made for the model; none: no drafter (mode ar only)."
    ),
]
Mode = Annotated[str, typer.Option("--mode", help=f"How to decode: {', '.join(MODES)}.")]
(CPU_BUDGET, CPU_TOP_K), (GPU_BUDGET, GPU_TOP_K) = TREES["cpu"], TREES["cuda"]
TreeBudget = Annotated[
    int | None,
    typer.Option(
        "--tree-budget",
        help=f"Nodes of a tree, without its root: 1 to {MAX_TREE_BUDGET};"
        f" default: {CPU_BUDGET} on a CPU, {GPU_BUDGET} on a GPU.",
    ),
]
TreeTopK = Annotated[
    int | None,
    typer.Option(
        "--tree-top-k",
        help=f"Candidate tokens for each depth of a tree; default: {CPU_TOP_K} on a CPU, {GPU_TOP_K} on a GPU. With a"
        " pairwise head at most 32 count.",
    ),
]
TreeSpine = Annotated[
    int,
    typer.Option("--tree-spine", help="Tokens of the drafter's best chain that a tree must hold; 0: none is forced."),
]
TreeContext = Annotated[
    str,
    typer.Option(
        "--tree-context",
        help="What drafts take from the text so far: off; branch, what followed its last tokens before; mix, the same "
        f"behind every node; auto: {CONTEXTS['cpu']} on a CPU, {CONTEXTS['cuda']} on a GPU.",
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[
    str,
    typer.Option("--dtype", help=f"{', '.join(DTYPES)}. float32 is token for token; 16 bits may flip a near-tie."),
]
DraftDtype = Annotated[
    str,
    typer.Option(
        "--draft-dtype",
        help=f"{' or '.join(DRAFT_DTYPES)}: weights that drafts are made with; int8 (on a GPU) halves what they read,"
        " and no answer changes.",
    ),
]
DraftVocab = Annotated[
    str,
    typer.Option(
        "--draft-vocab",
        metavar="auto|full|N|FILE",
        help="Tokens that drafts are made of, which no answer depends on: auto, what the drafter's folder says; full,"
        " all; N, the N most frequent of the folder's list; FILE, another list.",
    ),
]
DraftPairwise = Annotated[
    str,
    typer.Option(
        "--draft-pairwise",
        metavar="auto|on|off",
        help="auto: drafts go by the pairwise head of the drafter's folder, if it has one; on: a folder without one is"
        " refused; off: never. No answer depends on it.",
    ),
]
Numerics = Annotated[
    str,
    typer.Option(
        "--numerics",
        help=f"{', '.join(NUMERICS)}: of rounds in 16 bits on a GPU. invariant, which auto takes there: the same bits"
        " in every mode and batch; fast: what is fastest for the number of rows.",
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option("--max-model-len", help="Tokens of prompt and answer together; default: what the model was made for."),
]
MaxTreeBudget = Annotated[
    int | None,
    typer.Option(
        "--max-tree-budget", help="The largest budget a request may ask for; default: 64, or --tree-budget if larger."
    ),
]
MaxRunningRequests = Annotated[
    int, typer.Option("--max-running-requests", help="Requests that run at once, sharing rounds; the others wait.")
]
ChunkedPrefillSize = Annotated[
    int | None,
    typer.Option(
        "--chunked-prefill-size",
        help="Tokens of prompts between two rounds: fewer delay running answers less; default: what suits the device.",
    ),
]
PrefixCaching = Annotated[
    bool,
    typer.Option("--prefix-caching/--no-prefix-caching", help="Reuse the begin of earlier prompts and answers."),
]
CudaGraphs = Annotated[
    str,
    typer.Option(
        "--cuda-graphs", help="on: rounds on a GPU as CUDA graphs; off: the same kernels, launched one by one."
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Tokens to generate at most.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token every time.")]


def speculation(
    mode: str, tree_budget: int | None, tree_top_k: int | None, tree_spine: int, tree_context: str
) -> Speculation:
    """What these options ask for; None is left to the device. Raises InvalidOption for a value out of range."""
    sizes = {"tree_budget": tree_budget, "tree_top_k": tree_top_k}
    chosen = {name: value for name, value in sizes.items() if value is not None}
    return Speculation(mode, tree_spine=tree_spine, tree_context=tree_context, **chosen)


def refuse_unread(mode: str, tree_budget: int | None, tree_top_k: int | None, tree_spine: int, context: str) -> None:
    """For a command that runs one mode. Raises InvalidOption for an option that this mode does not read."""
    trees = mode in ("tree", "shadow-linear")  # as engine.modes has it, which would load torch here
    given = {
        "tree_budget": tree_budget is not None and not trees,
        "tree_top_k": tree_top_k is not None and not trees,
        "tree_spine": tree_spine != SPECULATION.tree_spine and not trees,
        "tree_context": context != SPECULATION.tree_context and mode == "ar",
    }
    for name in (name for name, unread in given.items() if unread):
        raise InvalidOption(f"{name} means nothing in mode {mode}: leave it out, or choose another mode", param=name)


def switched_on(name: str, value: str) -> bool:
    """What "on" and "off" mean. Raises InvalidOption for anything else."""
    if value not in ("on", "off"):
        raise InvalidOption(f"{name} must be on or off, not {value!r}", param=name)
    return value == "on"
