"""From the chunks of one choice to the deltas of its message: thinking apart from the rest, then calls from content."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ddtree.config import Grammar
from ddtree.server.choices import Service
from ddtree.server.logprobs import Spelling
from ddtree.server.reasoning import ReasoningSplitter, begins_inside
from ddtree.server.schemas import ChatRequest
from ddtree.server.tool_stream import ArgumentsDelta, CallStart, ToolSplitter
from ddtree.server.tools import answer_grammar, read_tools, template_messages

if TYPE_CHECKING:
    from ddtree.engine import Chunk, Generation

TAIL = 32  # tokens at the end of a prompt, which say whether its template has opened a thinking part


class ChoiceReader:
    """Reads one choice. Its deltas, joined, are its whole message, however the chunks were cut."""

    def __init__(
        self, spelling: Spelling, thinking: ReasoningSplitter | None = None, tools: ToolSplitter | None = None
    ) -> None:
        """thinking, tools: of this choice alone; None where nothing is split off."""
        self._spelling, self._thinking, self._tools = spelling, thinking, tools
        self._generation: Generation | None = None
        self._called = False
        self._kept: list[dict[str, Any]] = []

    @property
    def reasoning_tokens(self) -> int:
        """Tokens so far that were thinking."""
        return 0 if self._thinking is None else self._thinking.reasoning_tokens

    @property
    def generation(self) -> "Generation":
        """What the last chunk brought."""
        assert self._generation is not None, "the last chunk was not pushed yet"
        return self._generation

    @property
    def finish_reason(self) -> str:
        """OpenAI's, after the last chunk: `tool_calls` where it came to its own end with calls, none of them cut."""
        reason = self.generation.finish_reason
        whole = self._called and self._tools is not None and not self._tools.cut
        return "tool_calls" if whole and reason == "stop" else reason

    def push(self, chunk: "Chunk") -> dict[str, Any]:
        """The one delta that a chunk becomes; empty where it shows nothing yet."""
        self._generation = chunk.generation
        ended = chunk.generation is not None
        delta: dict[str, Any] = {}
        content = chunk.text
        if self._thinking is not None:
            thought, content = self._think(self._thinking, chunk, ended)
            if thought:
                delta["reasoning_content"] = thought
        calls: list[dict[str, Any]] = []
        if self._tools is not None and (content or ended):
            content, calls = self._split(self._tools, content, ended)
        if content:
            delta["content"] = content
        if calls:
            delta["tool_calls"] = calls
        return delta

    def _think(self, thinking: ReasoningSplitter, chunk: "Chunk", ended: bool) -> tuple[str, str]:
        thought, content = thinking.push(chunk.text, [self._spelling(token)[2] for token in chunk.token_ids])
        if ended:
            last_thought, last_content = thinking.flush()
            return thought + last_thought, content + last_content
        return thought, content

    def _split(self, tools: ToolSplitter, text: str, ended: bool) -> tuple[str, list[dict[str, Any]]]:
        """Content, and what is added to calls: an entry for each call, as some clients take one of a number only."""
        content, calls = "", dict[int, dict[str, Any]]()
        for delta in [*tools.push(text), *(tools.flush() if ended else ())]:
            match delta:
                case CallStart(index=index):
                    self._called = True
                    calls[index] = delta.as_openai()["tool_calls"][0]
                case ArgumentsDelta(index=index, text=piece):
                    entry = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    entry["function"]["arguments"] += piece
                case _:
                    content += delta.text
        return content, list(calls.values())

    def keep(self, delta: dict[str, Any]) -> None:
        """Keeps a delta for the whole message."""
        self._kept.append(delta)

    def message(self) -> dict[str, Any]:
        """The whole message. Content is null where the answer was calls alone."""
        content = "".join(delta.get("content", "") for delta in self._kept)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self._thinking is not None:
            thought = "".join(delta.get("reasoning_content", "") for delta in self._kept)
            message["reasoning_content"] = thought or None
        if self._tools is not None and self._called:
            message["content"] = content or None
            message["tool_calls"] = self._tools.calls
        return message


class ChatPlan:
    """How one chat request is put to the model, and how its answers are read."""

    def __init__(self, service: Service, body: ChatRequest) -> None:
        """Raises `DDTreeError` for tools that cannot be."""
        self._service, self._body = service, body
        self._tools = read_tools(body.plain_tools, body.plain_choice, body.parallel_tool_calls)
        self._opened: bool | None = None  # whether answers begin inside a thinking part; None: nothing is split

    def encode(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """The prompt's token ids. Raises `DDTreeError` for messages that the template refuses."""
        text, options = self._service.engine.text, self._body.template_options()
        if self._tools.tools and text.renders_tools:
            options["tools"] = list(self._tools.tools)
        prompt = text.chat(template_messages(messages, self._tools, text.renders_tools), **options)
        parser = self._service.options.reasoning_parser
        if parser is not None:
            continued = messages[-1]["content"] if self._body.continue_final_message else None
            self._opened = begins_inside(parser, text.decode(prompt[-TAIL:]), continued)
        return prompt

    def grammar(self) -> Grammar | None:
        """What the answers must follow. After `encode`. Raises `InvalidOption` for a schema that cannot be enforced."""
        return answer_grammar(self._tools, self._body.plain_format, self._opened, self._body.plain_structure)

    def reader(self) -> Callable[[], ChoiceReader]:
        """Makes the reader of a choice. After `encode`."""
        parser, opened = self._service.options.reasoning_parser, bool(self._opened)

        def make() -> ChoiceReader:
            thinking = None if parser is None else ReasoningSplitter(parser, opened)
            return ChoiceReader(self._service.spelling, thinking, ToolSplitter() if self._tools.parses else None)

        return make
