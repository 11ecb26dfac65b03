"""Every parameter and their combinations against a slow, plain sampler in NumPy float64, on random trees."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddtree.config import Grammar, SamplingParams
from ddtree.engine.sampling import HostRows, RowSampler, gumbel

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


class EveryThird:
    """A grammar in which the history decides which two thirds of the tokens may follow."""

    finished = False

    def __init__(self, vocab: int) -> None:
        self.vocab, self.history = vocab, [0]

    def follows(self, history: Sequence[int]) -> list[bool]:
        place = sum(history) + len(history)
        return [(place + token) % 3 != 0 for token in range(self.vocab)]

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        paths: list[list[int] | None] = [self.history]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            above = paths[parent]
            paths.append([*above, token] if above is not None and self.follows(above)[token] else None)
        return torch.tensor([self.follows(p) if p is not None else [False] * self.vocab for p in paths])

    def commit(self, tokens: Sequence[int]) -> None:
        self.history += tokens


@dataclass
class Case:
    """One call of the sampler."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    rows: HostRows
    logits: Tensor
    seed: int
    end_ids: tuple[int, ...] = ()

    def sampler(self) -> RowSampler:
        vocab = self.logits.shape[1]
        matcher = EveryThird(vocab) if self.params.grammar else None
        one = RowSampler(self.params, self.seed, self.prompt, vocab, CPU, matcher=matcher, end_ids=self.end_ids)
        for token in self.output:
            one.commit([token])
        return one

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output) - 1

    def chosen(self) -> list[int]:
        return self.sampler().choose(self.logits, self.rows, self.position).tolist()

    def path(self, row: int) -> list[int]:
        """Rows from the root to a row."""
        return [] if row < 0 else [*self.path(self.rows.parents[row]), row]

    def processed(self, row: int) -> np.ndarray | None:
        """Logits before temperature, float64 rounded to float32; None where the grammar does not reach the row."""
        p, x = self.params, self.logits[row].double().numpy().copy()
        path = [self.rows.tokens[r] for r in self.path(row)[1:]]
        output, allowed = self.output + path, np.ones(len(x), bool)
        if p.grammar:
            grammar = EveryThird(len(x))
            for token in output:
                if not grammar.follows(grammar.history)[token]:
                    return None
                grammar.commit([token])
            allowed = np.array(grammar.follows(grammar.history))
        for token, bias in p.logit_bias:
            x[token] += bias
        for token in set(self.prompt + output):
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        for token in set(output):
            x[token] -= p.frequency_penalty * output.count(token)
            x[token] -= p.presence_penalty
        x[~allowed] = -np.inf
        ends = {*self.end_ids, *p.stop_token_ids}
        if len(output) < p.min_tokens and (not p.grammar or set(np.flatnonzero(allowed)) - ends):
            x[list(ends)] = -np.inf
        return x.astype(np.float32).astype(np.float64)

    def kept(self, x: np.ndarray) -> np.ndarray:
        """Ids that may be drawn, best first. Cases on a knife's edge between two roundings are given up."""
        p = self.params
        order = np.lexsort((np.arange(len(x)), -x))
        order = order[x[order] > -np.inf]
        odds = np.exp((x[order] - x[order[0]]) / p.temperature)
        if p.min_p > 0:
            assume(not np.any((np.abs(odds / p.min_p - 1) < 1e-5) & (odds < 1)))
            order, odds = order[odds >= p.min_p], odds[odds >= p.min_p]
        if p.top_k > 0:
            order, odds = order[: p.top_k], odds[: p.top_k]
        if p.top_p < 1:
            before = (np.cumsum(odds) - odds) / odds.sum()
            assume(not np.any(np.abs(before - p.top_p) < 1e-9))
            order = order[before < p.top_p]
        return order

    def check(self, chosen: list[int]) -> None:
        p = self.params
        for row, token in enumerate(chosen):
            x = self.processed(row)
            if x is None or not len(x) or x.max() == -np.inf:
                assert token == -1
                continue
            if p.temperature == 0:
                assert token == int(x.argmax())
                continue
            kept = np.sort(self.kept(x))
            noise = gumbel(self.seed, self.position + self.rows.depths[row] + 1, len(x)).double().numpy()
            scores = x[kept] + p.temperature * noise[kept]
            if p.top_p < 1 or p.min_p > 0 or 0 < p.top_k < len(x):
                assert token == int(kept[scores.argmax()])
            else:  # the whole vocabulary is added up in float32
                slack = 1e-5 * (1 + np.abs(x[token]) + p.temperature * abs(noise[token]))
                assert x[token] + p.temperature * noise[token] >= scores.max() - slack


@st.composite
def trees(draw: st.DrawFn, vocab: int) -> HostRows:
    n = draw(st.integers(1, 12))
    tokens, parents, depths = [draw(st.integers(0, vocab - 1))], [-1], [0]
    for row in range(1, n):
        parent = draw(st.integers(0, row - 1))
        # Few different tokens, so that paths repeat themselves and each other.
        tokens.append(draw(st.integers(0, min(vocab, 5) - 1)))
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return HostRows(tokens, parents, depths)


def number(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_subnormal=False)


@st.composite
def params_of(draw: st.DrawFn, vocab: int) -> SamplingParams:
    """Each parameter is off half of the time."""

    def maybe(off: Any, on: st.SearchStrategy[Any]) -> Any:
        return draw(st.one_of(st.just(off), on))

    tokens = st.integers(0, vocab - 1)
    bias = st.dictionaries(tokens, number(-100, 100) | st.sampled_from([-100, 0, 5]), max_size=4)
    return SamplingParams(
        temperature=draw(st.sampled_from([0, 0.3, 1, 1.0, 2.5]) | number(0.05, 5)),
        top_p=maybe(1, number(0.01, 0.999)),
        top_k=maybe(0, st.integers(-1, vocab + 3)),
        min_p=maybe(0, number(1e-4, 1)),
        presence_penalty=maybe(0, number(-2, 2)),
        frequency_penalty=maybe(0, number(-2, 2)),
        repetition_penalty=maybe(1, number(0.1, 3)),
        logit_bias=tuple(maybe({}, bias).items()),
        stop_token_ids=maybe((), st.lists(tokens, max_size=2).map(tuple)),
        min_tokens=maybe(0, st.integers(1, 8)),
        grammar=maybe(None, st.just(Grammar("regex", "x"))),
    )


@st.composite
def cases(draw: st.DrawFn, vocab: st.SearchStrategy[int]) -> Case:
    size = draw(vocab)
    rows, params = draw(trees(size)), draw(params_of(size))
    kind, spread = draw(st.sampled_from(["normal", "grid", "peaked"])), draw(st.sampled_from([0.3, 1.0, 4.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(len(rows), size, generator=generator) * spread
    if kind == "grid":  # many ties
        logits = logits.round()
    if kind == "peaked":
        logits[:, : size // 5 + 1] += 10
    if draw(st.booleans()):
        logits[torch.rand(logits.shape, generator=generator) < 0.2] = -torch.inf
    few = st.lists(st.integers(0, min(size, 6) - 1), max_size=8)
    prompt, output = draw(few.filter(bool)), draw(few)
    if params.grammar:
        output, grammar = [], EveryThird(size)
        for token in draw(few):
            if grammar.follows(grammar.history)[token]:
                grammar.commit([token])
                output.append(token)
    ends = tuple(draw(st.lists(st.integers(0, size - 1), max_size=2)))
    seed = draw(st.integers(-(2**63), 2**63 - 1))
    return Case(params, prompt, output, rows, logits.to(draw(st.sampled_from(DTYPES))), seed, ends)


@given(cases(st.integers(1, 80)))
@settings(deadline=None, max_examples=400)
def test_small_vocabularies(case: Case) -> None:
    case.check(case.chosen())


@given(cases(st.sampled_from([8_193, 9_001, 20_000])))
@settings(deadline=None, max_examples=60)
def test_vocabularies_that_are_searched_in_chunks(case: Case) -> None:
    """Here the few best tokens are looked at first, and often do not suffice."""
    case.check(case.chosen())


@given(cases(st.sampled_from([7, 50, 9_001])), st.data())
@settings(deadline=None, max_examples=100)
def test_a_row_is_chosen_as_if_its_path_were_alone(case: Case, data: st.DataObject) -> None:
    """Neither siblings nor descendants nor the order of the rows matter: a token's history is its own path."""
    chosen = case.chosen()
    row = data.draw(st.integers(0, len(chosen) - 1))
    path = case.path(row)
    chain = HostRows([case.rows.tokens[r] for r in path], list(range(-1, len(path) - 1)), list(range(len(path))))
    alone = Case(case.params, case.prompt, case.output, chain, case.logits[path], case.seed, case.end_ids)
    assert alone.chosen()[-1] == chosen[row]


@given(cases(st.sampled_from([7, 50, 9_001])))
@settings(deadline=None, max_examples=100)
def test_a_drafted_token_counts_as_a_committed_one(case: Case) -> None:
    """The choice below an accepted path is the one that plain decoding makes when it gets there."""
    chosen = case.chosen()
    for row, path in ((r, case.path(r)) for r in range(len(case.rows))):
        tokens = [case.rows.tokens[r] for r in path[1:]]
        if case.processed(row) is None:
            continue
        root = HostRows.root(case.rows.tokens[row])
        output = case.output + tokens
        later = Case(case.params, case.prompt, output, root, case.logits[row : row + 1], case.seed, case.end_ids)
        assert later.chosen() == [chosen[row]]


@given(cases(st.sampled_from([7, 9_001])))
@settings(deadline=None, max_examples=50)
def test_logits_are_left_as_they_were(case: Case) -> None:
    before, sampler = case.logits.clone(), case.sampler()
    first = sampler.choose(case.logits, case.rows, case.position)
    assert case.logits.equal(before)
    assert sampler.choose(case.logits, case.rows, case.position).equal(first)


@given(
    st.integers(0, 2**32),
    st.floats(0.2, 4),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.sampled_from([{"top_p": 0.9}, {"top_p": 0.05}, {"min_p": 0.02}, {"top_k": 300}, {"top_p": 0.9, "min_p": 0.001}]),
)
@settings(deadline=None, max_examples=12)
def test_a_model_sized_vocabulary(seed: int, spread: float, temperature: float, kinds: dict[str, Any]) -> None:
    logits = torch.randn(6, 49_152, generator=torch.Generator().manual_seed(seed)) * spread
    rows = HostRows([1, 2, 3, 3, 1, 2], [-1, 0, 0, 1, 2, 3], [0, 1, 1, 2, 2, 3])
    params = SamplingParams(temperature=temperature, frequency_penalty=0.5, **kinds)
    case = Case(params, [1, 2], [3, 4], rows, logits, 77)
    case.check(case.chosen())
