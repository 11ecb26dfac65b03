"""The noise is Gumbel noise that depends on seed, position and token alone; the sampler adds it and takes the best."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from ddtree.config import SamplingParams
from ddtree.engine import sampling
from ddtree.engine.sampling import HostRows, Noise, RowSampler, _gumbel_at, greedy, gumbel
from ddtree.errors import DamagedFile, InvalidOption

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


def sampler(temperature: float, seed: int, vocab: int) -> RowSampler:
    """A sampler of one request that asks for nothing but a temperature."""
    return RowSampler(SamplingParams(temperature=temperature), seed, [0], vocab, CPU)


def at(*depths: int) -> HostRows:
    """Rows at some depths, all below the root."""
    return HostRows([0] * len(depths), [-1] + [0] * (len(depths) - 1), list(depths))


def test_noise_at_a_few_tokens_is_that_of_the_whole_row() -> None:
    generator = torch.Generator().manual_seed(3)
    for shape in ((1, 1), (1, 7), (3, 64), (16, 33), (2, 49152)):
        ids = torch.randint(0, 49152, shape, generator=generator)
        positions = list(range(100, 100 + shape[0]))
        for seed in SEEDS[:4]:
            few = _gumbel_at(seed, positions, ids)
            for row, position in enumerate(positions):
                assert torch.equal(few[row], gumbel(seed, position, 49152)[ids[row]])


def test_chosen_tokens_follow_the_softmax() -> None:
    logits, rows = torch.tensor([0.0, 1.0, -1.0, 0.5]), 2000
    for temperature in (0.5, 1.0, 2.0):
        chosen = sampler(temperature, 99, 4).choose(logits.expand(rows, 4), at(*range(rows)), 17)
        expected = torch.softmax(logits.double() / temperature, -1).numpy() * rows
        assert stats.chisquare(chosen.bincount(minlength=4).numpy(), expected).pvalue > LIMIT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("vocab", [1, 5, 63, 1000, 49152])
def test_greedy_takes_the_lowest_of_equal_tokens(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randint(-3, 4, (4, vocab), generator=generator) / 2).to(dtype)
    one = sampler(0.0, 1, vocab)
    assert one.plain
    lowest = [row.index(max(row)) for row in logits.tolist()]
    assert one.choose(logits, at(0, 1, 2, 3), 5).tolist() == lowest
    assert greedy(logits).tolist() == lowest


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-46, 1e-300, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extra", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}], ids=str)
def test_a_tiny_temperature_is_greedy(temperature: float, dtype: torch.dtype, extra: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.stack([torch.randperm(97, generator=generator) for _ in range(20)]).to(dtype) - 50
    one = RowSampler(SamplingParams(temperature=temperature, **extra), 5, [0], 97, CPU)
    assert one.choose(logits, at(*range(20)), 3).equal(logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e20, 1e38, 1e39, 1e300])
@pytest.mark.parametrize("extra", [{}, {"top_k": 96}, {"min_p": 1e-300}], ids=str)
def test_a_huge_temperature_leaves_the_noise_alone(temperature: float, extra: dict[str, Any]) -> None:
    """Every finite temperature is allowed, so none may overflow: the limit is a uniform choice."""
    logits = torch.randn(20, 97, generator=torch.Generator().manual_seed(0))
    logits[:, 96] = -torch.inf  # but never of what is forbidden
    one = RowSampler(SamplingParams(temperature=temperature, **extra), 5, [0], 97, CPU)
    chosen = one.choose(logits, at(*range(20)), 3)
    assert chosen.tolist() == [int(gumbel(5, 4 + depth, 96).argmax()) for depth in range(20)]


def test_scores_that_are_equal_go_to_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """A higher logit does not win where the noise leaves no difference."""
    monkeypatch.setattr(sampling, "_gumbel_at", lambda seed, positions, tokens: torch.ones(tokens.shape))
    one = RowSampler(SamplingParams(temperature=1e17, top_k=2), 0, [0], 3, CPU)
    assert one.choose(torch.tensor([[1.0, 2.0, 0.0]]), at(0), 0).tolist() == [0]


def test_choose_is_the_argmax_of_logits_plus_noise() -> None:
    logits, depths = torch.randn(6, 50, generator=torch.Generator().manual_seed(1)), [0, 1, 1, 2, 2, 3]
    for temperature, seed, position in ((0.7, -3, 10), (1.5, 2**62, 400)):
        chosen = sampler(temperature, seed, 50).choose(logits, at(*depths), position)
        for row, depth in enumerate(depths):
            noise = gumbel(seed, position + depth + 1, 50)
            assert int(chosen[row]) == int((logits[row].double() + temperature * noise.double()).argmax())


def test_the_token_depends_on_seed_and_position_alone() -> None:
    """Not on row, depth, neighbours, or how the position splits into root and depth."""
    logits, seed, place = torch.zeros(40), 77, 30
    for extra in ({}, {"top_p": 0.9}, {"top_k": 30}):
        params = SamplingParams(temperature=1.0, **extra)  # type: ignore[arg-type]
        expected = int(RowSampler(params, seed, [0], 40, CPU).choose(logits.unsqueeze(0), at(0), place - 1))
        for depth in range(5):
            depths = [0, 1, 1, 2, 3, 4, depth, 2]
            one = RowSampler(params, seed, [0], 40, CPU)
            chosen = one.choose(logits.expand(8, 40), at(*depths), place - depth - 1).tolist()
            assert all(token == expected for token, d in zip(chosen, depths, strict=True) if d == depth)


def test_the_same_seed_twice_and_another() -> None:
    """vllm#6038: the seed of a request was ignored."""
    logits, rows = torch.zeros(30, 1000), at(*range(30))
    first = sampler(1.0, 12, 1000).choose(logits, rows, 4)
    assert first.equal(sampler(1.0, 12, 1000).choose(logits, rows, 4))
    assert not first.equal(sampler(1.0, 13, 1000).choose(logits, rows, 4))


def test_forgotten_positions_come_back_the_same() -> None:
    noise = Noise(8, 20, CPU)
    before = [noise.at(position).clone() for position in range(6)]
    noise.forget(4)
    assert all(torch.equal(noise.at(position), before[position]) for position in range(6))


def test_rounds_at_moving_roots_use_the_noise_of_their_positions() -> None:
    one = sampler(1.0, 4, 25)
    for root in (0, 1, 4, 5, 9, 2):
        chosen = one.choose(torch.zeros(4, 25), at(0, 1, 2, 3), root)
        assert chosen.tolist() == [int(gumbel(4, root + depth + 1, 25).argmax()) for depth in range(4)]


REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "presence_penalty": 1.0},
    {"temperature": 1.0},
    {"temperature": 3.0},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.0, "top_k": 9, "top_p": 0.5, "min_p": 0.2},
]


@pytest.mark.parametrize("vocab", [20, 10_000])
@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_rows_without_a_number_have_no_answer(request_: dict[str, Any], vocab: int) -> None:
    """NaN of either sign is never passed over, nor is a token drawn that the model rules out; the rest is unharmed."""
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(1))
    healthy = RowSampler(SamplingParams(**request_), 5, [0], vocab, CPU).choose(logits, at(*range(6)), 3).tolist()
    broken = logits.clone()
    broken[1, vocab // 2] = torch.nan
    broken[2, vocab // 2] = -torch.tensor(torch.nan).abs()
    broken[3] = -torch.inf
    broken[4, 7] = torch.inf
    chosen = RowSampler(SamplingParams(**request_), 5, [0], vocab, CPU).choose(broken, at(*range(6)), 3).tolist()
    assert chosen == [healthy[0], -1, -1, -1, 7, healthy[5]]


def test_no_answer_cannot_be_committed() -> None:
    one = sampler(1.0, 0, 10)
    with pytest.raises(DamagedFile, match="not numbers"):
        one.commit([3, -1])


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids"])
def test_tokens_outside_the_vocabulary_are_named(name: str) -> None:
    params = SamplingParams(**{name: ((10, 1.0),) if name == "logit_bias" else (10,)})  # type: ignore[arg-type]
    RowSampler(params, 0, [0], 11, CPU)
    with pytest.raises(InvalidOption, match="token 10, but the model's vocabulary ends at 9") as raised:
        RowSampler(params, 0, [0], 10, CPU)
    assert raised.value.param == name
