"""Text to token ids and back, by the model's own tokenizer and chat template."""

import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer

from ddtree.engine.vocabulary import TokenBytes, with_plain_markers
from ddtree.errors import DamagedFile, InvalidOption, UnsupportedModel

# A tool as OpenAI's API describes one, to see whether a template shows it.
_SAMPLE_TOOL = {
    "type": "function",
    "function": {
        "name": "sample",
        "description": "A sample.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": []},
    },
}


class Text:
    """The tokenizer of one model folder."""

    def __init__(self, folder: Path) -> None:
        """Raises DamagedFile where the folder's tokenizer cannot be read, UnsupportedModel where it is a slow one."""
        try:
            # A folder's own Python code is never run, and nobody is asked whether it may.
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # damaged files raise almost anything in there
            raise DamagedFile(f"the tokenizer in {folder} cannot be read ({error}): fetch the model again") from error
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise UnsupportedModel(f"{folder} has no fast tokenizer: a tokenizer.json is needed")
        self._backend = with_plain_markers(backend)

    @property
    def end_id(self) -> int | None:
        """The tokenizer's own end-of-sequence id."""
        end: int | None = self._tokenizer.eos_token_id
        return end

    @property
    def backend(self) -> Tokenizer:
        """The tokenizer itself, for what has to know the whole vocabulary."""
        return self._backend

    @cached_property
    def renders_tools(self) -> bool:
        """Whether the chat template shows the tools it is given."""
        messages = [{"role": "user", "content": "Hi"}]
        try:
            return self._render(messages, {}) != self._render(messages, {"tools": [_SAMPLE_TOOL]})
        except InvalidOption:  # no template, or one that cannot take tools
            return False

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self._backend)

    @cached_property
    def _own_arguments(self) -> frozenset[str]:
        """Names that `template_kwargs` may not hold: what a template is always given, and what steers its caller."""
        named = inspect.signature(self._tokenizer.apply_chat_template).parameters
        return frozenset(named) | {"messages", "conversations", "self"}

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, with the special tokens the tokenizer adds by itself.

        Raises InvalidOption for a lone surrogate (half a character).
        """
        _check_encodable(text, "prompt")
        ids: list[int] = self._backend.encode(text).ids
        return ids

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Ids of a conversation by the model's chat template, ready for the assistant's turn.

        Special tokens spelled in a message are read as those tokens, as vLLM and transformers do.

        Args:
            tools: in OpenAI's shape; a template that does not know of tools ignores them (`renders_tools`).
            template_kwargs: more variables of the template (`enable_thinking`, ...); it may ignore them.
            add_generation_prompt: begin the assistant's turn; continue_final_message: leave the last message open
                instead, to be gone on with. At most one of the two.
        Raises InvalidOption where the model has no template or the template refuses the messages, and for a name in
        `template_kwargs` that is not the template's alone.
        """
        for name in template_kwargs or {}:
            if name in self._own_arguments:
                raise InvalidOption(
                    f"chat_template_kwargs may not set {name!r}: the server sets it itself, from the request's fields",
                    param="chat_template_kwargs",
                )
        if add_generation_prompt and continue_final_message:
            raise InvalidOption(
                "add_generation_prompt and continue_final_message exclude each other: turn one of them off",
                param="continue_final_message",
            )
        own = {
            "tools": [dict(tool) for tool in tools] if tools else None,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        try:
            text = self._render(messages, {**own, **(template_kwargs or {})})
        except InvalidOption as error:
            if template_kwargs and (said := self._fault_of_arguments(messages, own, error)):
                raise said from error
            raise
        _check_encodable(text, "messages")
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _fault_of_arguments(
        self, messages: Sequence[Mapping[str, Any]], own: Mapping[str, Any], error: InvalidOption
    ) -> InvalidOption | None:
        """The same error as one about `template_kwargs`, where the template renders without them."""
        try:
            self._render(messages, own)
        except InvalidOption:
            return None
        said = f"the chat template refuses these chat_template_kwargs: {error.__cause__}"
        return InvalidOption(said, param="chat_template_kwargs")

    def _render(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> str:
        if not self._tokenizer.chat_template:
            raise InvalidOption(
                "this model has no chat template: use plain text (ddtree generate --raw)", param="messages"
            )
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments)
        except Exception as error:  # a template is a program that came with the model
            raise InvalidOption(f"the chat template refuses these messages: {error}", param="messages") from error
        return str(text)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, also part of a character; special tokens as they are spelled.

        None for ids that the vocabulary does not have (models pad their embedding).
        """
        return self._token_bytes(token)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out; broken characters become U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text

    def stream(self) -> "TextStream":
        """A fresh incremental decoder."""
        return TextStream(self, self._backend)


class TextStream:
    """Incremental decoding: the pieces joined are what `Text.decode` gives for all ids at once."""

    def __init__(self, text: Text, backend: Tokenizer) -> None:
        self._text, self._backend = text, backend
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._shown = 0  # characters given out

    def push(self, token: int) -> str:
        """Text that this token completes; may be empty."""
        self._ids.append(token)
        piece = self._decoder.step(self._backend, token) or ""
        self._shown += len(piece)
        return piece

    def flush(self) -> str:
        """The rest: bytes that never became a whole character."""
        rest = self._text.decode(self._ids)[self._shown :]
        self._shown += len(rest)
        return rest


def _check_encodable(text: str, param: str) -> None:
    """Raises InvalidOption for half a character, which Python's text can hold and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidOption(f"the text holds half a character ({error}): send valid Unicode", param=param) from error
