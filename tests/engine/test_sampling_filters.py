"""top_p, top_k and min_p: what they keep, and that what is drawn follows what they keep."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from ddtree.config import SamplingParams
from ddtree.engine.filters import Filters
from ddtree.engine.sampling import HostRows, RowSampler

CPU = torch.device("cpu")
LIMIT = 1e-3  # p-value; seeds are fixed, so a test passes always or never


def rows(n: int) -> HostRows:
    """A chain."""
    return HostRows([0] * n, list(range(-1, n - 1)), list(range(n)))


def draw(logits: torch.Tensor, seed: int = 4, **request: Any) -> list[int]:
    """One token of each row [n, V] at temperature 1, unless asked for another."""
    params = SamplingParams(**{"temperature": 1.0, **request})
    return RowSampler(params, seed, [0], logits.shape[-1], CPU).choose(logits, rows(len(logits)), 11).tolist()


def reach(logits: torch.Tensor, n: int = 2_000, **request: Any) -> list[int]:
    """Every token that turns up in n draws of one row [V]."""
    return sorted(set(draw(logits.expand(n, -1), **request)))


@pytest.mark.parametrize("vocab", [5, 400, 10_000])
@pytest.mark.parametrize("seed", [0, 1, -7])
def test_temperature_1_and_top_k_1_is_greedy(vocab: int, seed: int) -> None:
    """sparkring#161: the answers of temperature 1 and top_k 1 varied."""
    logits = torch.randn(50, vocab, generator=torch.Generator().manual_seed(vocab)).bfloat16()
    assert RowSampler(SamplingParams(temperature=1.0, top_k=1), seed, [0], vocab, CPU).plain
    assert draw(logits, seed, top_k=1) == logits.float().argmax(-1).tolist()
    assert draw(logits, seed, top_k=1, presence_penalty=0.0) == draw(logits, seed, temperature=0.0)
    assert draw(logits, seed, top_k=1, frequency_penalty=1.5) == draw(
        logits, seed, temperature=0.0, frequency_penalty=1.5
    )


def test_top_k_keeps_exactly_k_the_lowest_ids_among_equals() -> None:
    assert reach(torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0]), top_k=2) == [1, 2]
    assert reach(torch.zeros(9_000), top_k=3) == [0, 1, 2]
    assert reach(torch.zeros(9_000), top_k=100, top_p=0.02) == [0, 1]


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    quarters = torch.zeros(4)
    assert reach(quarters, top_p=0.25) == [0]
    assert reach(quarters, top_p=0.5) == [0, 1]
    assert reach(quarters, top_p=0.5000001) == [0, 1, 2]
    assert reach(torch.tensor([0.7, 0.2, 0.1]).log(), top_p=0.6) == [0]
    assert reach(torch.tensor([0.7, 0.2, 0.1]).log(), top_p=0.75) == [0, 1]
    assert reach(torch.tensor([0.7, 0.2, 0.1]).log(), top_p=1e-300) == [0]
    assert reach(torch.zeros(2**14), top_p=2**-13) == [0, 1]  # looked for beyond the few best, and found the same


def test_top_p_is_of_what_top_k_and_min_p_keep() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert reach(logits, top_p=0.65) == [0, 1]
    assert reach(logits, top_p=0.65, top_k=3) == [0, 1]
    assert reach(logits, top_p=0.56, top_k=2) == [0]  # 0.4 of 0.7
    assert reach(logits, top_p=0.56, min_p=0.7) == [0]


def test_min_p_is_a_part_of_the_best() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert reach(logits, min_p=0.2) == [0, 1, 2]
    assert reach(logits, min_p=0.4) == [0, 1]
    assert reach(logits, min_p=1) == [0]
    assert reach(torch.zeros(4), min_p=1.0) == [0, 1, 2, 3]
    # At temperature 2 the odds are the square roots, as vLLM has it.
    assert reach(logits, min_p=0.4, temperature=2.0) == [0, 1, 2]


REQUESTS: list[dict[str, Any]] = [
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.05},
    {"top_p": 0.8, "temperature": 0.5},
    {"top_p": 0.8, "temperature": 2.0, "min_p": 0.3},
]


@pytest.mark.parametrize("padding", [0, 9_000])
@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_draws_follow_the_kept_probabilities(request_: dict[str, Any], padding: int) -> None:
    draws, temperature = 3_000, request_.get("temperature", 1.0)
    logits = torch.tensor([0.3, -1.0, 1.2, 0.0, 0.9, 0.1, -0.4, 1.1])
    p = np.exp(logits.double().numpy() / temperature)
    p[p < request_.get("min_p", 0) * p.max()] = 0
    order = np.argsort(-p)
    p[order[request_.get("top_k", len(p)) :]] = 0
    p /= p.sum()
    p[order[np.cumsum(p[order]) - p[order] >= request_.get("top_p", 1)]] = 0
    expected = p / p.sum() * draws
    padded = torch.cat([logits, torch.full((padding,), -50.0)])
    counts = np.bincount(draw(padded.expand(draws, -1), **request_), minlength=len(padded))[:8]
    assert counts.sum() == draws
    assert counts[expected == 0].sum() == 0
    assert 1 < (expected > 0).sum() < 8
    assert stats.chisquare(counts[expected > 0], expected[expected > 0]).pvalue > LIMIT


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999, 1 - 1e-12])
@pytest.mark.parametrize("temperature", [1e-3, 0.7, 1.0, 4.0, 1e300])
@pytest.mark.parametrize("kind", ["normal", "grid", "flat", "peaked"])
def test_a_few_tokens_and_all_give_the_same_cut(kind: str, temperature: float, top_p: float) -> None:
    """Where the few best suffice, looking at the whole row keeps the same tokens, to the last one."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(4, 10_007, generator=generator) * 2
    logits = {"normal": logits, "grid": (2 * logits).round() / 2, "flat": logits * 0, "peaked": logits * 4}[kind]
    for min_p in (0.0, 0.05):
        filters = Filters(temperature, 0, top_p, min_p)
        few, lacking = filters.narrow(logits)
        for row in range(4):
            whole = filters.wide(logits[row : row + 1])
            ids = set(whole.ids[whole.keep].tolist())
            found = set(few.ids[row][few.keep[row]].tolist())
            assert found == ids if not lacking[row] else found <= ids
            # The whole row sorted, as a check of the steps that spare the sort.
            order = logits[row].double().sort(descending=True, stable=True).indices
            mass = filters._mass(logits[row : row + 1], logits[row : row + 1].amax(-1, keepdim=True), 10_007)[0, order]
            mass[~filters._above(logits[row : row + 1], logits[row].amax().view(1, 1))[0, order]] = 0
            before = mass.cumsum(0) - mass
            kept = order[(before.double() < mass.sum().double() * top_p) & (mass > 0)]
            assert set(kept.tolist()) == ids


def test_wide_trees_are_cut_row_by_row() -> None:
    logits = torch.randn(70, 9_000, generator=torch.Generator().manual_seed(2)) * torch.linspace(0.1, 6, 70)[:, None]
    together = draw(logits, top_p=0.9)
    params = SamplingParams(temperature=1.0, top_p=0.9)
    for row in range(0, 70, 7):
        one = RowSampler(params, 4, [0], 9_000, CPU)
        assert int(one.choose(logits[row : row + 1], HostRows.root(0), 11 + row)) == together[row]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_drawn_from_as_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(20, 9_000, generator=torch.Generator().manual_seed(6)).to(dtype)
    for request in REQUESTS:
        assert draw(logits, **request) == draw(logits.float(), **request)
