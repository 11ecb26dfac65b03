"""Where a request ends: stops, end tokens and limits that fall inside an accepted run."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.config import MODES, SamplingParams
from ddtree.engine.output import RequestOutput
from ddtree.errors import ContextLengthExceeded, DamagedFile, DDTreeError, InvalidOption
from scripted import ScriptedDrafter, ScriptedTarget, scripted_engine

LETTERS = "abcdefghijklmnopqrstuvwxyz "
END = len(LETTERS)


def one_hot(token: int) -> list[float]:
    return [5.0 if t == token else 0.0 for t in range(END + 1)]


def reciting(text: str, block: int = 16, prompt: int = 1, pieces=LETTERS, end_at: int | None = None, **speculation):
    """A target that recites `text` after the prompt, and a drafter that knows it: every draft is accepted."""
    tokens = [LETTERS.index(c) for c in text] if pieces is LETTERS else list(range(len(pieces)))
    if end_at is not None:
        tokens = [*tokens[:end_at], END, *tokens[end_at:]]
    tokens = tokens * 40

    def following(history, ahead=0):
        return one_hot(tokens[len(history) - prompt + ahead])

    target = ScriptedTarget(following, END + 1, end_ids=(END,))
    drafter = ScriptedDrafter(lambda h: [following(h, d) for d in range(block - 1)], block)
    return scripted_engine(target, drafter, pieces, **(speculation or {"mode": "tree"}))


def streamed(engine, params):
    chunks = list(engine.stream([0], params))
    assert all(c.finish_reason is None for c in chunks[:-1])
    last = chunks[-1].generation
    assert "".join(c.text for c in chunks) == last.text
    assert [i for c in chunks for i in c.token_ids] == last.token_ids
    assert chunks[-1].finish_reason == last.finish_reason
    return last


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_string_early_in_an_accepted_run(mode):
    """12 accepted tokens, the stop at token 2 of them (sglang#23802)."""
    engine = reciting("abcdefghijklmnop", mode=mode)
    params = SamplingParams(max_tokens=30, stop=("c",))
    generation = engine.generate([[0]], [params])[0]
    assert (generation.text, generation.finish_reason) == ("ab", "stop")
    assert generation.token_ids == [0, 1, 2], "ids end at the token that completed the stop"
    assert streamed(engine, params).token_ids == generation.token_ids


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stops", [("a", "is"), ("is", "a"), ("is", "s a"), ("x", "is")])
def test_the_order_in_the_text_counts_not_the_order_of_the_list(mode, stops):
    """vllm#49391."""
    engine = reciting("this is a test ", mode=mode)
    params = SamplingParams(max_tokens=30, stop=stops)
    generation = engine.generate([[0]], [params])[0]
    assert generation.text == "th"
    assert generation.token_ids == [LETTERS.index(c) for c in "this"]
    assert streamed(engine, params).text == "th"


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_across_tokens_and_rounds(mode):
    engine = reciting("hello world and more ", block=4, mode=mode)
    params = SamplingParams(max_tokens=60, stop=("o world an",))
    generation = engine.generate([[0]], [params])[0]
    assert generation.text == "hell"
    assert generation.token_ids == [LETTERS.index(c) for c in "hello world an"]
    assert streamed(engine, params).text == "hell"


def test_a_stop_inside_one_token_cuts_the_text_and_keeps_the_token():
    """Text, ids and usage end at the same token (vllm#47616)."""
    engine = reciting("", pieces=["Hello", " wor", "ld! Bye", " now"], mode="tree")
    generation = engine.generate([[0]], [SamplingParams(max_tokens=30, stop=("!",))])[0]
    assert generation.text == "Hello world"
    assert generation.token_ids == [0, 1, 2]


def test_of_two_stops_in_one_token_the_first_in_the_text_counts():
    engine = reciting("", pieces=["x", " one END two STOP three"], mode="tree")
    for stops in (("STOP", "END"), ("END", "STOP")):
        assert engine.generate([[0]], [SamplingParams(max_tokens=9, stop=stops)])[0].text == "x one "


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", [1, 2, 3, 8])
def test_an_end_token_inside_a_block(mode, place):
    """transformers#47931."""
    engine = reciting("abcdefghij", end_at=place, mode=mode)
    generation = engine.generate([[0]], [SamplingParams(max_tokens=30)])[0]
    assert (generation.text, generation.finish_reason) == ("abcdefghij"[:place], "stop")
    assert generation.token_ids == [*range(place), END]
    ignoring = engine.generate([[0]], [SamplingParams(max_tokens=30, ignore_eos=True)])[0]
    assert (len(ignoring.token_ids), ignoring.finish_reason) == (30, "length")


@pytest.mark.parametrize("mode", MODES)
def test_an_end_token_as_the_very_first(mode):
    generation = reciting("abc", end_at=0, mode=mode).generate([[0]], [SamplingParams()])[0]
    assert (generation.text, generation.token_ids, generation.finish_reason) == ("", [END], "stop")
    assert generation.rounds == 0
    assert generation.acceptance_length is None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("limit", range(1, 21))
def test_the_limit_counts_tokens_not_rounds(mode, limit):
    """ferrox#311."""
    generation = reciting("abcdefghijklmnopqrstuvwxyz", mode=mode).generate([[0]], [SamplingParams(max_tokens=limit)])[
        0
    ]
    assert generation.token_ids == list(range(limit))
    assert (generation.text, generation.finish_reason) == (LETTERS[:limit], "length")
    assert generation.mode == mode, "the mode that ran is the one asked for, also for small limits (dflash-mlx#20)"


@pytest.mark.parametrize("mode", MODES)
def test_a_limit_inside_the_thinking_part_counts_its_tokens(mode):
    """sglang#37450, #39826: thinking is part of the answer, so it cannot outnumber it."""
    pieces = ["<think>", "first", ", then", " so", "</think>", "Yes", "."]
    engine = reciting("", pieces=pieces, mode=mode)
    for limit in range(1, 8):
        generation = engine.generate([[0]], [SamplingParams(max_tokens=limit)])[0]
        assert generation.token_ids == list(range(limit))
        assert (generation.text, generation.finish_reason) == ("".join(pieces[:limit]), "length")


@pytest.mark.parametrize("mode", MODES)
def test_the_end_of_the_context_ends_the_answer(mode):
    engine = reciting("abcdefghijklmnopqrstuvwxyz", mode=mode)
    engine.max_model_len = 20
    generation = engine.generate([[0]], [SamplingParams()])[0]
    assert (len(generation.token_ids), generation.finish_reason) == (19, "length")


def test_acceptance_counts_before_cuts():
    """One round that accepts 15 and has a bonus, cut after 5 tokens."""
    generation = reciting("abcdefghijklmnopqrstuvwxyz", mode="linear").generate([[0]], [SamplingParams(max_tokens=5)])[
        0
    ]
    assert generation.rounds == 1
    assert generation.acceptance_length == 16.0


def test_each_request_of_a_batch_ends_for_its_own_reason():
    engine = reciting("abcdefghijklmnopqrstuvwxyz", mode="tree")
    params = [
        SamplingParams(max_tokens=3),
        SamplingParams(max_tokens=40, stop=("e",)),
        SamplingParams(max_tokens=40, stop=("zz", "jk")),
        SamplingParams(max_tokens=40, ignore_eos=True),
    ]
    texts = [g.text for g in engine.generate([[0]] * 4, params)]
    assert texts == ["abc", "abcd", "abcdefghi", ("abcdefghijklmnopqrstuvwxyz" * 2)[:40]]


def test_closing_a_stream_frees_its_slot():
    engine = reciting("abcdefghijklmnopqrstuvwxyz", mode="tree")
    stream = engine.stream([0], SamplingParams(max_tokens=40))
    next(stream)
    assert engine.scheduler.stats().running == 1
    stream.close()
    assert engine.scheduler.stats().running == 0
    engine.stream([0], SamplingParams(max_tokens=40)).close()  # never advanced: nothing was taken
    assert not engine.scheduler.has_work


def test_two_streams_at_once_do_not_share_a_slot():
    engine = reciting("abcdefghijklmnopqrstuvwxyz", block=4, mode="tree")
    one, two = (engine.stream([0], SamplingParams(max_tokens=26)) for _ in range(2))
    texts = ["", ""]
    for pair in zip(one, two, strict=True):
        texts = [text + chunk.text for text, chunk in zip(texts, pair, strict=True)]
    assert texts == ["abcdefghijklmnopqrstuvwxyz"] * 2


def test_a_step_that_fails_ends_every_stream(monkeypatch):
    """Also those whose readers did not take that step: they wait for nothing."""
    engine = reciting("abcdefghijklmnopqrstuvwxyz", block=4, mode="tree")
    one, two = (engine.stream([0], SamplingParams(max_tokens=26)) for _ in range(2))
    next(one), next(two)
    step, steps = engine.scheduler.step, []

    def failing():
        steps.append(1)
        assert len(steps) < 50, "it turns for ever"
        if len(steps) == 1:
            raise RuntimeError("a fault")
        return step()

    monkeypatch.setattr(engine.scheduler, "step", failing)
    with pytest.raises(RuntimeError, match="a fault"):
        list(one)
    with pytest.raises(DDTreeError, match="this answer was dropped"):
        list(two)
    assert next(chunk.text for chunk in engine.stream([0], SamplingParams(max_tokens=3))) == "a"


@pytest.mark.parametrize(
    ("prompt", "params", "error", "words"),
    [
        ([], {}, InvalidOption, "empty"),
        ([99], {}, InvalidOption, "token ids must be from 0 to 27"),
        ([-1], {}, InvalidOption, "token ids"),
        ([0] * 512, {}, ContextLengthExceeded, "512"),
        ([0] * 10, {"max_tokens": 503}, ContextLengthExceeded, "at most 502"),
    ],
)
def test_prompts_that_cannot_be_run(prompt, params, error, words):
    engine = reciting("abc", mode="tree")
    for call in (engine.stream, lambda p, s: engine.generate([p], [s])):
        with pytest.raises(error, match=words):
            call(prompt, SamplingParams(**params))


def test_a_model_whose_logits_are_not_numbers_says_so():
    engine = scripted_engine(ScriptedTarget(lambda history: [float("nan")] * (END + 1), END + 1), None, LETTERS)
    with pytest.raises(DamagedFile, match="not numbers"):
        engine.generate([[0]], [SamplingParams(max_tokens=3)])


def test_a_mode_that_needs_a_drafter_says_so():
    target = ScriptedTarget(lambda history: one_hot(0), END + 1)
    with pytest.raises(DDTreeError, match="mode tree needs a drafter"):
        scripted_engine(target, None, LETTERS, mode="tree")
    assert scripted_engine(target, None, LETTERS, mode="ar").generate([[0]], [SamplingParams(max_tokens=3)])[0].text


class Pieces:
    """A token stream of given pieces."""

    def __init__(self, pieces):
        self.pieces = pieces

    def push(self, token):
        return self.pieces[token]

    def flush(self):
        return ""


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab \u00e9", max_size=4), min_size=1, max_size=12),
    stops=st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3),
    groups=st.lists(st.integers(1, 5), min_size=1, max_size=12),
)
def test_the_end_does_not_depend_on_how_tokens_are_grouped(pieces, stops, groups):
    def run(sizes):
        output, shown, at = RequestOutput(Pieces(pieces), stops, frozenset()), "", 0
        for size in sizes:
            shown += output.push(range(at, min(at + size, len(pieces))))
            at += size
        shown += output.finish("length")
        assert shown == output.text
        return output.text, output.token_ids, output.finish_reason

    one_by_one = run([1] * len(pieces))
    assert run([*groups, len(pieces)]) == one_by_one
    text, ids, reason = one_by_one
    whole = "".join(pieces)
    if any(stop in whole for stop in stops):
        assert reason == "stop"
        assert not any(stop in text for stop in stops)
        assert whole.startswith(text)
        assert len("".join(pieces[: len(ids)])) > len(text)
    else:
        assert (text, ids, reason) == (whole, list(range(len(pieces))), "length")
