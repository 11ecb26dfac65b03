"""The real tokenizer: whole characters, and pieces that join to the whole."""

import contextlib
import json

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ddtree.engine import Text
from ddtree.errors import DamagedFile, InvalidOption


@pytest.fixture(scope="module")
def text(embedded_model) -> Text:
    return Text(embedded_model)


def pieces(text: Text, ids: list[int]) -> list[str]:
    stream = text.stream()
    return [*(stream.push(i) for i in ids), stream.flush()]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 49151), max_size=30))
def test_any_ids_stream_to_what_they_decode_to(text, ids):
    assert "".join(pieces(text, ids)) == text.decode(ids)


@pytest.mark.parametrize(
    "sample", ["naïve café", "日本語のテキスト", "👩‍👩‍👧‍👦 family 🎉", "a\n\n  b\t", " leading", "<|im_end|> x"]
)
def test_characters_split_over_tokens_come_out_whole(text, sample):
    ids = text.encode(sample)
    shown = pieces(text, ids)
    assert "".join(shown) == text.decode(ids)
    assert all("\ufffd" not in piece for piece in shown)


def test_an_unfinished_character_is_shown_only_at_the_end(text):
    ids = text.encode("ok 👩")[:-1]
    shown = pieces(text, ids)
    assert all("\ufffd" not in piece for piece in shown[:-1])
    assert "".join(shown) == text.decode(ids)
    assert "\ufffd" in shown[-1]


def test_the_chat_template_ends_with_the_assistants_turn(text):
    ids = text.chat([{"role": "user", "content": "Hi"}])
    decoded = text._backend.decode(ids, skip_special_tokens=False)
    assert decoded.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert text.end_id == text.encode("<|im_end|>")[0] == 2


def test_messages_the_template_cannot_render_are_refused(text):
    with pytest.raises(InvalidOption, match="messages"):
        text.chat([{"content": "no role"}])


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DamagedFile, match="tokenizer"):
        Text(tmp_path)


def copied(embedded_model, tmp_path, **changes):
    """The embedded model's tokenizer with other files beside or instead of its own."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"):
        if (embedded_model / name).is_file():
            (tmp_path / name).write_bytes((embedded_model / name).read_bytes())
    for name, content in changes.items():
        (tmp_path / name.replace("__", ".")).write_text(content)
    return tmp_path


def test_a_folders_own_code_is_never_run(embedded_model, tmp_path, monkeypatch):
    marker = tmp_path / "ran"
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    folder = copied(
        embedded_model,
        tmp_path,
        tokenizer_config__json='{"tokenizer_class": "X", "auto_map": {"AutoTokenizer": ["evil.X", "evil.X"]}}',
        evil__py=f"open({str(marker)!r}, 'w').close()\nclass X: pass\n",
    )
    with contextlib.suppress(DamagedFile):
        Text(folder)
    assert not marker.exists()


@pytest.mark.parametrize("content", ["[]", "{", "[" * 100_000])
def test_damaged_tokenizer_files_are_named(embedded_model, tmp_path, content):
    with pytest.raises(DamagedFile, match="tokenizer"):
        Text(copied(embedded_model, tmp_path, tokenizer_config__json=content))


def test_a_template_that_fails_is_an_error_of_the_messages(embedded_model, tmp_path):
    text = Text(copied(embedded_model, tmp_path, chat_template__jinja="{{ 1 / 0 }}"))
    with pytest.raises(InvalidOption, match="template"):
        text.chat([{"role": "user", "content": "Hi"}])


def shown(text: Text, ids: list[int]) -> str:
    return text._backend.decode(ids, skip_special_tokens=False)


def test_variables_of_the_template_and_tools_reach_it(embedded_model, tmp_path):
    template = (
        "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
        "{{ mood | default('calm') }}:{{ messages[-1].content }}"
    )
    text = Text(copied(embedded_model, tmp_path, chat_template__jinja=template))
    messages = [{"role": "user", "content": "Hi"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert shown(text, text.chat(messages)) == "calm:Hi"
    assert shown(text, text.chat(messages, tools=tools, template_kwargs={"mood": "glad"})) == "[f]glad:Hi"
    assert text.renders_tools


def test_the_servers_own_arguments_cannot_be_set_by_a_request(text):
    for name in (
        "messages",
        "conversation",
        "tools",
        "tokenize",
        "chat_template",
        "add_generation_prompt",
        "return_dict",
    ):
        with pytest.raises(InvalidOption, match=f"'{name}'") as caught:
            text.chat([{"role": "user", "content": "Hi"}], template_kwargs={name: "x"})
        assert caught.value.param == "chat_template_kwargs"


def test_the_last_message_can_be_gone_on_with(text):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]
    ids = text.chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert shown(text, ids).endswith("<|im_start|>assistant\nWell,")
    assert shown(text, text.chat(messages, add_generation_prompt=False)).endswith("Well,<|im_end|>\n")
    with pytest.raises(InvalidOption, match="exclude"):
        text.chat(messages, continue_final_message=True)


def test_special_tokens_typed_by_a_user_are_those_tokens(text):
    """As vLLM and transformers do it: a template's text is read as a whole."""
    assert 2 in text.chat([{"role": "user", "content": "a <|im_end|> b"}])[-20:-8]


def test_half_a_character_is_refused(text):
    with pytest.raises(InvalidOption, match="half a character"):
        text.encode("a\ud800")
    with pytest.raises(InvalidOption, match="half a character"):
        text.chat([{"role": "user", "content": "a\ud800"}])


def test_this_models_template_ignores_tools(text):
    assert not text.renders_tools


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_the_bytes_of_tokens_joined_are_the_text(text, sample):
    ids = text.encode(sample)
    assume(0 not in ids)  # a few bytes have no token in this vocabulary
    assert b"".join(map(text.token_bytes, ids)).decode(errors="replace") == text.decode(ids)


def test_every_tokens_bytes_are_those_that_grammars_are_matched_by(text):
    from llguidance import LLTokenizer

    words = LLTokenizer(text.backend.to_str())
    added = text.backend.get_added_tokens_decoder()
    ids = [i for i in range(words.vocab_size) if i not in added]
    assert [i for i in ids if text.token_bytes(i) != words.decode_bytes([i])] == []
    assert text.token_bytes(2) == b"<|im_end|>"
    assert text.token_bytes(49152) == text.token_bytes(-1) == text.token_bytes(10**12) == b""


def sentencepiece(tmp_path, decoder: list[dict]) -> Text:
    """A tokenizer of characters, with bytes for all others, as Llama 2 and Gemma have."""
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "é", "▁a", "<think>"]
    spec = {
        "version": "1.0",
        "added_tokens": [
            {"id": vocab.index(name), "content": name, "special": True, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False}
            for name in ("<unk>", "<s>", "</s>", "<think>")
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "decoder": {"type": "Sequence", "decoders": decoder},
        "model": {"type": "BPE", "vocab": {piece: i for i, piece in enumerate(vocab)}, "merges": [["▁", "a"]],
                  "byte_fallback": True, "unk_token": "<unk>"},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}'
    )
    (tmp_path / "config.json").write_text("{}")
    return Text(tmp_path)


@pytest.mark.parametrize(
    "decoder",
    [
        [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}],
        [
            {"type": "ByteFallback"},
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False},
        ],
    ],
)
def test_bytes_of_a_vocabulary_of_characters(tmp_path, decoder):
    text = sentencepiece(tmp_path, decoder)
    ids = text.encode("a a é€")
    assert [text.token_bytes(i) for i in ids] == [b"a", b" a", b" ", "é".encode(), b"\xe2", b"\x82", b"\xac"]
    assert text.token_bytes(1) == b"<s>"


def test_markers_of_thinking_and_calls_are_shown_even_where_they_are_special(tmp_path):
    """Otherwise a parser of thinking would never see them."""
    text = sentencepiece(tmp_path, [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}])
    ids = text.encode("<think>a")
    assert len(ids) == 2
    assert text.decode([*ids, 2]) == "<think>a"
    assert text.token_bytes(ids[0]) == b"<think>"
