"""A scripted model with a tokenizer of its own: what it says is looked up in a book by the user's last message.

The tokenizer is a real one, whose ids 0 to 255 are the bytes. So the whole product runs on it: chat templates,
grammars, characters split over tokens, log-probabilities' bytes. More pieces may be added to the vocabulary, which
only the model uses.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ddtree.config import EngineConfig, Speculation
from ddtree.engine import Engine
from ddtree.engine.text import Text
from ddtree.layers import KVCache
from ddtree.server import create_app
from ddtree.server.options import ServerOptions
from ddtree.server.run import Server, listen
from ddtree.tree import Rows, unpack
from scripted import ScriptedDrafter, ScriptedTarget, history, write

if TYPE_CHECKING:
    import openai

MODEL = "scripted"
END, SYSTEM, USER, ASSISTANT, TOOL, GO = range(256, 262)
SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|go|>")
FIRST_PIECE = 262
# Thinking is left out of earlier turns, as the templates of models that think do it. <|go|> is where an answer begins.
TEMPLATE = """{%- if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif -%}
{%- for m in messages -%}
<|{{ m.role }}|>{% if m.role == 'assistant' %}<|go|>{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}\
{% endif %}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>{% endif %}<|go|>{% endif -%}"""


def _letters() -> list[str]:
    """How byte-level vocabularies spell the bytes 0 to 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def byte_text(folder: Path, pieces: Sequence[str] = ()) -> Text:
    """The tokenizer: bytes, special tokens, then `pieces` (texts of several bytes, which encoding never gives)."""
    letters = _letters()
    vocab = {letter: byte for byte, letter in enumerate(letters)}
    vocab |= {name: END + number for number, name in enumerate(SPECIAL)}
    for number, piece in enumerate(pieces):
        spelled = "".join(letters[byte] for byte in piece.encode())
        assert spelled not in vocab, f"{piece!r} has an id already"
        vocab[spelled] = FIRST_PIECE + number
    spec = {
        "version": "1.0",
        "added_tokens": [
            {"id": END + number, "content": name, "special": True, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False}
            for number, name in enumerate(SPECIAL)
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    (folder / "config.json").write_text("{}")
    return Text(folder)


@dataclass
class Book:
    """What the model says, and how well the drafter knows it.

    The target's best token is the next one of the answer, wherever the answer has got to; so it goes on also after a
    token that it did not want. All its logits depend on the whole history, so that a foreign token in it shows.
    """

    answers: dict[str, list[int]] = field(default_factory=dict)  # by the user's last message; the rest: the message
    variety: float = 0.0  # how far the other tokens' logits reach; the best one's is 6
    # place in the answer -> at which of the drafter's ranks the right token is, from 0
    rank: Callable[[int], int] = lambda place: 0
    vocab: int = FIRST_PIECE

    def __post_init__(self) -> None:
        chance = Random(0)
        likely = {*range(0x61, 0x7B), 0x20, 0x22, 0x7D, END}
        noise = [
            [chance.random() if token in likely else chance.random() - 12 for token in range(self.vocab)]
            for _ in range(67)
        ]
        self._noise = self.variety * torch.tensor(noise, dtype=torch.float64)
        self._asked: dict[tuple[int, ...], list[int]] = {}

    def say(self, message: str, answer: str | Sequence[int]) -> list[int]:
        """Sets the answer to a message, as text (byte by byte) or as ids, which are returned."""
        ids = list(answer.encode()) if isinstance(answer, str) else list(answer)
        self.answers[message] = ids
        self._asked.clear()
        return ids

    def next(self, history: tuple[int, ...]) -> int:
        """The answer's token behind a history."""
        answer, place = self._place(history)
        return answer[place] if place < len(answer) else END

    def logits(self, history: tuple[int, ...]) -> Tensor:
        """The target's, [V]."""
        scores = self._noise[hash(history) % len(self._noise)].clone()
        scores[self.next(history)] = 6.0
        return scores

    def propose(self, history: tuple[int, ...], depths: int) -> Tensor:
        """The drafter's, [D, V]: the right token at the rank that `rank` says, behind capital letters."""
        scores = torch.zeros(depths, self.vocab, dtype=torch.float64)
        answer, place = self._place(history)
        for depth, at in enumerate(range(place, place + depths)):
            right, rank = answer[at] if at < len(answer) else END, self.rank(at)
            others = (token for token in range(0x41, 0x5B) if token != right)
            for better in range(rank):
                scores[depth, next(others)] = 20.5 - better * 0.1
            scores[depth, right] = 20.0
        return scores

    def _place(self, history: tuple[int, ...]) -> tuple[list[int], int]:
        """The answer that a history asks for, and how many of its tokens are there."""
        start = next((at for at in range(len(history), 0, -1) if history[at - 1] == GO), 0)
        if not start:
            return [], 0
        prompt = history[:start]
        if prompt not in self._asked:
            asked = prompt[len(prompt) - prompt[::-1].index(USER) :] if USER in prompt else prompt
            message = bytes(asked[: next(i for i, token in enumerate(asked) if token > 255)]).decode()
            self._asked[prompt] = self.answers.get(message, list(message.encode()))
        return self._asked[prompt], len(history) - start


class BookTarget(ScriptedTarget):
    """A target whose script gives tensors; and which reads what lies before a round once for all of its rows."""

    def verify(self, cache: KVCache, rows: Rows, position: Tensor) -> tuple[Tensor, Tensor]:
        batch, n = rows.tokens.shape
        sizes = [int((rows.parents[b] >= 0).sum()) + 1 for b in range(batch)]
        write(cache, [rows.tokens[b, :size] for b, size in enumerate(sizes)], position.tolist())
        visible = unpack(rows.ancestors, n).tolist()
        logits = torch.zeros(batch, n, self.spec.vocab_size, dtype=torch.float64)
        for b, (size, base) in enumerate(zip(sizes, position.tolist(), strict=True)):
            seen = history(cache, b, range(base + size))
            for row in range(size):
                own = [seen[base + other] for other in range(size) if visible[b][row][other]]
                logits[b, row] = self._logits((*seen[:base], *own))
        return logits, rows.tokens.unsqueeze(-1).double()

    def _logits(self, seen: tuple[int, ...]) -> Tensor:
        return self.script(seen)  # type: ignore[return-value]


class BookDrafter(ScriptedDrafter):
    """A drafter whose script gives tensors."""

    def propose(self, cache: KVCache, root: Tensor, position: Tensor, depths: int) -> Tensor:
        seen = ((*history(cache, b, range(int(position[b]))), int(root[b])) for b in range(len(root)))
        return torch.stack([self.script(one)[:depths] for one in seen])  # type: ignore[misc]


def book_engine(
    text: Text,
    book: Book,
    block: int = 16,
    context: int = 2048,
    drafter_context: int = 4096,
    config: Mapping[str, Any] | None = None,
    **speculation: Any,
) -> Engine:
    """An engine whose model and drafter read the book. config: fields of EngineConfig."""
    target = BookTarget(book.logits, book.vocab, (END,), context)
    drafter = BookDrafter(lambda seen: book.propose(seen, block - 1), block, drafter_context)
    plan = EngineConfig(model=MODEL, speculation=Speculation(**speculation), **(config or {}))
    return Engine(target, drafter, text, plan)  # type: ignore[arg-type]


@dataclass
class Serving:
    """A real server on a real port, in a thread, and the engine behind it."""

    url: str
    engine: Engine
    app: Any

    def openai(self, timeout: float = 30) -> "openai.OpenAI":
        """The client that people use."""
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=timeout)


@contextmanager
def serving(engine: Engine, **options: Any) -> Iterator[Serving]:
    """Serves an engine, which nobody else may use meanwhile. options: of ServerOptions."""
    chosen = ServerOptions((MODEL,), **{"access_log": False, "shutdown_timeout": 5.0, **options})
    sock = listen("127.0.0.1", 0)
    app = create_app(engine, chosen)
    server = Server(app, chosen)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        yield Serving(f"http://127.0.0.1:{sock.getsockname()[1]}", engine, app)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@dataclass
class Told:
    """One answer to a chat or a text completion, as a client sees it, whole or streamed."""

    text: list[str]  # by choice, as is all that follows
    reasoning: list[str]
    calls: list[list[tuple[str, str]]]  # name and arguments
    ids: list[list[int]]
    logprobs: list[Any]
    reasons: list[tuple[str, str | int | None]]  # finish and stop reason
    usage: tuple[int, int, int]  # prompt, completion, reasoning tokens
    blocks: list[Any] = field(compare=False)  # ddtree, by choice
    metrics: Any = field(compare=False)
    cached: int = field(compare=False)  # tokens of the prompt


def tell(client: "openai.OpenAI", stream: bool = False, **request: Any) -> Told:
    """Asks with everything an answer can carry. A request with `prompt` is a text completion; more fields than the
    client knows may stand beside the others.
    """
    known = {"messages", "prompt", "model", "temperature", "top_p", "n", "max_tokens", "stop", "seed", "logprobs",
             "top_logprobs", "tools", "tool_choice", "response_format", "logit_bias", "presence_penalty",
             "frequency_penalty", "max_completion_tokens", "parallel_tool_calls"}  # fmt: skip
    extra = {name: value for name, value in request.items() if name not in known}
    request = {"model": MODEL, **{name: value for name, value in request.items() if name in known}}
    request["extra_body"] = {"return_token_ids": True, **extra}
    if "messages" in request and isinstance(request["messages"], str):
        request["messages"] = [{"role": "user", "content": request["messages"]}]
    api: Any = client.completions if "prompt" in request else client.chat.completions
    if stream:
        told = list(api.create(**request, stream=True, stream_options={"include_usage": True}))
    else:
        told = [api.create(**request)]
    return _told([body.model_dump(warnings="error") for body in told], request.get("n") or 1)


def _told(bodies: list[dict[str, Any]], n: int) -> Told:
    usage = bodies[-1]["usage"]
    told = Told(*([[] for _ in range(n)] for _ in range(5)), [("", None)] * n, (0, 0, 0), [None] * n, None, 0)  # type: ignore[arg-type]
    told.text, told.reasoning, told.logprobs = [""] * n, [""] * n, [None] * n
    for body in bodies:
        told.metrics = body.get("metrics") or told.metrics
        for choice in body["choices"]:
            index = choice["index"]
            said = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
            told.text[index] += said.get("content") or ""
            told.reasoning[index] += said.get("reasoning_content") or ""
            for place, call in enumerate(said.get("tool_calls") or ()):
                at = call.get("index", place)
                if at == len(told.calls[index]):
                    assert call["id"]
                    assert call["type"] == "function"
                    told.calls[index].append((call["function"]["name"], ""))
                name, arguments = told.calls[index][at]
                told.calls[index][at] = (name, arguments + (call["function"]["arguments"] or ""))
            told.ids[index] += choice.get("token_ids") or []
            for name, values in (choice["logprobs"] or {}).items():
                if values is not None:
                    told.logprobs[index] = told.logprobs[index] or {}
                    told.logprobs[index][name] = told.logprobs[index].get(name, []) + values
            if choice["finish_reason"]:
                assert told.reasons[index][0] == "", "a choice ends once"
                told.reasons[index] = (choice["finish_reason"], choice.get("stop_reason"))
            told.blocks[index] = choice.get("ddtree") or (body.get("ddtree") if n == 1 else None) or told.blocks[index]
    told.usage = (
        usage["prompt_tokens"],
        usage["completion_tokens"],
        usage["completion_tokens_details"]["reasoning_tokens"],
    )
    told.cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == sum(map(len, told.ids)), "usage and ids end at the same token"
    assert usage["completion_tokens_details"]["reasoning_tokens"] <= usage["completion_tokens"]
    return told


def both(client: "openai.OpenAI", **request: Any) -> Told:
    """The answer, asked for whole and streamed: it must be one and the same. Needs a seed where it is sampled."""
    whole, streamed = tell(client, **request), tell(client, stream=True, **request)
    assert whole == streamed
    return whole
