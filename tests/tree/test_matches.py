"""The index over a text's own tokens, against a search by eye."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.tree import Branch, Matches, TextIndex
from ddtree.tree.matches import _START as START
from ddtree.tree.matches import LONGEST, ORDERS, Confidence

quick = settings(deadline=None)
texts = st.lists(st.integers(0, 3), min_size=1, max_size=80)


def occurrences(text: list[int], tail: list[int]) -> list[int]:
    """Positions that lie behind an earlier occurrence of `tail`."""
    return [p for p in range(len(tail), len(text)) if text[p - len(tail) : p] == tail]


def longest(text: list[int], end: list[int], most: int) -> tuple[int, int]:
    """The most recent longest match, up to `most` long, of what `end` ends with."""
    for length in range(min(most, len(end)), 0, -1):
        if found := occurrences(text, end[-length:]):
            return found[-1], length
    return 0, 0


@quick
@given(texts, texts)
def test_what_is_found_is_there_and_goes_back_as_far_as_it_is_said(prompt: list[int], more: list[int]) -> None:
    index = TextIndex(prompt)
    for token in more:
        index.append([token])
        text = [*prompt, *more[: len(index) - len(prompt)]]
        position, length = index.match
        if position == 0:
            assert length == 0
            continue
        assert position in occurrences(text, text[len(text) - length :])
        assert length in (LONGEST, position) or text[position - 1 - length] != text[-1 - length]


def test_nearly_always_it_is_the_most_recent_longest_match() -> None:
    """A younger n-gram may have taken an older one's place in its table: that must be rare."""
    right = looked = 0
    for seed in range(60):
        rng = Random(seed)
        words = [[rng.randrange(300) for _ in range(rng.randrange(1, 9))] for _ in range(20)]
        text = [token for _ in range(60) for token in rng.choice(words)]
        index = TextIndex(text[:50])
        for at in range(50, len(text)):
            index.append([text[at]])
            position, length = longest(text[: at + 1], text[: at + 1], ORDERS)
            if position:
                looked += 1
                right += index.match[0] == position and min(index.match[1], ORDERS) == length
    assert looked > 10_000
    assert right > 0.97 * looked


@quick
@given(texts, texts)
def test_token_by_token_is_as_all_at_once(prompt: list[int], more: list[int]) -> None:
    grown, whole = TextIndex(prompt), TextIndex(prompt + more)
    grown.append(more)
    assert grown.match == whole.match
    assert len(grown) == len(whole) == len(prompt) + len(more)
    path = more[:3]
    assert grown.find(path) == whole.find(path)


def test_tables_grow_with_the_text_and_keep_it() -> None:
    rng = Random(3)
    text = [rng.randrange(50_000) for _ in range(5_000)]
    index = TextIndex(text[:10])
    sizes = []
    for at in range(10, len(text), 500):
        index.append(text[at : at + 500])
        sizes.append(sum(table.itemsize * len(table) for table in index._tables))
        assert sizes[-1] <= max(96 * len(index), 4 * 1024 * ORDERS)
    assert sizes == sorted(sizes)
    index.append(text[100:106])  # of the very beginning
    assert index.match == (106, 6)
    assert index.match == TextIndex([*text, *text[100:106]]).match


@quick
@given(texts, st.integers(1, 20))
def test_a_branch_is_the_text_behind_the_match_and_goes_round_at_its_end(text: list[int], depth: int) -> None:
    index = TextIndex(text)
    branch, (position, length) = index.branch(depth), index.match
    if not position:
        assert branch is None
        return
    assert branch is not None
    expected = list(text)
    for place in range(depth):
        expected.append(expected[position + place])
    assert branch.tokens == tuple(expected[len(text) :])
    assert branch.confidences == tuple(index.confidence(length + place) for place in range(depth))


def test_a_text_that_repeats_itself_goes_on_so() -> None:
    index = TextIndex([9, 1, 2, 3, 1, 2, 3, 1])
    assert index.match == (5, 4)
    branch = index.branch(7)
    assert branch is not None
    assert branch.tokens == (2, 3, 1, 2, 3, 1, 2)


@quick
@given(texts, st.lists(st.integers(0, 3), max_size=8))
def test_matches_along_the_branch_are_the_branch_and_elsewhere_their_own(text: list[int], path: list[int]) -> None:
    index = TextIndex(text)
    branch, matches = index.branch(6), Matches(index)
    told = branch or Branch((), ())
    for depth in range(len(told.tokens)):
        assert matches.behind(told.tokens[:depth]) == told.behind(told.tokens[:depth])
    for depth in range(len(path) + 1):
        found = matches.behind(tuple(path[:depth]))
        if found is None:
            continue
        token, confidence, _ = found
        assert 0 < confidence < 1
        whole = [*text, *path[:depth]]
        # Something that ends like this path was followed by that token before.
        assert any(whole[p] == token for p in occurrences(whole, whole[-1:]))


def test_a_path_that_leaves_the_branch_finds_its_own_match() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 2, 9, 8, 1, 2]
    matches = Matches(TextIndex(text))
    assert matches.behind(()) == (3, START[1], 2)  # 1 2 -> 3
    assert matches.behind((3,)) == (4, START[2], 3)
    assert matches.behind((9,)) == (8, START[1], 2)  # 2 9 -> 8
    assert matches.behind((5,)) == (6, START[0], 1)
    assert matches.behind((5, 6)) == (7, START[1], 2)
    assert matches.behind((77,)) is None


def test_confidence_begins_with_the_table_and_follows_what_comes() -> None:
    told = Confidence()
    assert [told(length) for length in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)] == list(START)
    assert (told(7), told(1000)) == (told(6), told(32))
    for _ in range(24):
        told.learn(2, True)
        told.learn(6, False)
        told.learn(200, True)
    assert told(2) == pytest.approx((START[1] * 8 + 24) / 32)
    assert told(6) == told(7) == pytest.approx(START[5] * 8 / 32)
    assert told(1) == START[0]
    assert told(32) == told(10**6) == pytest.approx((START[-1] * 8 + 24) / 32)
    for _ in range(5_000):
        told.learn(2, True)
        told.learn(6, False)
    assert (told(2), told(6)) == (0.99, 0.01)  # never certain: a score of 0 or of -inf would rule all else out


@pytest.mark.parametrize(("c", "q"), [(0.3, 0.5), (0.7, 0.2), (0.1, 0.05), (0.6, 0.0)])
def test_confidence_learns_the_weight_of_the_mixture_and_not_the_rate_of_hits(c: float, q: float) -> None:
    """Guesses come true with (1 - c) q + c, however much of that the drafter expected: c is what must be found."""
    told, rng = Confidence(), Random(5)
    for _ in range(20_000):
        told.learn(3, rng.random() < c + (1 - c) * q, q)
    assert told(3) == pytest.approx(c, abs=0.05)
