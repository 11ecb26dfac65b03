"""Penalties and biases: what they count, and along which path."""

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy import stats

from ddtree.config import SamplingParams
from ddtree.engine.sampling import HostRows, RowSampler

CPU = torch.device("cpu")
LIMIT = 1e-3  # p-value; seeds are fixed, so a test passes always or never
# The root, its children 1 and 2, 1's child 1, 2's child 1, and 1 - 1 - 2.
TREE = HostRows([0, 1, 2, 1, 1, 2], [-1, 0, 0, 1, 2, 3], [0, 1, 1, 2, 2, 3])
PATHS = [[], [1], [2], [1, 1], [2, 1], [1, 1, 2]]


def scores(params: SamplingParams, prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """What TREE's rows are drawn from: [6, V]."""
    one = RowSampler(params, 0, prompt, logits.shape[-1], CPU)
    one.commit(output)
    return one._processed(logits.expand(len(TREE), -1), TREE)


@pytest.mark.parametrize("penalty", [2.0, 0.5, -2.0])
def test_frequency_counts_output_and_own_path(penalty: float) -> None:
    """Not the prompt, not siblings, not other branches."""
    changed = scores(SamplingParams(frequency_penalty=penalty), [3, 3], [2, 0, 2], torch.zeros(5))
    for row, path in enumerate(PATHS):
        counts = Counter([2, 0, 2, *path])
        assert changed[row].tolist() == [-penalty * counts[token] for token in range(5)]


@pytest.mark.parametrize("penalty", [2.0, -0.5])
def test_presence_counts_a_token_once(penalty: float) -> None:
    changed = scores(SamplingParams(presence_penalty=penalty), [3, 3], [2, 0, 2], torch.zeros(5))
    for row, path in enumerate(PATHS):
        assert changed[row].tolist() == [-penalty if token in {2, 0, *path} else 0 for token in range(5)]


@pytest.mark.parametrize("penalty", [2.0, 0.25, 1e6, 1e-30])
def test_repetition_counts_prompt_too_and_once_however_often(penalty: float) -> None:
    logits = torch.tensor([1.0, 2.0, -1.0, -3.0, 0.5, 0.0])
    changed = scores(SamplingParams(repetition_penalty=penalty), [3, 3, 3], [0, 0], logits)
    for row, path in enumerate(PATHS):
        seen = {3, 0, *path}
        expected = [(x / penalty if x > 0 else x * penalty) if t in seen else x for t, x in enumerate(logits.tolist())]
        assert changed[row].tolist() == pytest.approx(expected, rel=1e-6)


def test_order_is_bias_repetition_frequency_presence() -> None:
    params = SamplingParams(
        logit_bias=((1, 3.0), (4, -2.0)), repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5
    )
    changed = scores(params, [4], [1], torch.tensor([0.0, -1.0, 1.0, 1.0, 1.0]))
    assert changed[0].tolist() == [0.0, (3.0 - 1.0) / 2 - 0.25 - 0.5, 1.0, 1.0, (1.0 - 2.0) * 2]
    assert changed[3].tolist() == [0.0, (3.0 - 1.0) / 2 - 0.75 - 0.5, 1.0, 1.0, (1.0 - 2.0) * 2]


def test_what_the_model_forbids_stays_forbidden_and_nothing_overflows() -> None:
    logits = torch.tensor([-torch.inf, 3e38, -3e38, 0.0])
    for repetition in (1e6, 1e-30):
        params = SamplingParams(repetition_penalty=repetition, frequency_penalty=-2, logit_bias=((0, 100), (1, 100)))
        changed = scores(params, [0, 1, 2], [0, 1, 2, 3], logits)
        assert bool((changed[:, 0] == -torch.inf).all())
        assert bool(changed[:, 1:].isfinite().all())


def test_penalties_after_many_rounds_are_those_of_the_whole_answer() -> None:
    rng = np.random.default_rng(1)
    output = rng.integers(0, 500, 700).tolist()
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=1.5)
    logits = torch.randn(500, generator=torch.Generator().manual_seed(0))
    one = RowSampler(params, 0, [1, 2, 3], 500, CPU)
    start = 0
    while start < len(output):
        step = int(rng.integers(0, 9))
        one.commit(output[start : start + step])
        start += step
    whole = RowSampler(params, 0, [1, 2, 3], 500, CPU)
    whole.commit(output)
    rows = logits.expand(len(TREE), -1)
    assert one._processed(rows, TREE).equal(whole._processed(rows, TREE))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_frequency_of_2_and_minus_2_differ_from_none_and_each_other(temperature: float) -> None:
    """vllm#18902: the penalty had no effect under speculation. Here every answer is read off one tree of 40 depths."""
    logits = torch.tensor([1.0, 0.9, 0.8, 0.7, 0.6]).expand(40, 5)
    answers = []
    for penalty in (2.0, 0.0, -2.0):
        one = RowSampler(SamplingParams(temperature=temperature, frequency_penalty=penalty), 3, [0], 5, CPU)
        one.commit([1])
        tokens = [1]
        for _ in range(39):  # a chain that guesses what is chosen, one token longer each time
            n = len(tokens)
            chain = HostRows(tokens, list(range(-1, n - 1)), list(range(n)))
            tokens = [*tokens, int(one.choose(logits[:n], chain, 0)[-1])]
        answers.append(tokens[1:])
    assert len({tuple(answer) for answer in answers}) == 3
    spread, plain, stuck = (max(Counter(answer).values()) for answer in answers)
    assert spread <= 10
    assert stuck == 39 if temperature == 0 else stuck > plain > spread


def test_min_tokens_by_depth() -> None:
    """The second token of the output is the first that may end it, wherever in a tree it is."""
    params = SamplingParams(min_tokens=1, stop_token_ids=(3,))
    for output, allowed_from in (([], 1), ([0], 0)):
        one = RowSampler(params, 0, [0], 5, CPU, end_ids=[4])
        one.commit(output)
        chosen = one.choose(torch.arange(5.0).expand(len(TREE), 5), TREE, 7)
        assert chosen.tolist() == [4 if depth >= allowed_from else 2 for depth in TREE.depths]


class Only:
    """A grammar that allows the same tokens everywhere."""

    finished = False

    def __init__(self, *tokens: int, vocab: int = 5) -> None:
        self.allowed = torch.tensor([token in tokens for token in range(vocab)])

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
        return self.allowed.expand(len(tokens), len(self.allowed))

    def bits(self, tokens: Sequence[int], parents: Sequence[int]) -> np.ndarray:
        """Beyond the vocabulary everything is set."""
        padded = np.pad(
            self.masks(tokens, parents).numpy(), ((0, 0), (0, 96 - len(self.allowed))), constant_values=True
        )
        return np.packbits(padded, axis=1, bitorder="little").view(np.int32)

    def commit(self, tokens: Sequence[int]) -> None:
        pass


def test_min_tokens_gives_way_where_the_grammar_is_complete() -> None:
    """Where it allows end tokens alone, there is nothing to fill the answer up with."""
    params = SamplingParams(min_tokens=9)
    for tokens, expected in (((1, 4), 1), ((3, 4), 4)):
        one = RowSampler(params, 0, [0], 5, CPU, matcher=Only(*tokens), end_ids=[3, 4])
        assert one.choose(torch.arange(5.0).expand(len(TREE), 5), TREE, 7).tolist() == [expected] * len(TREE)


@pytest.mark.parametrize("vocab", [33, 64, 65])
@pytest.mark.parametrize("allowed", [None, (1, 4), (3, 32), (32,), (2, 31, 32), ()], ids=str)
def test_masks_forbid_what_the_sampler_forbids(allowed: tuple[int, ...] | None, vocab: int) -> None:
    """A device is told of a grammar and of min_tokens by bits."""
    params = SamplingParams(min_tokens=3, stop_token_ids=(3, 32), presence_penalty=1.0)
    matcher = None if allowed is None else Only(*allowed, vocab=vocab)
    one = RowSampler(params, 0, [0], vocab, CPU, matcher=matcher, end_ids=[31])  # type: ignore[arg-type]
    assert one.masked
    for output in ([0], [5, 6, 7]):
        one.commit(output)
        bits = np.unpackbits(one.mask(TREE).view(np.uint8), axis=1, bitorder="little", count=vocab)
        may = one._processed(torch.zeros(len(TREE), vocab), TREE) > -torch.inf
        assert bits.astype(bool).tolist() == may.tolist()


def full_tree(vocab: int, depth: int) -> HostRows:
    """Every sequence of up to `depth` tokens."""
    paths = [p for d in range(depth + 1) for p in itertools.product(range(vocab), repeat=d)]
    index = {path: row for row, path in enumerate(paths)}
    return HostRows(
        [path[-1] if path else 0 for path in paths],
        [index[path[:-1]] if path else -1 for path in paths],
        [len(path) for path in paths],
    )


REQUESTS = [
    {"frequency_penalty": 1.0},
    {"frequency_penalty": -1.0, "presence_penalty": 0.5},
    {"repetition_penalty": 1.8, "logit_bias": ((2, 0.5),)},
    {"frequency_penalty": 0.7, "top_p": 0.9},
    {"presence_penalty": -0.5, "top_k": 2},
    {"repetition_penalty": 0.6, "min_p": 0.3},
]


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_joint_distribution_of_a_tree_of_three_depths(request_: dict[str, float]) -> None:
    """Followed from the root, the rows' own tokens are a draw of the penalised model, 4 tokens at a time."""
    vocab, draws, tree = 3, 2_000, full_tree(3, 3)
    logits = torch.randn(len(tree), vocab, generator=torch.Generator().manual_seed(9)) * 0.7
    children = {(p, t): row for row, (p, t) in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    params = SamplingParams(temperature=0.9, **request_)  # type: ignore[arg-type]
    found: Counter[tuple[int, ...]] = Counter()
    for seed in range(draws):
        one = RowSampler(params, seed, [0], vocab, CPU)
        one.commit([1])
        own, row, answer = one.choose(logits, tree, 5).tolist(), 0, []
        while row is not None:
            answer.append(own[row])
            row = children.get((row, own[row]))
        found[tuple(answer)] += 1

    def law(path: tuple[int, ...]) -> np.ndarray:
        row = 0
        for token in path:
            row = children[row, token]
        x = logits[row].double().numpy().copy()
        output = [1, *path]
        for token, bias in params.logit_bias:
            x[token] += bias
        for token in {0, *output}:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        for token in set(output):
            x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
        p = np.exp(x / params.temperature - np.max(x) / params.temperature)
        p[p < params.min_p] = 0
        order = np.argsort(-p)
        if params.top_k:
            p[order[params.top_k :]] = 0
        p /= p.sum()
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= params.top_p]] = 0
        return p / p.sum()

    cells = list(itertools.product(range(vocab), repeat=4))
    expected = np.array([np.prod([law(c[:i])[c[i]] for i in range(4)]) for c in cells]) * draws
    counts = np.array([found[c] for c in cells])
    assert counts[expected == 0].sum() == 0
    big = expected >= 5
    rest = (expected[~big].sum(), counts[~big].sum())
    observed, wanted = [*counts[big], rest[1]], [*expected[big], rest[0]]
    if rest[0] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    assert stats.chisquare(observed, np.array(wanted) * sum(observed) / sum(wanted)).pvalue > LIMIT
