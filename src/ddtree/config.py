"""What a user chooses: one frozen dataclass a concern, checked when it is made. A leaf: imports only `errors`."""

import re
from dataclasses import dataclass, field, replace

from ddtree.errors import InvalidOption

MODES = ("ar", "linear", "shadow-linear", "tree")
TREE_CONTEXTS = ("off", "branch", "mix", "auto")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DRAFT_DTYPES = ("auto", "int8")
DRAFT_PAIRWISE = ("auto", "on", "off")
NUMERICS = ("auto", "invariant", "fast")
DRAFT_VOCABULARY = "draft_vocabulary.json"  # in a drafter's folder: see ddtree.drafter.vocabulary
PAIRWISE = "pairwise.st"  # the same: see ddtree.drafter.pairwise
EMBEDDED = "smollm2-135m"  # the model that needs no hub; see ddtree.models
MAX_TREE_BUDGET = 1024
MAX_TREE_TOP_K = 1024
DEFAULT_MAX_BUDGET = 64
MAX_RUNNING_REQUESTS = 1024
MAX_SEED = 2**63 - 1
MAX_TEMPERATURE = 1e300  # beyond any use; keeps infinity and whole numbers too large for a float out
MAX_STOPS = 4  # as the OpenAI API has it
MAX_LOGPROBS = 20  # as the OpenAI API has it
MAX_PENALTY = 2.0  # as the OpenAI API has it; of presence and frequency, either way
MAX_REPETITION_PENALTY = 1e6  # beyond any use
MAX_BIAS = 100.0  # as the OpenAI API has it, either way
GRAMMAR_KINDS = ("json_schema", "json_object", "regex", "lark")


def _check_int(name: str, value: object, low: int, high: int | None = None, *, what: str = "") -> None:
    """what: how the message calls the value, where it is a part of the option `name`."""
    what = what or name
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidOption(f"{what} must be a whole number, not {value!r}", param=name)
    if value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidOption(f"{what} must be {limits}, not {value}", param=name)


def _check_number(
    name: str, value: object, low: float, high: float, remedy: str, *, over: bool = False, what: str = ""
) -> None:
    """over: `low` itself is out. NaN is never in."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high or (over and value == low):  # type: ignore[operator]
        limits = f"above {low:g} and at most {high:g}" if over else f"from {low:g} to {high:g}"
        raise InvalidOption(f"{what or name} must be a number {limits}, not {value!r}: {remedy}", param=name)


class Unset(int):
    """A number that nobody chose: a CPU's default, for which an engine takes that of its own device."""


# (tree_budget, tree_top_k) by torch's type of a device: the fastest that were measured (docs/log.md)
TREES = {"cpu": (5, 8), "cuda": (15, 16)}
CONTEXTS = {"cpu": "mix", "cuda": "mix"}  # likewise what the tree_context "auto" is


@dataclass(frozen=True)
class Speculation:
    """How a round drafts and what it commits. Budgets count tree nodes without the root.

    What is left out of `tree_budget` and `tree_top_k`, and the tree_context "auto", follow the device: see `settled`.
    """

    mode: str = "tree"
    tree_budget: int = Unset(TREES["cpu"][0])
    tree_top_k: int = Unset(TREES["cpu"][1])  # candidate tokens per depth
    tree_spine: int = 0  # tokens of the top-1 chain that a tree must hold; 0: best-first alone
    tree_context: str = "auto"  # what tree and chain take from the text so far: see ddtree.engine.context

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InvalidOption(f"mode {self.mode!r} is unknown: choose one of {', '.join(MODES)}", param="mode")
        _check_int("tree_budget", self.tree_budget, 1, MAX_TREE_BUDGET)
        _check_int("tree_top_k", self.tree_top_k, 1, MAX_TREE_TOP_K)
        _check_int("tree_spine", self.tree_spine, 0, MAX_TREE_BUDGET)
        if self.tree_context not in TREE_CONTEXTS:
            raise InvalidOption(
                f"tree_context {self.tree_context!r} is unknown: choose one of {', '.join(TREE_CONTEXTS)}",
                param="tree_context",
            )

    def settled(self, device_type: str, largest: int = MAX_TREE_BUDGET) -> "Speculation":
        """With plain numbers in place of those that nobody chose, and a context for "auto": what suits the device.

        device_type: torch's ("cpu", "cuda"). Chosen numbers stay as they are; others are at most `largest` nodes.
        """
        budget, top_k = TREES.get(device_type, TREES["cpu"])
        return replace(
            self,
            tree_budget=min(budget, largest) if isinstance(self.tree_budget, Unset) else self.tree_budget,
            tree_top_k=top_k if isinstance(self.tree_top_k, Unset) else self.tree_top_k,
            tree_context=CONTEXTS.get(device_type, "off") if self.tree_context == "auto" else self.tree_context,
        )


@dataclass(frozen=True)
class Grammar:
    """What an answer must look like. Hashable, so that compiled ones can be kept."""

    kind: str  # one of GRAMMAR_KINDS
    source: str = ""  # the schema as JSON text, the regular expression, or the Lark grammar; "" for json_object

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise InvalidOption(
                f"grammar kind {self.kind!r} is unknown: choose one of {', '.join(GRAMMAR_KINDS)}",
                param="response_format",
            )
        if not isinstance(self.source, str) or bool(self.source) == (self.kind == "json_object"):
            needs = "no source" if self.kind == "json_object" else "its source as text that is not empty"
            raise InvalidOption(f"a {self.kind} grammar takes {needs}, not {self.source!r}", param="response_format")


@dataclass(frozen=True)
class SamplingParams:
    """One request: how its tokens are chosen, and where they end. Names and meanings are vLLM's."""

    max_tokens: int | None = None  # None: up to the end of the context
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # the fewest best tokens that reach this probability; 1: all
    top_k: int = 0  # exactly so many best tokens, the lowest ids first among equals; 0 or -1: all
    min_p: float = 0.0  # tokens of at least this part of the best one's probability; 0: all
    presence_penalty: float = 0.0  # taken off the logit of each token of the output so far
    frequency_penalty: float = 0.0  # taken off it as often as it is there
    repetition_penalty: float = (
        1.0  # divides (below 0: multiplies) the logit of each token of prompt and output; 1: off
    )
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    seed: int | None = None  # None: a fresh random seed for the request
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0  # no end token before so many
    logprobs: int | None = None  # None: none; k: the chosen token's own and those of the k best at its place
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.seed is not None:
            _check_int("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidOption(f"ignore_eos must be true or false, not {self.ignore_eos!r}", param="ignore_eos")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InvalidOption(f"grammar must be a Grammar, not {self.grammar!r}", param="grammar")
        self._check_sampling()
        self._check_bias()
        self._check_stops()

    def _check_sampling(self) -> None:
        _check_number("temperature", self.temperature, 0, MAX_TEMPERATURE, "use 0 for greedy decoding")
        _check_number(
            "top_p", self.top_p, 0, 1, "use 1 to keep all tokens, or temperature 0 for the best alone", over=True
        )
        _check_number("min_p", self.min_p, 0, 1, "use 0 to keep all tokens")
        _check_int("top_k", self.top_k, -1)
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY, "use 0 for none")
        _check_number(
            "repetition_penalty", self.repetition_penalty, 0, MAX_REPETITION_PENALTY, "use 1 for none", over=True
        )

    def _check_bias(self) -> None:
        pairs = isinstance(self.logit_bias, tuple) and all(
            isinstance(p, tuple) and len(p) == 2 for p in self.logit_bias
        )
        if not pairs:
            raise InvalidOption(
                f"logit_bias must be a tuple of (token id, bias), not {self.logit_bias!r}", param="logit_bias"
            )
        for token, bias in self.logit_bias:
            _check_int("logit_bias", token, 0, what=f"logit_bias token {token!r}")
            what = f"the logit_bias of token {token}"
            _check_number("logit_bias", bias, -MAX_BIAS, MAX_BIAS, "leave the token out for no bias", what=what)
        tokens = [token for token, _ in self.logit_bias]
        if len(set(tokens)) < len(tokens):
            twice = next(token for token in tokens if tokens.count(token) > 1)
            raise InvalidOption(f"logit_bias names token {twice} twice: give it one bias", param="logit_bias")

    def _check_stops(self) -> None:
        if not isinstance(self.stop, tuple):
            raise InvalidOption(f"stop must be a tuple of strings, not {self.stop!r}", param="stop")
        if len(self.stop) > MAX_STOPS:
            raise InvalidOption(f"stop takes at most {MAX_STOPS} strings, not {len(self.stop)}", param="stop")
        for stop in self.stop:
            if not isinstance(stop, str) or not stop:
                raise InvalidOption(f"stop strings must be text of at least one character, not {stop!r}", param="stop")
        if not isinstance(self.stop_token_ids, tuple):
            raise InvalidOption(
                f"stop_token_ids must be a tuple of token ids, not {self.stop_token_ids!r}", param="stop_token_ids"
            )
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, what="every one of stop_token_ids")


@dataclass(frozen=True)
class EngineConfig:
    """What to load, where, and how much context to plan for."""

    model: str = EMBEDDED  # a name of `ddtree models`, a local folder or .gguf file, or a hub id
    drafter: str = "auto"  # the same kinds; "auto": the one that belongs to the model; "none": no drafter (ar only)
    speculation: Speculation = field(default_factory=Speculation)
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: str = "auto"  # auto: bfloat16 where the processor computes in it, else float32
    max_model_len: int | None = None  # None: what the model was made for
    max_running_requests: int = 8  # sequences that share a round, and slots that keep a finished one's context
    max_tree_budget: int | None = None  # the largest a request may ask for; None: 64, or speculation's own if larger
    prefill_chunk: int | None = None  # rows of one prefill forward; None: 128 on a CPU, 1024 on a GPU
    cuda_graphs: bool = True  # on a GPU, rounds as CUDA graphs; off: the same kernels, launched one by one
    prefix_caching: bool = True  # reuse what slots hold of a prompt's beginning
    draft_dtype: str = "auto"  # of the weights that drafts are made with; auto: the target's; int8: a GPU only
    draft_vocab: str = "auto"  # tokens that drafts are made of: see ddtree.drafter.choose_vocabulary
    draft_pairwise: str = "auto"  # the drafter's pairwise head, where its folder has one
    numerics: str = (
        "auto"  # of rounds in half precision on a GPU, see LlamaTarget.load; auto: invariant where it can be
    )

    def __post_init__(self) -> None:
        for name, known in (("dtype", DTYPES), ("draft_dtype", DRAFT_DTYPES), ("draft_pairwise", DRAFT_PAIRWISE),
                            ("numerics", NUMERICS)):  # fmt: skip
            if (value := getattr(self, name)) not in known:
                raise InvalidOption(f"{name} {value!r} is unknown: choose one of {', '.join(known)}", param=name)
        self._check_draft_vocab()
        if self.max_model_len is not None:
            _check_int("max_model_len", self.max_model_len, 2)
        _check_int("max_running_requests", self.max_running_requests, 1, MAX_RUNNING_REQUESTS)
        if self.max_tree_budget is not None:
            chosen = self.speculation.tree_budget
            least = 1 if isinstance(chosen, Unset) else chosen
            _check_int("max_tree_budget", self.max_tree_budget, least, MAX_TREE_BUDGET)
        if self.prefill_chunk is not None:
            _check_int("prefill_chunk", self.prefill_chunk, 1)

    def _check_draft_vocab(self) -> None:
        value = self.draft_vocab
        if not isinstance(value, str) or not value:
            raise InvalidOption(
                f"draft_vocab must be auto, full, a number of tokens or a file, as text, not {value!r}",
                param="draft_vocab",
            )
        if re.fullmatch("-?[0-9]{1,18}", value):
            _check_int("draft_vocab", int(value), 1)

    @property
    def largest_budget(self) -> int:
        """Tree nodes that caches and rounds are planned for."""
        return self.max_tree_budget or max(DEFAULT_MAX_BUDGET, self.speculation.tree_budget)
