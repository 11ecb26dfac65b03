"""The noise is Gumbel noise that depends on seed, position and token alone; the sampler adds it and takes the best."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from ddtree.engine.sampling import Noise, Sampler, gumbel

CPU = torch.device("cpu")
SEEDS = (0, 1, 42, -1, 2**31, 2**32, 2**63 - 1, -(2**63), 0x1234_5678_9ABC_DEF0)
LIMIT = 1e-3  # p-value; seeds are fixed, so a test passes always or never
whole = st.integers(-(2**63), 2**63 - 1)


def correlation(a: Tensor, b: Tensor) -> float:
    """In standard deviations of what independent values show."""
    return float(np.corrcoef(a.numpy(), b.numpy())[0, 1]) * len(a) ** 0.5


@given(whole, st.integers(0, 2**40), st.integers(1, 300))
@settings(deadline=None)
def test_noise_is_finite_and_the_same_every_time(seed: int, position: int, vocab: int) -> None:
    noise = gumbel(seed, position, vocab)
    assert (noise.shape, noise.dtype) == ((vocab,), torch.float32)
    assert bool(noise.isfinite().all())
    assert torch.equal(noise, gumbel(seed, position, vocab))
    assert torch.equal(noise, gumbel(seed, position, vocab + 7)[:vocab])  # padding the vocabulary changes nothing


def test_noise_is_finite_and_has_few_repeats_over_millions_of_tokens() -> None:
    noise = gumbel(3, 5, 2**22)
    assert bool(noise.isfinite().all())
    assert float(noise.max()) > 12  # the upper tail, where samples of large vocabularies come from, is there
    assert len(noise[noise > 5].unique()) > 0.99 * int((noise > 5).sum())


@pytest.mark.parametrize("seed", SEEDS)
def test_every_bit_of_the_seed_counts(seed: int) -> None:
    noise = gumbel(seed, 7, 512)
    for bit in range(64):
        flipped = (seed ^ (1 << bit)) & (2**64 - 1)
        other = gumbel(flipped - 2**64 if flipped >= 2**63 else flipped, 7, 512)
        assert int((noise == other).sum()) <= 2
        assert abs(correlation(noise, other)) < 5


def test_negative_seeds_are_seeds_of_their_own() -> None:
    seeds = [s for n in (1, 2, 1000, 2**31, 2**32, 2**62) for s in (n, -n)]
    rows = {tuple(gumbel(s, 0, 8).tolist()) for s in [*seeds, 0, 2**32 - 1, 2**63 - 1, -(2**63)]}
    assert len(rows) == len(seeds) + 4


@pytest.mark.parametrize("seed", [0, -1, 2**40 + 5])
def test_every_bit_of_the_position_counts(seed: int) -> None:
    noise = gumbel(seed, 0, 512)
    for bit in range(31):
        other = gumbel(seed, 1 << bit, 512)
        assert int((noise == other).sum()) <= 2
        assert abs(correlation(noise, other)) < 5


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_over_tokens_is_gumbel(seed: int) -> None:
    noise = gumbel(seed, 1234, 2**18).double().numpy()
    assert stats.kstest(noise, stats.gumbel_r.cdf).pvalue > LIMIT
    error = 5 / len(noise) ** 0.5  # five standard errors of a variance of 1
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=error * np.pi / 6**0.5)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=error * np.pi**2 / 6 * 4.4**0.5)  # kurtosis 5.4
    assert stats.skew(noise) == pytest.approx(1.1395, abs=0.1)


@pytest.mark.parametrize("token", [0, 1, 1023])
def test_noise_of_a_token_over_seeds_and_positions_is_gumbel(token: int) -> None:
    over_seeds = torch.stack([gumbel(seed, 9, 1024)[token] for seed in range(2000)])
    over_positions = torch.stack([gumbel(5, position, 1024)[token] for position in range(2000)])
    for noise in (over_seeds, over_positions):
        assert stats.kstest(noise.double().numpy(), stats.gumbel_r.cdf).pvalue > LIMIT
        for lag in (1, 2, 3, 16):
            assert abs(correlation(noise[:-lag], noise[lag:])) < 4.5


def test_tokens_do_not_correlate() -> None:
    noise = gumbel(11, 22, 2**17)
    index = torch.arange(2**17)
    for lag in (1, 2, 3, 4, 5, 8, 64, 1000, 2**16):
        assert abs(correlation(noise[:-lag], noise[lag:])) < 4.5
        assert abs(correlation(noise, noise[index ^ lag])) < 4.5 * 2**0.5  # every pair counts twice


@pytest.mark.parametrize("seed", [0, 1, -1, 2**33 + 7])
def test_neighbouring_positions_and_seeds_do_not_correlate(seed: int) -> None:
    noise = gumbel(seed, 100, 2**14)
    for other in (
        *(gumbel(seed, 100 + step, 2**14) for step in (1, 2, -1, 64)),
        *(gumbel(seed + step, 100, 2**14) for step in (1, 2, -1, 64, 2**32)),
        gumbel(seed + 1, 101, 2**14),
        gumbel(seed + 1, 99, 2**14),
        gumbel(100, seed & 0xFFFF, 2**14),
    ):
        for shift in (0, 1, -1):
            assert abs(correlation(noise, other.roll(shift))) < 4.5


def test_samples_follow_the_softmax() -> None:
    """The noise of 8 tokens at a time, as one draw each: 40,000 draws a temperature."""
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, 0.5, -0.5, 1.9])
    noise = gumbel(2026, 3, 8 * 40_000).reshape(-1, 8)
    for temperature in (0.5, 1.0, 2.5):
        counts = (logits + temperature * noise).argmax(-1).bincount(minlength=8).numpy()
        expected = torch.softmax(logits.double() / temperature, -1).numpy() * counts.sum()
        assert stats.chisquare(counts, expected).pvalue > LIMIT


def sampler(*requests: tuple[float, int], vocab: int) -> Sampler:
    """A sampler of (temperature, seed) requests."""
    return Sampler([t for t, _ in requests], [s for _, s in requests], vocab, CPU)


def test_chosen_tokens_follow_the_softmax() -> None:
    logits, rows = torch.tensor([0.0, 1.0, -1.0, 0.5]), 2000
    for temperature in (0.5, 1.0, 2.0):
        chosen = sampler((temperature, 99), vocab=4).choose(
            logits.expand(1, rows, 4), torch.arange(rows).unsqueeze(0), torch.tensor([17])
        )
        expected = torch.softmax(logits.double() / temperature, -1).numpy() * rows
        assert stats.chisquare(chosen[0].bincount(minlength=4).numpy(), expected).pvalue > LIMIT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 5, 63, 1000, 49152])
def test_greedy_takes_the_lowest_of_equal_tokens(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randint(-3, 4, (3, 4, vocab), generator=generator) / 2).to(dtype)
    chosen = sampler((0.0, 1), (0.0, 2), (0.0, 3), vocab=vocab).choose(
        logits, torch.arange(4).expand(3, 4), torch.tensor([0, 5, 9])
    )
    lowest = [[row.index(max(row)) for row in sequence] for sequence in logits.tolist()]
    assert chosen.tolist() == lowest
    one = sampler((0.0, 1), vocab=vocab)
    assert [one.choose_one(0, row, 3) for row in logits[0]] == lowest[0]


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-46, 1e-300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tiny_temperature_is_greedy(temperature: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.stack([torch.randperm(97, generator=generator) for _ in range(20)]).to(dtype).unsqueeze(0) - 50
    rows, position = torch.arange(20).unsqueeze(0), torch.tensor([3])
    assert sampler((temperature, 5), vocab=97).choose(logits, rows, position).equal(logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e20, 1e38, 1e39, 1e300])
def test_a_huge_temperature_leaves_the_noise_alone(temperature: float) -> None:
    """Every finite temperature is allowed, so none may overflow: the limit is a uniform choice."""
    logits = torch.randn(1, 20, 97, generator=torch.Generator().manual_seed(0))
    chosen = sampler((temperature, 5), vocab=97).choose(logits, torch.arange(20).unsqueeze(0), torch.tensor([3]))
    assert chosen[0].tolist() == [int(gumbel(5, 4 + depth, 97).argmax()) for depth in range(20)]


def test_choose_is_the_argmax_of_logits_plus_noise() -> None:
    logits = torch.randn(2, 6, 50, generator=torch.Generator().manual_seed(1))
    depths, position = torch.tensor([[0, 1, 1, 2, 2, 3], [0, 1, 2, 3, 0, 0]]), torch.tensor([10, 400])
    chosen = sampler((0.7, -3), (1.5, 2**62), vocab=50).choose(logits, depths, position)
    for b, (temperature, seed) in enumerate([(0.7, -3), (1.5, 2**62)]):
        for row in range(6):
            noise = gumbel(seed, int(position[b] + depths[b, row]) + 1, 50)
            scores = logits[b, row].double() + temperature * noise.double()
            assert int(chosen[b, row]) == int(scores.argmax())


def test_the_token_depends_on_seed_and_position_alone() -> None:
    """Not on row, depth, place in the batch, neighbours, or how the position splits into root and depth."""
    logits, seed, at = torch.zeros(40), 77, 30
    expected = sampler((1.0, seed), vocab=40).choose_one(0, logits, at)
    for place in range(3):
        requests = [(0.5, 1), (0.0, 2), (2.0, 3)]
        requests[place] = (1.0, seed)
        for depth in range(5):
            depths = torch.tensor([[0, 1, 1, 2, 3, 4, depth, 2]] * 3)
            chosen = sampler(*requests, vocab=40).choose(
                logits.expand(3, 8, 40), depths, torch.tensor([at - depth - 1] * 3)
            )
            assert int(chosen[place, 6]) == expected
            same = depths[place] == depth
            assert bool((chosen[place, same] == expected).all())


def test_a_batch_is_its_requests_one_by_one() -> None:
    logits = torch.randn(4, 7, 30, generator=torch.Generator().manual_seed(2)).bfloat16()
    depths = torch.tensor([[0, 1, 2, 2, 3, 3, 0]] * 4)
    requests, position = [(1.0, 5), (0.0, 5), (0.3, -5), (1.0, 5)], torch.tensor([3, 3, 8, 4])
    together = sampler(*requests, vocab=30).choose(logits, depths, position)
    for b, request in enumerate(requests):
        alone = sampler(request, vocab=30).choose(logits[b : b + 1], depths[b : b + 1], position[b : b + 1])
        assert together[b].tolist() == alone[0].tolist()


def test_forgotten_positions_come_back_the_same() -> None:
    noise = Noise(8, 20, CPU)
    before = [noise.at(position).clone() for position in range(6)]
    noise.forget(4)
    assert all(torch.equal(noise.at(position), before[position]) for position in range(6))


def test_rounds_at_moving_roots_use_the_noise_of_their_positions() -> None:
    one = sampler((1.0, 4), vocab=25)
    for root in (0, 1, 4, 5, 9, 2):
        chosen = one.choose(torch.zeros(1, 4, 25), torch.arange(4).unsqueeze(0), torch.tensor([root]))
        assert chosen[0].tolist() == [int(gumbel(4, root + depth + 1, 25).argmax()) for depth in range(4)]
