"""What a user chooses: one frozen dataclass a concern, checked when it is made. A leaf: imports only `errors`."""

from dataclasses import dataclass, field

from ddtree.errors import InvalidOption

MODES = ("ar", "linear", "shadow-linear", "tree")
DTYPES = ("auto", "float32", "bfloat16", "float16")
EMBEDDED = "smollm2-135m"  # the model that needs no hub; see ddtree.models
MAX_TREE_BUDGET = 1024
MAX_TREE_TOP_K = 1024
MAX_SEED = 2**63 - 1
MAX_TEMPERATURE = 1e300  # beyond any use; keeps infinity and whole numbers too large for a float out
MAX_STOPS = 4  # as the OpenAI API has it


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidOption(f"{name} must be a whole number, not {value!r}", param=name)
    if value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidOption(f"{name} must be {limits}, not {value}", param=name)


@dataclass(frozen=True)
class Speculation:
    """How a round drafts and what it commits. Budgets count tree nodes without the root."""

    mode: str = "tree"
    tree_budget: int = 5  # the fastest on two CPU cores (docs/log.md); on a GPU 15 or 31 pay
    tree_top_k: int = 8  # candidate tokens per depth
    tree_spine: int = 0  # tokens of the top-1 chain that a tree must hold; 0: best-first alone

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InvalidOption(f"mode {self.mode!r} is unknown: choose one of {', '.join(MODES)}", param="mode")
        _check_int("tree_budget", self.tree_budget, 1, MAX_TREE_BUDGET)
        _check_int("tree_top_k", self.tree_top_k, 1, MAX_TREE_TOP_K)
        _check_int("tree_spine", self.tree_spine, 0, MAX_TREE_BUDGET)


@dataclass(frozen=True)
class SamplingParams:
    """One request: how its tokens are chosen, and where they end."""

    max_tokens: int | None = None  # None: up to the end of the context
    temperature: float = 0.0  # 0 is greedy
    seed: int | None = None  # None: a fresh random seed for the request
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1)
        number = isinstance(self.temperature, (int, float)) and not isinstance(self.temperature, bool)
        if not number or not 0 <= self.temperature <= MAX_TEMPERATURE:  # false for NaN
            raise InvalidOption(
                f"temperature must be a number of at least 0, not {self.temperature!r}", param="temperature"
            )
        if self.seed is not None:
            _check_int("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if not isinstance(self.stop, tuple):
            raise InvalidOption(f"stop must be a tuple of strings, not {self.stop!r}", param="stop")
        if len(self.stop) > MAX_STOPS:
            raise InvalidOption(f"stop takes at most {MAX_STOPS} strings, not {len(self.stop)}", param="stop")
        for stop in self.stop:
            if not isinstance(stop, str) or not stop:
                raise InvalidOption(f"stop strings must be text of at least one character, not {stop!r}", param="stop")


@dataclass(frozen=True)
class EngineConfig:
    """What to load, where, and how much context to plan for."""

    model: str = EMBEDDED  # a name of `ddtree models`, a local folder or .gguf file, or a hub id
    drafter: str = "auto"  # the same kinds; "auto": the one that belongs to the model; "none": no drafter (ar only)
    speculation: Speculation = field(default_factory=Speculation)
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: str = "auto"  # auto: bfloat16 where the processor computes in it, else float32
    max_model_len: int | None = None  # None: what the model was made for

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InvalidOption(f"dtype {self.dtype!r} is unknown: choose one of {', '.join(DTYPES)}", param="dtype")
        if self.max_model_len is not None:
            _check_int("max_model_len", self.max_model_len, 2)
