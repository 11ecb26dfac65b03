"""What an operator chooses about the server, apart from the engine: one frozen dataclass, checked when it is made."""

from dataclasses import dataclass

from ddtree.config import SamplingParams
from ddtree.errors import InvalidOption

LOG_LEVELS = ("debug", "info", "warning", "error")
REASONING_PARSERS = ("deepseek_r1", "qwen3")
TOOL_CALL_PARSERS = ("hermes",)
SPEC_DECODE_METRICS = ("none", "summary")
MIB = 2**20
MAX_QUEUE = 1_000_000  # beyond any use: each waiting request holds a connection
MAX_SHUTDOWN_SECONDS = 86400.0
MAX_BODY_MIB = 1024


@dataclass(frozen=True)
class ServerOptions:
    """How a loaded engine is served. Raises `InvalidOption` for a value that cannot be used."""

    served_model_names: tuple[str, ...]  # at least one; the first is the one that answers show
    default_seed: int | None = None  # of every request that sends none; None: a fresh one for each
    api_keys: tuple[str, ...] = ()  # any of them opens /v1; none: everybody may
    max_queue: int = 256  # requests that may wait, beyond those that run
    shutdown_timeout: float = 30.0  # seconds a running answer may go on after the server was told to stop
    reasoning_parser: str | None = None  # None: what a model thinks stays in `content`
    tool_call_parser: str = "hermes"  # how the model writes calls
    vllm_metrics: bool = False  # /metrics also under the names of vLLM and SGLang
    access_log: bool = True  # a line for each request on standard error
    log_level: str = "info"  # debug: also a line for each round
    max_body_mib: float = 4.0  # 128K tokens of English are about 0.5 MiB
    allowed_origins: tuple[str, ...] = ("*",)  # whose web pages may call from a browser (CORS); empty: none
    spec_decode_metrics: str = "none"  # summary: every answer carries metrics.speculative_decoding, asked for or not

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise InvalidOption("served_model_name must not be empty: give a name", param="served_model_name")
        SamplingParams(seed=self.default_seed)  # raises for a seed out of range
        for key in self.api_keys:
            if not key.isascii() or not key.isprintable() or not key.strip() or key != key.strip():
                said = "api_key must be printable ASCII without spaces around it: it travels in an HTTP header"
                raise InvalidOption(said, param="api_key")
        _check_range("max_queue", self.max_queue, 0, MAX_QUEUE)
        _check_range("shutdown_timeout", self.shutdown_timeout, 0, MAX_SHUTDOWN_SECONDS)
        _check_range("max_body_mib", self.max_body_mib, 0.001, MAX_BODY_MIB)
        _check_name("log_level", self.log_level, LOG_LEVELS)
        _check_name("per_request_spec_decode_metrics", self.spec_decode_metrics, SPEC_DECODE_METRICS)
        _check_name("tool_call_parser", self.tool_call_parser, TOOL_CALL_PARSERS)
        if self.reasoning_parser is not None:
            _check_name("reasoning_parser", self.reasoning_parser.replace("-", "_"), REASONING_PARSERS)

    @property
    def name(self) -> str:
        """The model's name as answers, metrics and the ready line show it."""
        return self.served_model_names[0]

    @property
    def max_body_bytes(self) -> int:
        """The most bytes of a body that are read."""
        return int(self.max_body_mib * MIB)


def _check_name(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidOption(f"{name} {value!r} is unknown: choose one of {', '.join(known)}", param=name)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # false for NaN
        raise InvalidOption(f"{name} must be from {low:g} to {high:g}, not {value!r}", param=name)
