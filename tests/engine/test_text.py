"""The real tokenizer: whole characters, and pieces that join to the whole."""

import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
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
