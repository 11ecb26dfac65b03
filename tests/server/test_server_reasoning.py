"""Thinking apart from the answer: markers cut anywhere (Rapid-MLX#219), nothing of it in the content (omlx#892)."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.errors import InvalidOption
from ddtree.server.reasoning import REASONING_PARSERS, ReasoningSplitter, begins_inside, parser_name

PIECES = st.sampled_from(["<think>", "</think>", "<", "/", "think", ">", "</thin", "<thin", "a", "\n", " ", "é", "</"])
TEXTS = st.lists(PIECES, max_size=14).map("".join)


def split(text: str, opened: bool, cuts: list[int], parser: str = "qwen3") -> tuple[str, str]:
    splitter = ReasoningSplitter(parser, opened)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pairs = [splitter.push(text[a:b]) for a, b in pairwise(places)] + [splitter.flush()]
    return "".join(pair[0] for pair in pairs), "".join(pair[1] for pair in pairs)


@given(TEXTS, st.booleans(), st.lists(st.integers(0, 60), max_size=8))
def test_every_way_of_cutting_gives_the_same(text, opened, cuts):
    whole = split(text, opened, [])
    assert split(text, opened, cuts) == whole
    assert split(text, opened, list(range(len(text)))) == whole


@given(TEXTS, st.booleans())
def test_nothing_but_the_markers_is_lost(text, opened):
    reasoning, content = split(text, opened, [])
    start = text.lstrip()
    inside = opened or start.startswith("<think>")
    rest = start.removeprefix("<think>") if start.startswith("<think>") else text
    thought, close, answer = rest.partition("</think>")
    assert (reasoning, content) == ((thought, answer) if inside else ("", rest))
    assert close or not inside or content == ""


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>hm</think>\n\nyes", False, ("hm", "\n\nyes")),
        ("\n <think>\nhm\n</think>yes", False, ("\nhm\n", "yes")),
        ("hm</think>yes", True, ("hm", "yes")),
        ("<think>hm</think>yes", True, ("hm", "yes")),
        ("never closed", True, ("never closed", "")),
        ("<think>never closed </thin", False, ("never closed </thin", "")),
        ("no thinking", False, ("", "no thinking")),
        ("yes <think>later</think>", False, ("", "yes <think>later</think>")),
        ("a</think>b</think><think>c", True, ("a", "b</think><think>c")),
        ("<think></think>", False, ("", "")),
        ("<thin", False, ("", "<thin")),
        ("", True, ("", "")),
    ],
)
def test_what_is_thinking(text, opened, expected):
    assert split(text, opened, []) == expected


def test_text_is_passed_on_as_soon_as_it_is_known():
    splitter = ReasoningSplitter("deepseek-r1", True)
    assert splitter.push("I think") == ("I think", "")
    assert splitter.push(" 1 <") == (" 1 ", "")
    assert splitter.push(" 2 </th") == ("< 2 ", "")
    assert splitter.push("ink>So") == ("", "So")
    assert splitter.push("</think>") == ("", "</think>")


@pytest.mark.parametrize("together", [1, 2, 5, 100])
@pytest.mark.parametrize(
    ("tokens", "opened", "expected"),
    [
        (["<think>", "a", "b", "</", "think", ">", "c", "</think>"], False, 6),
        (["a", "b", "</think>c", "d"], True, 3),
        (["a", "b"], True, 2),
        (["a", "b", "</think>"], False, 0),
        (["<thi", "nk>", "x"], False, 3),
    ],
)
def test_reasoning_tokens_count_up_to_the_one_that_closes(tokens, opened, expected, together):
    splitter = ReasoningSplitter("qwen3", opened)
    for at in range(0, len(tokens), together):
        part = tokens[at : at + together]
        splitter.push("".join(part), [token.encode() for token in part])
    splitter.flush()
    assert splitter.reasoning_tokens == expected <= len(tokens)


def test_numbers_of_tokens_count_up_to_the_push_that_closes():
    splitter = ReasoningSplitter("qwen3", True)
    for text, tokens in [("a", 1), ("b</think>c", 3), ("d", 2)]:
        splitter.push(text, tokens)
    assert splitter.reasoning_tokens == 4


@pytest.mark.parametrize(
    ("parser", "prompt", "continued", "expected"),
    [
        ("qwen3", "...<|im_start|>assistant\n", None, False),
        ("qwen3", "...<|im_start|>assistant\n<think>\n", None, True),
        ("qwen3", "...<|im_start|>assistant\n<think>\n\n</think>\n\n", None, False),
        ("qwen3", "what does <think> mean?<|im_end|>\n<|im_start|>assistant\n", None, False),
        ("deepseek-r1", "<|Assistant|>", None, True),
        ("deepseek_r1", "<|Assistant|><think>\n", None, True),
        ("deepseek_r1", "<|Assistant|></think>", None, False),
        ("qwen3", "...assistant\n<think>so far", "<think>so far", True),
        ("qwen3", "...assistant\n<think>so</think>It", "<think>so</think>It", False),
        ("deepseek_r1", "...assistant\nIt", "It", False),
    ],
)
def test_where_an_answer_begins(parser, prompt, continued, expected):
    assert begins_inside(parser, prompt, continued) is expected


def test_parsers_have_names():
    assert [parser_name(name.replace("_", "-")) for name in REASONING_PARSERS] == list(REASONING_PARSERS)
    with pytest.raises(InvalidOption, match="olmo3"):
        ReasoningSplitter("olmo3", True)
