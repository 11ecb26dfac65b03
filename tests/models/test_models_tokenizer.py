"""Tokenizers of GGUF files: cut, merge, decode, special tokens, chat template."""

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from tiny_gguf import BYTES, SPECIAL, TEMPLATE, TOKENS, byte_level_tokenizer, tiny_llama, write_gguf
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ddtree.errors import DamagedFile, UnsupportedModel
from ddtree.models import resolve_model

pytestmark = pytest.mark.usefixtures("empty_cache")

TEXTS = [
    "In 2024, 12345 + 67",
    "x =  12\n\n1. y\n 3",
    "def f(x):\n\treturn x**2",
    "hé 😀🎉 ½ 日本",
    "hi<|im_end|>\n",
    "",
]


def tokenizer_of(
    tmp_path: Path, writing: Callable[[gguf.GGUFWriter], None], tokens: int = len(TOKENS)
) -> PreTrainedTokenizerBase:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(vocab_size=tokens), tokenizer=writing)
    return AutoTokenizer.from_pretrained(resolve_model(str(path)))


def with_pre(pre: str) -> Callable[[gguf.GGUFWriter], None]:
    return lambda writer: byte_level_tokenizer(writer, pre)


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_decoding_gives_the_text_back(tmp_path: Path, pre: str) -> None:
    tokenizer = tokenizer_of(tmp_path, with_pre(pre))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["hi", "ĠĠ", "1", "2", "ĊĊ", "1"]),  # digits stand alone, before blanks are looked at
        ("gpt-2", ["hi", "Ġ", "Ġ1", "2", "Ċ", "Ċ", "1"]),
        ("qwen2", ["hi", "Ġ", "Ġ", "1", "2", "ĊĊ", "1"]),
        ("llama-bpe", ["hi", "Ġ", "Ġ", "12", "ĊĊ", "1"]),
    ],
)
def test_how_a_text_is_cut(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    tokenizer = tokenizer_of(tmp_path, with_pre(pre))
    ids = tokenizer.encode("hi  12\n\n1", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == pieces


def test_special_tokens_and_template(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, byte_level_tokenizer)
    assert [tokenizer.unk_token, tokenizer.bos_token, tokenizer.eos_token] == SPECIAL
    assert tokenizer.pad_token == SPECIAL[2]
    assert tokenizer.model_max_length == 512
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.encode("<|im_start|>hi<|im_end|>") == [1, TOKENS.index("hi"), 2]
    assert tokenizer.decode([1, TOKENS.index("hi"), 2], skip_special_tokens=True) == "hi"
    assert len(tokenizer) == len(TOKENS)


def test_a_first_token_that_is_asked_for(tmp_path: Path) -> None:
    def writing(writer: gguf.GGUFWriter) -> None:
        byte_level_tokenizer(writer)
        writer.add_add_bos_token(True)

    tokenizer = tokenizer_of(tmp_path, writing)
    assert tokenizer.encode("hi") == [1, TOKENS.index("hi")]
    assert tokenizer.encode("hi", add_special_tokens=False) == [TOKENS.index("hi")]


def test_user_defined_tokens_stay_whole(tmp_path: Path) -> None:
    tokens = [*TOKENS, "<think>"]

    def writing(writer: gguf.GGUFWriter) -> None:
        byte_level_tokenizer(writer)
        writer.add_token_list(tokens)
        writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3) + [4])

    tokenizer = tokenizer_of(tmp_path, writing, len(tokens))
    assert tokenizer.encode("hi<think>") == [TOKENS.index("hi"), len(TOKENS)]
    assert tokenizer.decode([len(TOKENS)], skip_special_tokens=True) == "<think>"


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS = ["▁", "h", "e", "l", "o", "▁h", "he", "ll", "llo", "hello", "▁hello"]


def sentencepiece(writer: gguf.GGUFWriter) -> None:
    """A vocabulary as Llama 2's GGUF states its own: no merges, scores instead."""
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(PIECES + WORDS)
    writer.add_token_scores([0.0] * len(PIECES) + [-float(rank) for rank in range(len(WORDS))])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(WORDS))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def test_sentencepiece(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, sentencepiece, len(PIECES + WORDS))
    ids = tokenizer.encode("hello hello é")
    # ▁h is the better merge, so the whole word ▁hello is never reached
    assert tokenizer.convert_ids_to_tokens(ids)[:5] == ["<s>", "▁h", "e", "llo", "▁h"]
    assert tokenizer.convert_ids_to_tokens(ids)[-2:] == ["<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello hello é"
    assert tokenizer.bos_token_id == 1


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("the pre-tokenizer 'starcoder'", with_pre("starcoder")),
        ("the tokenizer 'rwkv'", lambda writer: (byte_level_tokenizer(writer), writer.add_tokenizer_model("rwkv"))),
    ],
)
def test_refused_by_name(tmp_path: Path, what: str, change: Callable[[gguf.GGUFWriter], None]) -> None:
    with pytest.raises(UnsupportedModel, match=f"{what} is not supported"):
        tokenizer_of(tmp_path, change)


Changing = Callable[[gguf.GGUFWriter], object]
CHAT = "tokenizer.chat_template"


def without(key: str) -> Changing:
    return lambda writer: writer.kv_data[0].pop(f"tokenizer.ggml.{key}")


UNSOUND: list[tuple[str, Callable[[gguf.GGUFWriter], None], Changing]] = [
    ("lacks the value tokenizer.ggml.tokens", byte_level_tokenizer, without("tokens")),
    ("lacks the value tokenizer.ggml.tokens", sentencepiece, without("tokens")),
    ("not a list of texts", byte_level_tokenizer, lambda writer: writer.add_array("tokenizer.ggml.tokens", [1, 2])),
    ("the merge 'zz' is not of two tokens", byte_level_tokenizer, lambda writer: writer.add_token_merges(["zz"])),
    ("the merge 'h ' is not", byte_level_tokenizer, lambda writer: writer.add_token_merges(["h "])),
    ("out of vocabulary", byte_level_tokenizer, lambda writer: writer.add_token_merges(["q q"])),
    ("IndexError", sentencepiece, lambda writer: writer.add_token_scores([1.0])),
    ("chat_template is not a text", byte_level_tokenizer, lambda writer: writer.add_uint32(CHAT, 0)),
    ("chat_template is not a text", byte_level_tokenizer, lambda writer: writer.add_array(CHAT, [1, 2])),
]


@pytest.mark.parametrize(("what", "writing", "change"), UNSOUND, ids=range(len(UNSOUND)))
def test_unsound_tokenizers(
    tmp_path: Path, what: str, writing: Callable[[gguf.GGUFWriter], None], change: Changing
) -> None:
    def changed(writer: gguf.GGUFWriter) -> None:
        writing(writer)
        change(writer)

    tokens = len(TOKENS) if writing is byte_level_tokenizer else len(PIECES + WORDS)
    with pytest.raises(DamagedFile, match=rf"tiny\.gguf .*{what}.* download or convert"):
        tokenizer_of(tmp_path, changed, tokens)


def test_no_end_is_refused(tmp_path: Path) -> None:
    def writing(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(BYTES)
        writer.add_token_merges(["h i"])

    with pytest.raises(UnsupportedModel, match="without an end-of-sequence token"):
        tokenizer_of(tmp_path, writing, len(BYTES))
