"""Text to token ids and back, by the model's own tokenizer and chat template."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer

from ddtree.errors import DamagedFile, InvalidOption, UnsupportedModel


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
        self._backend = backend

    @property
    def end_id(self) -> int | None:
        """The tokenizer's own end-of-sequence id."""
        end: int | None = self._tokenizer.eos_token_id
        return end

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, with the special tokens the tokenizer adds by itself."""
        ids: list[int] = self._backend.encode(text).ids
        return ids

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation by the model's chat template, ready for the assistant's turn.

        Raises InvalidOption where the model has no template or the template refuses the messages.
        """
        if not self._tokenizer.chat_template:
            raise InvalidOption(
                "this model has no chat template: use plain text (ddtree generate --raw)", param="messages"
            )
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program that came with the model
            raise InvalidOption(f"the chat template refuses these messages: {error}", param="messages") from error
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

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
