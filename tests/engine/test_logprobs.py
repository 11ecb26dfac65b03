"""Reported log-probabilities are the model's own."""

import math

import pytest
import torch

from ddtree.engine.sampling import TokenLogprob, token_logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("vocab", [1, 7, 300, 20_000])
@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_equal_to_a_plain_log_softmax(dtype: torch.dtype, vocab: int, k: int) -> None:
    """llama.cpp#27972: every log-probability was 0.0."""
    logits = (torch.randn(6, vocab, generator=torch.Generator().manual_seed(k)) * 5).to(dtype)
    chosen = [(7 * row) % vocab for row in range(6)]
    plain = torch.log_softmax(logits.double(), -1)
    found = token_logprobs(logits, chosen, k)
    for row, (token, entry) in enumerate(zip(chosen, found, strict=True)):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(plain[row, token]), abs=1e-5)
        order = sorted(range(vocab), key=lambda t: (-float(logits[row, t]), t))[:k]
        assert [t for t, _ in entry.top] == order
        assert [p for _, p in entry.top] == pytest.approx([float(plain[row, t]) for t in order], abs=1e-5)
        assert dict(entry.top).get(token, entry.logprob) == entry.logprob


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = torch.randn(17, 49_152, generator=torch.Generator().manual_seed(3)) * 3
    chosen = list(range(100, 117))
    together = token_logprobs(logits, chosen, 5)
    assert [token_logprobs(logits[i : i + 1], [chosen[i]], 5)[0] for i in range(17)] == together
    assert token_logprobs(logits[3:9], chosen[3:9], 5) == together[3:9]


def test_extremes() -> None:
    logits = torch.tensor([[0.0, -torch.inf, -torch.inf], [3e38, 3e38, -3e38], [500.0, 0.0, 0.0]])
    certain, huge, near = token_logprobs(logits, [0, 2, 0], 2)
    assert certain == TokenLogprob(0, 0.0, ((0, 0.0), (1, -math.inf)))
    assert math.copysign(1, certain.logprob) == 1
    assert huge.top == ((0, pytest.approx(-math.log(2), abs=1e-6)), (1, pytest.approx(-math.log(2), abs=1e-6)))
    assert near.logprob == 0.0
    assert token_logprobs(logits, [1, 1, 1], 0)[2] == TokenLogprob(1, -500.0, ())
    assert token_logprobs(torch.empty(0, 3), [], 4) == []


def test_ties_are_listed_by_id() -> None:
    [entry] = token_logprobs(torch.zeros(1, 9_000), [8_999], 4)
    assert [token for token, _ in entry.top] == [0, 1, 2, 3]
