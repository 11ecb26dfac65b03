"""choose with filters against engine.sampling's choice among what engine.filters keeps."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ddtree.config import SamplingParams
from ddtree.engine.rows import HostRows
from ddtree.engine.sampling import RowSampler
from ddtree.kernels import Allowed, Kept, backend, choose
from ddtree.kernels.choose import OFF, ChooseTiles

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # see test_kernel_choose.py
SMALL = ChooseTiles(block=512)  # several segments and tiles of few columns

FILTERS: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 0.6},
    {"top_p": 0.999999, "temperature": 3.0},
    {"top_p": 1e-300},
    {"top_k": 2},
    {"top_k": 50, "temperature": 1.7},
    {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    {"top_k": 700, "top_p": 0.5, "temperature": 2.5},
    {"top_k": 10**9, "top_p": 0.8},
    {"min_p": 0.05},
    {"min_p": 1.0, "top_k": 5},
    {"min_p": 1e-9, "top_p": 0.7},
    {"top_k": 300, "top_p": 0.9, "min_p": 0.01, "temperature": 1.3},
    {"top_p": 0.5, "temperature": 1e-300},
    {"top_p": 0.5, "temperature": 1e300},
]
LONG = [] if torch.cuda.is_available() else [pytest.mark.full]  # where they run in the interpreter
KINDS = ["grid", "normal", "flat", "peaked"]


def logits_of(kind: str, shape: tuple[int, ...], device: torch.device, seed: int = 0) -> torch.Tensor:
    """Random logits; of "grid" many tie, of "flat" all do."""
    base = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    base = {"normal": base, "grid": (2 * base).round() / 2, "flat": base * 0, "peaked": base * 4}[kind]
    return base.to(device)


def kept_of(requests: list[SamplingParams], vocab: int, device: torch.device) -> Kept:
    kept = Kept.allocate(len(requests) + 1, device)
    kept.write([RowSampler(params, 0, [1], vocab, device).kept for params in requests])
    return Kept(*(getattr(kept, name)[:-1] for name in ("active", "top_k", "top_p", "drop")))


def run(
    logits: torch.Tensor,
    requests: list[SamplingParams],
    depths: list[list[int]],
    tiles: ChooseTiles = SMALL,
    allowed: Allowed | None = None,
) -> torch.Tensor:
    """Sequence i has seed 7 i - 3 and its root at position 11 i."""
    on, many = logits.device, range(len(requests))
    return choose(
        logits,
        torch.tensor([7 * i - 3 for i in many], device=on),
        torch.tensor([11 * i for i in many], device=on),
        torch.tensor(depths, device=on),
        torch.tensor([r.temperature * (r.top_k != 1) for r in requests], dtype=torch.float64, device=on),
        tiles,
        allowed,
        kept_of(requests, logits.shape[-1], on),
    )


def expected(logits: torch.Tensor, requests: list[SamplingParams], depths: list[list[int]]) -> list[list[int]]:
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "KINDS", set())  # torch's operations, also on a GPU
        for i, params in enumerate(requests):
            sampler = RowSampler(params, 7 * i - 3, [1], logits.shape[-1], logits.device)
            rows = HostRows([0] * len(depths[i]), [-1] + [0] * (len(depths[i]) - 1), depths[i])
            found.append(sampler.choose(logits[i], rows, 11 * i).tolist())
    return found


def check(logits: torch.Tensor, requests: list[SamplingParams], tiles: ChooseTiles = SMALL) -> list[list[int]]:
    depths = [[0, *[1 + (i + row) % 9 for row in range(logits.shape[1] - 1)]] for i in range(len(requests))]
    found = run(logits, requests, depths, tiles).tolist()
    assert found == expected(logits, requests, depths)
    return found


def only_long(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test with LONG."""
    for mark in LONG:
        test = mark(test)
    return test


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=LONG) for kind in KINDS[1:])])
def test_equals_the_sampler(kind: str, device: torch.device) -> None:
    """Every filter in one batch, between sequences without one."""
    others = {}, {"temperature": 0.0}, {"temperature": 0.0, "top_p": 0.5}, {"top_k": 1}
    requests = [SamplingParams(**{"temperature": 1.0, **filters}) for filters in (*others[:2], *FILTERS, *others[2:])]
    check(logits_of(kind, (len(requests), 2, 1503), device), requests)


@pytest.mark.parametrize("vocab", [1, 100, 128, 129, 1025])
def test_odd_sizes(vocab: int, device: torch.device) -> None:
    requests = [
        SamplingParams(temperature=1.0, **filters)
        for filters in ({"top_p": 0.9}, {"top_k": 3}, {"top_k": 128, "top_p": 0.6}, {"min_p": 0.1})
    ]
    check(logits_of("normal", (4, 2, vocab), device, vocab), requests, ChooseTiles())


@only_long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_ties_a_lot(dtype: torch.dtype, device: torch.device) -> None:
    requests = [SamplingParams(**{"temperature": 1.0, **filters}) for filters in FILTERS]
    check((logits_of("normal", (len(requests), 2, 1501), device, 5) / 4).to(dtype), requests)


@only_long
def test_the_same_tokens_turn_up(device: torch.device) -> None:
    """Draws reach exactly what is kept: no token behind the cut, the last one before it too."""
    flat = torch.zeros(1, 12, 2**9, device=device)

    def reached(rows: int, **filters: float) -> set[int]:
        params = SamplingParams(temperature=1.0, **filters)  # type: ignore[arg-type]
        return set(run(flat[:, :rows], [params], [list(range(rows))])[0].tolist())

    assert reached(12, top_k=3) == {0, 1, 2}
    assert reached(12, top_p=2**-8) == {0, 1}
    assert reached(5, top_k=50, top_p=0.04) == {0, 1}


def test_poisoned_buffers_and_rows_that_are_no_numbers(device: torch.device) -> None:
    """Rows beside, columns behind and rows of no use change nothing; a row without an answer is -1."""
    buffer = torch.full((3, 6, 1300), torch.nan, device=device)
    buffer[:, :5, :1203] = logits_of("normal", (3, 5, 1203), device, 2)
    logits = buffer[:, :5, :1203]
    logits[0, 1, 700] = torch.nan
    logits[0, 2] = -torch.inf
    logits[0, 3, 1100:1102] = torch.inf
    logits[0, 4, 1:] = -torch.inf
    requests = [SamplingParams(temperature=1.2, top_p=0.7), SamplingParams(temperature=1.0)]
    requests.append(SamplingParams(temperature=1.0, top_k=1))
    found = check(logits, requests)
    assert found[0][1:] == [-1, -1, 1100, 0]


def test_a_token_depends_on_its_row_alone(device: torch.device) -> None:
    """The same logits and absolute position, at other depths, rows and places in the batch."""
    logits = logits_of("normal", (1, 1, 1200), device).expand(2, 3, 1200).contiguous()
    both = [SamplingParams(temperature=1.5, top_p=0.9)] * 2
    seeds, positions = torch.tensor([5, 5], device=device), torch.tensor([10, 12], device=device)
    depths = torch.tensor([[0, 2, 4], [2, 0, 1]], device=device)
    heat = torch.full((2,), 1.5, dtype=torch.float64, device=device)
    own = choose(logits, seeds, positions, depths, heat, SMALL, kept=kept_of(both, 1200, device))
    assert own[0, 1] == own[1, 1]
    assert own[0, 2] == own[1, 0]
    alone = choose(
        logits[:1, 2:], seeds[:1], positions[:1], depths[:1, 2:], heat[:1], kept=kept_of(both[:1], 1200, device)
    )
    assert alone[0, 0] == own[0, 2], "with other tiles, too"


@pytest.mark.parametrize("filters", [FILTERS[i] for i in (0, 6, 9, 12)], ids=str)
def test_what_a_mask_forbids_counts_for_nothing(filters: dict[str, Any], device: torch.device) -> None:
    """It is neither of the best k nor has it any weight; masks of who is not limited are not looked at."""
    vocab, depths = 1203, [[0, 1, 2, 1]] * 2
    logits = logits_of("normal", (2, 4, vocab), device, 9)
    may = torch.rand(2, 4, vocab, generator=torch.Generator().manual_seed(1)) < 0.3
    may[0, 3] = False
    padded = np.pad(may.numpy(), ((0, 0), (0, 0), (0, 1216 - vocab)))
    words = torch.from_numpy(np.packbits(padded, axis=-1, bitorder="little").view(np.int32))
    allowed = Allowed(words.to(device), torch.tensor([True, False], device=device))
    requests = [SamplingParams(**{"temperature": 1.0, **filters})] * 2
    found = run(logits, requests, depths, allowed=allowed).tolist()
    masked = torch.stack([logits[0].masked_fill(~may[0].to(device), -torch.inf), logits[1]])
    assert found == expected(masked, requests, depths)
    assert found[0][3] == -1


def test_what_is_written_of_filters() -> None:
    """Padding and greedy sequences have none."""
    kept = Kept.allocate(4, torch.device("cpu"))
    kept.write([None, (5, 0.5, -1.0), (OFF, 1.0, -math.inf)])
    assert kept.active.tolist() == [False, True, True, False]
    assert kept.top_k.tolist() == [OFF, 5, OFF, OFF]
    assert kept.top_p.tolist() == [1, 0.5, 1, 1]
    kept.write([])
    assert kept.active.tolist() == [False] * 4


def test_a_sampler_s_own_choice_goes_through_the_kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a penalty keeps a sequence with the host: the tokens that torch's operations choose."""
    logits, params = (
        logits_of("grid", (4, 1003), device),
        SamplingParams(temperature=1.1, top_p=0.8, presence_penalty=1.0),
    )
    rows, found = HostRows([0, 5, 6, 7], [-1, 0, 1, 0], [0, 1, 2, 1]), []
    for kinds in (set(), {device.type}):
        monkeypatch.setattr(backend, "KINDS", kinds)
        sampler = RowSampler(params, 3, [1, 2], 1003, device)
        found.append([sampler.choose(logits, rows, 9).tolist()])
        sampler.commit([5, 17])
        found[-1].append(sampler.choose(logits, rows, 11).tolist())
    assert found[0] == found[1]
    assert sampler._told is not None
