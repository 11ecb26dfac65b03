"""A scripted engine that needs no model, and the ways to talk to it: in the process, or through a real socket."""

import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from ddtree.config import SamplingParams, Speculation
from ddtree.errors import ContextLengthExceeded, DDTreeError, InvalidOption
from ddtree.server import create_app
from ddtree.server.options import ServerOptions
from ddtree.server.run import Server, listen

if TYPE_CHECKING:
    import openai

MODEL = "scripted"
PIECES = ["Hel", "lo", "", ", wör", "ld 🌍", "!"]  # one for each round; an empty one, as a held-back stop string gives
# A piece is what one round adds: its text, which is one token, or its text and the bytes of its tokens.
Piece = str | tuple[str, list[bytes]]
WORDS = 0x110000  # the first token id that stands for a whole piece; those below are characters


@dataclass
class FakeShadow:
    linear_acceptance_length: float = 2.0
    tree_acceptance_length: float | None = 2.5
    agree: bool | None = True
    overhead: None = None


@dataclass
class FakeLogprob:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class FakeStatistics:
    rounds: int = 3
    drafted: int = 15
    accepted: int = 4
    histogram: tuple[int, ...] = (1, 1, 0, 1)
    width: int = 5


@dataclass
class FakeGeneration:
    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    logprobs: list[FakeLogprob] = field(default_factory=list)
    stop_reason: str | int | None = None
    mode: str = "tree"
    rounds: int = 3
    acceptance_length: float | None = 2.25
    cached_tokens: int = 0
    speculative: FakeStatistics = field(default_factory=FakeStatistics)
    shadow: FakeShadow | None = None
    queue_seconds: float = 0.25
    prefill_seconds: float = 0.5
    decode_seconds: float = 1.0
    seconds: float = 1.75
    tok_s: float = 40.0
    stages: dict[str, float] = field(default_factory=dict)


@dataclass
class FakeChunk:
    text: str
    token_ids: list[int]
    logprobs: list[FakeLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    generation: FakeGeneration | None = None
    error: Exception | None = None


@dataclass
class FakeRecord:
    batch: int
    rows: int
    drafted: int
    accepted: list[int]
    depths: list[int]
    modes: list[str]
    committed: int
    seconds: float
    waiting: int
    ran: str = "host"


class FakeText:
    """A character is a token, and so is each piece of an answer. `chats` holds what the template was called with."""

    renders_tools = True
    end_id = 0

    def __init__(self) -> None:
        self.chats: list[dict[str, Any]] = []
        self._words: list[bytes] = []

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        self.chats.append({"messages": messages, **options})
        text = "".join(f"<{message['role']}>{message.get('content') or ''}" for message in messages)
        if "untemplatable" in text:
            raise InvalidOption("the chat template refuses this", param="messages")
        return self.encode(text)

    def word(self, token: bytes) -> int:
        """The token id of these bytes."""
        if token not in self._words:
            self._words.append(token)
        return WORDS + self._words.index(token)

    def token_bytes(self, token: int) -> bytes:
        return self._words[token - WORDS] if token >= WORDS else chr(token).encode()

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")


@dataclass(eq=False)
class FakeSequence:
    """One request inside the scheduler."""

    prompt: list[int]
    params: SamplingParams
    speculation: Speculation
    pieces: list[Piece]
    done: int = 0  # pieces given
    chunks: list[FakeChunk] = field(default_factory=list)


class FakeScheduler:
    """Up to `engine.max_running` sequences at once; each gets one piece a step. The rest wait, first come first."""

    def __init__(self, engine: "FakeEngine") -> None:
        self.engine = engine
        self.observer: Any = None
        self.running: list[FakeSequence] = []
        self.waiting: list[FakeSequence] = []
        self.resets = 0
        self.drops: list[int] = []  # how many requests had begun each time that prefixes were dropped

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, prompt: list[int], params: SamplingParams, speculation: Speculation | None = None) -> FakeSequence:
        self.engine.check(prompt, params, speculation)
        sequence = FakeSequence(prompt, params, speculation or self.engine.speculation, self.engine.script(prompt))
        self.waiting.append(sequence)
        return sequence

    def abort(self, sequence: FakeSequence) -> None:
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self._leave(sequence)

    def stats(self) -> SimpleNamespace:
        used = sum(len(one.prompt) + one.done for one in self.running)
        capacity = self.engine.max_running * self.engine.max_model_len
        return SimpleNamespace(
            running=len(self.running), waiting=len(self.waiting), slots=self.engine.max_running,
            kv_tokens_used=used, kv_tokens_capacity=capacity,
        )  # fmt: skip

    def drop_prefixes(self) -> None:
        self.drops.append(len(self.engine.prompts))

    def reset(self) -> None:
        self.resets += 1
        for sequence in list(self.running):
            self._leave(sequence)
        self.waiting.clear()

    def step(self) -> list[tuple[FakeSequence, FakeChunk]]:
        engine, begun = self.engine, time.perf_counter()
        while self.waiting and len(self.running) < engine.max_running:
            sequence = self.waiting.pop(0)
            self.running.append(sequence)
            engine.enter(sequence, len(self.running))
        engine.rounds_begun += 1
        time.sleep(engine.round_seconds)
        if engine.hold is not None:
            assert engine.hold.wait(20), "a test forgot to let the engine go on"
        if self.observer is not None:
            with self.observer.stage("verify"):
                pass
        given = [(sequence, self._next(sequence)) for sequence in list(self.running)]
        if self.observer is not None and given:
            count, seconds = len(given), time.perf_counter() - begun
            modes = [sequence.speculation.mode for sequence, _ in given]
            self.observer.round(
                FakeRecord(count, 6 * count, 5 * count, [1] * count, [3] * count, modes, count, seconds,
                           len(self.waiting))
            )  # fmt: skip
        return given

    def _next(self, sequence: FakeSequence) -> FakeChunk:
        engine, number = self.engine, sequence.done
        if engine.error is not None and number == engine.error_at:
            error, engine.error = engine.error, None if engine.error_once else engine.error
            if not isinstance(error, DDTreeError):
                raise error  # the whole step fails
            self._leave(sequence)
            return FakeChunk("", [], error=error)
        limit = min(len(sequence.pieces), sequence.params.max_tokens or len(sequence.pieces))
        piece = sequence.pieces[number]
        text, tokens = (piece, [piece.encode()]) if isinstance(piece, str) else piece
        ids = [engine.text.word(token) for token in tokens]
        chunk = FakeChunk(text, ids, [self._logprob(sequence, token) for token in ids])
        if sequence.params.logprobs is None:
            chunk.logprobs = []
        sequence.chunks.append(chunk)
        sequence.done += 1
        if sequence.done == limit:
            chunk.generation = engine.generation(sequence)
            chunk.finish_reason = chunk.generation.finish_reason
            self._leave(sequence)
        return chunk

    def _logprob(self, sequence: FakeSequence, token: int) -> FakeLogprob:
        others = range(65, 65 + (sequence.params.logprobs or 0))
        return FakeLogprob(token, -0.5, tuple((other, -1.0 - rank) for rank, other in enumerate(others)))

    def _leave(self, sequence: FakeSequence) -> None:
        self.running.remove(sequence)
        self.engine.active = len(self.running)
        self.engine.closed += 1


@dataclass
class FakeEngine:
    """Gives every request `pieces`, one a round, and remembers what it was asked for.

    `answers` overrides the pieces of prompts that hold the key. `error` comes in each sequence's round `error_at`, as
    long as it is set: a `DDTreeError` ends that sequence, anything else the whole step.
    """

    pieces: list[Piece] = field(default_factory=lambda: list(PIECES))
    answers: dict[str, list[Piece]] = field(default_factory=dict)
    max_model_len: int = 200
    max_running: int = 8
    round_seconds: float = 0.0
    hold: threading.Event | None = None  # where set, each round waits for it
    error: BaseException | None = None
    error_at: int = 0
    error_once: bool = True
    shadow: FakeShadow | None = None
    tok_s: float = 40.0
    stop_reason: str | int | None = None
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        self.text = FakeText()
        self.speculation = Speculation()
        self.config = SimpleNamespace(model=MODEL)
        self.scheduler = FakeScheduler(self)
        self.prompts: list[str] = []  # of the requests that began to run, in that order; so the next two
        self.params: list[SamplingParams] = []
        self.speculations: list[Speculation] = []
        self.rounds_begun = 0
        self.active = self.most_active = self.closed = 0
        self.started = threading.Event()  # some request is inside

    def info(self) -> dict[str, Any]:
        return {"model": MODEL, "drafter": "scripted-drafter", "dtype": "float32", "device": "cpu",
                "max_model_len": self.max_model_len, "versions": {"ddtree": "0"}}  # fmt: skip

    def check(self, prompt: list[int], params: SamplingParams, speculation: Speculation | None = None) -> None:
        if len(prompt) >= self.max_model_len:
            raise ContextLengthExceeded(f"{len(prompt)} tokens are too many", param="prompt")

    def script(self, prompt: list[int]) -> list[Piece]:
        """The pieces of the answer to a prompt."""
        text = self.text.decode(prompt)
        return next((pieces for key, pieces in self.answers.items() if key in text), self.pieces)

    def enter(self, sequence: FakeSequence, running: int) -> None:
        self.prompts.append(self.text.decode(sequence.prompt))
        self.params.append(sequence.params)
        self.speculations.append(sequence.speculation)
        self.active, self.most_active = running, max(self.most_active, running)
        self.started.set()

    def generation(self, sequence: FakeSequence) -> FakeGeneration:
        chunks = sequence.chunks
        whole = sequence.done == len(sequence.pieces)
        return FakeGeneration(
            text="".join(chunk.text for chunk in chunks),
            token_ids=[token for chunk in chunks for token in chunk.token_ids],
            finish_reason="stop" if whole else "length",
            prompt_tokens=len(sequence.prompt),
            logprobs=[logprob for chunk in chunks for logprob in chunk.logprobs],
            stop_reason=self.stop_reason if whole else None,
            mode=sequence.speculation.mode,
            cached_tokens=self.cached_tokens,
            shadow=self.shadow,
            tok_s=self.tok_s,
        )


@pytest.fixture(autouse=True)
def _no_logs_of_others() -> Iterator[None]:
    """What a test's server set up ends with the test, as does the standard error that it wrote to."""
    logger = logging.getLogger("ddtree")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def options() -> ServerOptions:
    """How `http` and `live` serve; a test module or class may give its own."""
    return ServerOptions((MODEL,))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def http(engine: FakeEngine, options: ServerOptions) -> AsyncIterator[httpx.AsyncClient]:
    """A client inside the process. It sees an answer as a whole, also a streamed one."""
    app = create_app(engine, options)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        client.app = app  # type: ignore[attr-defined]
        yield client
    await app.state.worker.stop(0)


@pytest.fixture
def chat(http: httpx.AsyncClient) -> Callable[..., Any]:
    """Sends one message with the given fields."""

    async def send(content: Any = "Hi", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return await http.post("/v1/chat/completions", json=body)

    return send


@dataclass
class Live:
    """A real server on a real port, in a thread."""

    url: str
    server: Server

    def openai(self, api_key: str = "none") -> "openai.OpenAI":
        import openai  # a second's work, which the processes of test_server_run do not need

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=20)


@pytest.fixture
def live(engine: FakeEngine, options: ServerOptions) -> Iterator[Live]:
    sock = listen("127.0.0.1", 0)
    server = Server(create_app(engine, options), options)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    yield Live(f"http://127.0.0.1:{sock.getsockname()[1]}", server)
    if engine.hold is not None:
        engine.hold.set()
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Waits up to 10 seconds for something that another thread will bring about."""

    def wait(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < end, "it did not happen within 10 s"
            time.sleep(0.01)

    return wait
