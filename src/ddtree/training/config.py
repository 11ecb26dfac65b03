"""A training run as one TOML file: every field checked, unknown ones refused. Imports nothing heavy."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddtree.config import DTYPES, EMBEDDED
from ddtree.drafter.config import MAX_BLOCK
from ddtree.settings import as_dict, at_least, build, one_of, read_toml, within, wrong

__all__ = [
    "DataPart", "DrafterPart", "EvalPart", "FitPart", "PairwisePart", "TargetPart", "TrainConfig", "as_dict", "read",
]  # fmt: skip

OBJECTIVES = ("cross_entropy", "kl")
ATTENTIONS = ("auto", "flex", "sdpa")
DECODERS = ("auto", "graphs", "plain", "engine")
PRECISIONS = ("auto", "bfloat16", "float32")
GATES = ("state", "none")


@dataclass(frozen=True)
class TargetPart:
    """[target]: the model that a drafter is made for, and where it runs."""

    model: str = EMBEDDED  # a name of `ddtree models`, a folder, a .gguf file or a hub id
    device: str = "auto"
    dtype: str = "auto"  # of the target's weights; auto: bfloat16 where the processor computes in it

    def __post_init__(self) -> None:
        one_of("target.dtype", self.dtype, DTYPES)


@dataclass(frozen=True)
class DataPart:
    """[data]: prompts, and how the target answers them."""

    folder: str = ""  # of the shards; "": data/ in the run's own. Several runs may read one
    chats: int = 20000  # rounded up to whole shards
    shard_chats: int = 512  # chats in one file: what a killed run loses at most
    batch: int = 256  # chats that are answered at once
    decoder: str = "auto"  # graphs: many rows a step, as CUDA graphs; plain: without; engine. auto: graphs on a GPU
    max_length: int = 512  # tokens of prompt and answer together
    max_tokens: int = 384  # of one answer
    turns: int = 1  # user turns of a chat, at most
    more_turns: float = 1.0  # part of the chats that go on after a turn
    sampled: float = 0.3  # part of the answers that are sampled; the others are greedy
    temperature: float = 0.8  # of sampled answers
    heldout: float = 0.02  # part of the chats that `fit` never trains on
    templates: float = 0.7  # weights of the three sources of prompts
    own: float = 0.3  # those after a chat's first turn come from the first two alone
    files: float = 0.0
    own_temperature: float = 1.0  # at which the target writes prompts and later user turns
    paths: tuple[str, ...] = ()  # JSONL files of prompts, for `files`
    exclude: tuple[str, ...] = ()  # JSONL files whose prompts stay out, as those of the bench suite always do
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("chats", "shard_chats", "batch", "max_tokens", "turns"):
            at_least(f"data.{name}", getattr(self, name), 1)
        at_least("data.max_length", self.max_length, 16)
        one_of("data.decoder", self.decoder, DECODERS)
        for name in ("sampled", "heldout", "more_turns"):
            within(f"data.{name}", getattr(self, name), 0, 1)
        for name in ("templates", "own", "files"):
            within(f"data.{name}", getattr(self, name), 0, 1e9)
        for name in ("temperature", "own_temperature"):
            within(f"data.{name}", getattr(self, name), 0, 1e3)
        if not self.templates + self.own + self.files:
            raise wrong("data.templates", self.templates, "above 0, or own or files must be")
        if bool(self.paths) != (self.files > 0):
            raise wrong("data.paths", list(self.paths), "given together with data.files above 0, or neither")


@dataclass(frozen=True)
class DrafterPart:
    """[drafter]: the shape of a new drafter. 0 takes what suits the target; `init` brings its own."""

    init: str = ""  # a z-lab folder, a name or a hub id to begin with; "": random weights
    layers: int = 4
    intermediate_size: int = 0  # 0: 8/3 of the hidden size, rounded up to a multiple of 64
    heads: int = 0  # 0: hidden size / head_dim
    kv_heads: int = 0  # 0: a third or a quarter of the heads where that divides them, else all
    head_dim: int = 64
    block_size: int = 16
    taps: int = 5  # layers whose hidden states it reads, evenly spaced
    tap_layers: tuple[int, ...] = ()  # the same, named one by one
    mask_token_id: int = -1  # -1: a special token that never occurs in the data
    rope_theta: float = 100000.0

    def __post_init__(self) -> None:
        for name, least in (("layers", 1), ("head_dim", 2), ("taps", 1), ("block_size", 2), ("mask_token_id", -1)):
            at_least(f"drafter.{name}", getattr(self, name), least)
        for name in ("intermediate_size", "heads", "kv_heads"):
            at_least(f"drafter.{name}", getattr(self, name), 0)
        within("drafter.block_size", self.block_size, 2, MAX_BLOCK)
        within("drafter.rope_theta", self.rope_theta, 1, 1e12)
        if self.head_dim % 2:
            raise wrong("drafter.head_dim", self.head_dim, "even, for rotary positions")


@dataclass(frozen=True)
class FitPart:
    """[fit]: loss, optimiser, schedule."""

    steps: int = 20000
    minutes: float = 0.0  # above 0: the rate falls by the clock too, and the fit ends then, or with `steps`
    batch: int = 32  # sequences of a step
    micro_batch: int = 32  # sequences of one forward; gradients of a step's forwards are added up
    anchors: int = 48  # blocks of a sequence
    objective: str = "cross_entropy"  # kl: forward KL to the target's distribution
    gamma: float = 7.0  # depth k weighs exp(-(k - 1) / gamma)
    lr: float = 1e-3
    final_lr: float = 0.05  # part of lr at the last step
    warmup: int = 200
    weight_decay: float = 0.01
    beta2: float = 0.95
    ema: float = 0.0  # above 0: what is measured and exported is the average of the weights that decays so, as 0.999
    clip: float = 1.0  # norm that gradients are cut to
    precision: str = "auto"  # of products; weights are kept in float32. auto: bfloat16 on a GPU, else float32
    attention: str = "auto"  # flex: only unmasked tiles are computed; sdpa: all of them. auto: flex on a GPU
    feature_cache_gib: float = 0.0  # of the device's memory for features of sequences that come again; 0: none
    loss_rows: int = 4096  # rows whose logits exist at once
    checkpoint_every: int = 500
    eval_every: int = 500
    eval_sequences: int = 64  # held-out ones
    log_every: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        positive = ("steps", "batch", "micro_batch", "anchors", "loss_rows", "checkpoint_every", "eval_every",
                    "eval_sequences", "log_every")  # fmt: skip
        for name in positive:
            at_least(f"fit.{name}", getattr(self, name), 1)
        at_least("fit.warmup", self.warmup, 0)
        for name, low, high in (("gamma", 1e-3, 1e9), ("lr", 1e-12, 10), ("final_lr", 0, 1), ("weight_decay", 0, 10),
                                ("beta2", 0, 0.99999), ("ema", 0, 0.999999), ("minutes", 0, 1e6),
                                ("clip", 1e-9, 1e9)):  # fmt: skip
            within(f"fit.{name}", getattr(self, name), low, high)
        within("fit.feature_cache_gib", self.feature_cache_gib, 0, 1e6)
        one_of("fit.objective", self.objective, OBJECTIVES)
        one_of("fit.attention", self.attention, ATTENTIONS)
        one_of("fit.precision", self.precision, PRECISIONS)
        if self.batch % self.micro_batch:
            raise wrong("fit.micro_batch", self.micro_batch, f"a divisor of fit.batch {self.batch}")


@dataclass(frozen=True)
class PairwisePart:
    """[pairwise]: the head of `ddtree train pair`. Seed, gamma, precision, attention and loss_rows are [fit]'s."""

    rank: int = 64  # of its two factors
    gate: str = "state"  # state: the drafter's last hidden state scales the ranks; none: it has no say
    vocabulary: str = "auto"  # tokens that it knows: as --draft-vocab, from the drafter's own list
    candidates: tuple[int, ...] = (8, 16, 32)  # of a depth, among which it learns to tell; each counts alike
    steps: int = 3000
    minutes: float = 0.0  # above 0: the rate falls by the clock too, and the fit ends then, or with `steps`
    batch: int = 64  # sequences of a step, in one forward
    anchors: int = 48  # blocks of a sequence
    lr: float = 2e-3
    final_lr: float = 0.02  # part of lr at the last step
    warmup: int = 100
    weight_decay: float = 0.0
    beta2: float = 0.99
    eval_every: int = 500
    eval_sequences: int = 64  # held-out ones

    def __post_init__(self) -> None:
        for name in ("rank", "steps", "batch", "anchors", "eval_every", "eval_sequences"):
            at_least(f"pairwise.{name}", getattr(self, name), 1)
        at_least("pairwise.warmup", self.warmup, 0)
        if not self.candidates or any(not 1 <= count <= 256 for count in self.candidates):
            raise wrong("pairwise.candidates", list(self.candidates), "numbers from 1 to 256, at least one")
        one_of("pairwise.gate", self.gate, GATES)
        for name, low, high in (("lr", 1e-12, 10), ("final_lr", 0, 1), ("weight_decay", 0, 10), ("beta2", 0, 0.99999),
                                ("minutes", 0, 1e6)):  # fmt: skip
            within(f"pairwise.{name}", getattr(self, name), low, high)


@dataclass(frozen=True)
class EvalPart:
    """[eval]: what acceptance is measured for."""

    budgets: tuple[int, ...] = (8, 16, 32)  # nodes of trees, their roots not counted
    top_k: int = 16  # candidate tokens of a depth
    sequences: int = 256  # at most
    max_tokens: int = 128  # of answers that are generated for it
    temperature: float = 0.0  # of them
    max_length: int = 2048  # tokens of prompt and answer that the caches for it are planned for
    anchors: int = 64  # blocks of one forward

    def __post_init__(self) -> None:
        for name in ("top_k", "sequences", "max_tokens", "anchors", "max_length"):
            at_least(f"eval.{name}", getattr(self, name), 1)
        for budget in self.budgets:
            at_least("eval.budgets", budget, 1)
        within("eval.temperature", self.temperature, 0, 1e3)


@dataclass(frozen=True)
class TrainConfig:
    """The whole file. `folder` holds data/ (unless data.folder is elsewhere), checkpoints and logs."""

    folder: str = "training"
    target: TargetPart = field(default_factory=TargetPart)
    data: DataPart = field(default_factory=DataPart)
    drafter: DrafterPart = field(default_factory=DrafterPart)
    fit: FitPart = field(default_factory=FitPart)
    pairwise: PairwisePart = field(default_factory=PairwisePart)
    eval: EvalPart = field(default_factory=EvalPart)

    @property
    def data_folder(self) -> Path:
        """Where shards lie."""
        return Path(self.data.folder) if self.data.folder else Path(self.folder) / "data"


def read(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """A file with `overrides` ("fit.steps=100", values as TOML has them; bare words are text) over it.

    Raises ModelNotFound, DamagedFile or InvalidOption, naming the file or the field.
    """
    found: TrainConfig = build(TrainConfig(), read_toml(path, overrides, "docs/training.md", "fit.steps=100"))
    return found
