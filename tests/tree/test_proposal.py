"""top_k against a stable sort and torch.log_softmax."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddtree.tree import best, top_k

Fill = Callable[[torch.Generator, tuple[int, ...]], Tensor]
VOCABS = (1, 2, 63, 128, 129, 130, 257, 1000)
RANKS = (1, 2, 3, 7, 8, 100)


def normal(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=generator) * 5


def tied(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Few values, both zeros among them."""
    return torch.tensor([-2.0, -0.0, 0.0, 1.5])[torch.randint(4, shape, generator=generator)]


def equal(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.full(shape, -3.25)


def masked(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Most tokens are forbidden; the last one, which stands beside padding, never is."""
    values = tied(generator, shape).masked_fill(torch.rand(shape, generator=generator) < 0.95, -torch.inf)
    values[..., -1] = 0.0
    return values


def tail(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """The largest stand at the end."""
    return normal(generator, shape).sort(-1).values


FILLS = (normal, tied, equal, masked, tail)


def check(logits: Tensor, k: int) -> None:
    proposal = top_k(logits, k)
    kept = min(k, logits.shape[-1])
    assert proposal.tokens.shape == proposal.log_q.shape == (*logits.shape[:-1], kept)
    assert (proposal.tokens.dtype, proposal.log_q.dtype) == (torch.int64, torch.float32)
    # A stable sort leaves equal values in the order of their index.
    expected = logits.float().sort(dim=-1, descending=True, stable=True).indices[..., :kept]
    assert torch.equal(proposal.tokens, expected)
    reference = torch.log_softmax(logits.double(), -1).gather(-1, expected)
    torch.testing.assert_close(proposal.log_q.double(), reference, rtol=1e-5, atol=1e-5)
    assert bool((proposal.log_q <= 0).all())
    assert bool((proposal.log_q.diff(dim=-1).nan_to_num(0.0) <= 0).all())  # best first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_top_k_is_a_stable_sort(vocab: int, fill: Fill, dtype: torch.dtype) -> None:
    logits = fill(torch.Generator().manual_seed(vocab), (2, 3, vocab)).to(dtype)
    for k in (*RANKS, vocab, vocab + 1):
        check(logits, k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fill", FILLS)
def test_top_k_of_a_real_vocabulary(fill: Fill, dtype: torch.dtype) -> None:
    check(fill(torch.Generator().manual_seed(0), (1, 2, 49152)).to(dtype), 8)


@given(st.integers(1, 700), st.integers(1, 9), st.integers(0, 2**31), st.sampled_from(FILLS), st.booleans())
@settings(deadline=None)
def test_top_k_of_any_size(vocab: int, k: int, seed: int, fill: Fill, half: bool) -> None:
    logits = fill(torch.Generator().manual_seed(seed), (1, 2, vocab))
    check(logits.bfloat16() if half else logits, k)


def test_log_q_is_normalised_over_the_whole_vocabulary() -> None:
    logits = normal(torch.Generator().manual_seed(1), (1, 4, 1000))
    torch.testing.assert_close(top_k(logits, 1000).log_q.exp().sum(-1), torch.ones(1, 4))
    assert bool((top_k(torch.zeros(1, 1, 1000), 8).log_q.exp().sum(-1) < 0.0081).all())


@pytest.mark.parametrize("size", [1.0, 30.0, 1e4, 1e30])
def test_a_certain_token_has_probability_1_at_most(size: float) -> None:
    """Rounding must not lift a probability above 1: a child would outscore its parent."""
    logits = normal(torch.Generator().manual_seed(2), (1, 200, 63)) * size
    log_q = top_k(logits, 3).log_q
    assert bool((log_q <= 0).all())
    assert not bool(log_q.isnan().any())


def test_forbidden_tokens_are_minus_infinity() -> None:
    logits = torch.full((1, 1, 300), -torch.inf)
    logits[0, 0, 299] = 2.0
    proposal = top_k(logits, 3)
    assert proposal.tokens.tolist() == [[[299, 0, 1]]]
    assert proposal.log_q.tolist() == [[[0.0, -torch.inf, -torch.inf]]]


def test_logits_may_be_a_view() -> None:
    whole = tied(torch.Generator().manual_seed(3), (5, 1000, 6))
    check(whole.transpose(1, 2)[:, 1:4], 4)
    check(whole.transpose(1, 2)[:, ::2, 5:900:3], 2)


def test_logits_are_left_alone() -> None:
    logits = normal(torch.Generator().manual_seed(4), (1, 2, 130))
    before = logits.clone()
    top_k(logits, 130)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("columns", [1, 4, 127, 128, 129, 1000, 49152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_best_is_argmax_with_the_lowest_index_on_ties(columns: int, dtype: torch.dtype) -> None:
    values = torch.randn(3, 5, columns, generator=torch.Generator().manual_seed(columns)).mul(4).round().to(dtype)
    assert torch.equal(best(values), values.argmax(-1))
    assert torch.equal(best(torch.zeros(2, columns, dtype=dtype)), torch.zeros(2, dtype=torch.int64))
