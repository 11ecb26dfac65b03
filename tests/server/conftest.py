"""A scripted engine that needs no model, and the ways to talk to it: in the process, or through a real socket."""

import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from ddtree.config import SamplingParams, Speculation
from ddtree.errors import ContextLengthExceeded, InvalidOption
from ddtree.server import create_app
from ddtree.server.run import Server, listen

if TYPE_CHECKING:
    import openai

MODEL = "scripted"
PIECES = ["Hel", "lo", "", ", wör", "ld 🌍", "!"]  # one for each round; an empty one, as a held-back stop string gives


@dataclass
class FakeShadow:
    linear_acceptance_length: float = 2.0
    tree_acceptance_length: float | None = 2.5
    agree: bool | None = True
    overhead: None = None


@dataclass
class FakeGeneration:
    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    mode: str = "tree"
    rounds: int = 3
    acceptance_length: float | None = 2.25
    tok_s: float = 40.0
    shadow: FakeShadow | None = None


@dataclass
class FakeChunk:
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    generation: FakeGeneration | None = None


class FakeText:
    """A character is a token."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        if "untemplatable" in text:
            raise InvalidOption("the chat template refuses this", param="messages")
        return self.encode(text)


@dataclass
class FakeEngine:
    """Gives `pieces`, one a round, and remembers what it was asked for."""

    pieces: list[str] = field(default_factory=lambda: list(PIECES))
    max_model_len: int = 200
    round_seconds: float = 0.0
    hold: threading.Event | None = None  # where set, each round waits for it
    error: BaseException | None = None  # raised in the round `error_at`, as long as it is set
    error_at: int = 0
    error_once: bool = True
    shadow: FakeShadow | None = None
    tok_s: float = 40.0

    def __post_init__(self) -> None:
        self.text = FakeText()
        self.speculation = Speculation()
        self.config = SimpleNamespace(model=MODEL)
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        self.rounds_begun = 0
        self.active = self.most_active = self.closed = 0
        self.started = threading.Event()  # some request is inside

    def info(self) -> dict[str, Any]:
        return {"model": MODEL, "dtype": "float32", "device": "cpu"}

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[FakeChunk]:
        if len(prompt) >= self.max_model_len:
            raise ContextLengthExceeded(f"{len(prompt)} tokens are too many", param="prompt")
        self.prompts.append("".join(map(chr, prompt)))
        self.params.append(params)
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        self.started.set()
        try:
            yield from self._rounds(prompt, params)
        finally:
            self.active -= 1
            self.closed += 1

    def _rounds(self, prompt: list[int], params: SamplingParams) -> Iterator[FakeChunk]:
        limit = min(len(self.pieces), params.max_tokens or len(self.pieces))
        for number, piece in enumerate(self.pieces[:limit]):
            self.rounds_begun += 1
            time.sleep(self.round_seconds)
            if self.hold is not None:
                assert self.hold.wait(20), "a test forgot to let the engine go on"
            if self.error is not None and number == self.error_at:
                error, self.error = self.error, None if self.error_once else self.error
                raise error
            generation = None
            if number == limit - 1:
                text, reason = "".join(self.pieces[:limit]), "stop" if limit == len(self.pieces) else "length"
                generation = FakeGeneration(text, list(range(limit)), reason, len(prompt))
                generation.shadow, generation.tok_s = self.shadow, self.tok_s
            yield FakeChunk(piece, [number], generation.finish_reason if generation else None, generation)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def http(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """A client inside the process. It sees an answer as a whole, also a streamed one."""
    app = create_app(engine, MODEL)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
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

    def openai(self) -> "openai.OpenAI":
        import openai  # a second's work, which the processes of test_server_run do not need

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20)


@pytest.fixture
def live(engine: FakeEngine) -> Iterator[Live]:
    sock = listen("127.0.0.1", 0)
    server = Server(create_app(engine, MODEL))  # type: ignore[arg-type]
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
