"""choose against engine.sampling's greedy and noisy argmax."""

import numpy as np
import pytest
import torch

from ddtree.config import SamplingParams
from ddtree.engine.rows import HostRows
from ddtree.engine.sampling import RowSampler, greedy, gumbel
from ddtree.kernels import Allowed, choose

# The interpreter computes with numpy, which warns where a GPU gives an infinity or NaN in silence.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def run(
    logits: torch.Tensor, seeds: list[int], positions: list[int], depths: torch.Tensor, temperatures: list[float]
) -> torch.Tensor:
    on = logits.device
    return choose(
        logits,
        torch.tensor(seeds, device=on),
        torch.tensor(positions, device=on),
        depths.to(on),
        torch.tensor(temperatures, dtype=torch.float64, device=on),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    logits = torch.randint(-40, 40, (2, 5, 9001), device=device).to(dtype)
    logits[0, 0] = -torch.inf
    logits[0, 1, 7000] = torch.nan
    logits[0, 2, 8999:] = torch.inf
    logits[0, 3, 1:] = -torch.inf
    own = run(logits, [1, 2], [3, 4], torch.zeros(2, 5, dtype=torch.int64), [0.0, 0.0])
    assert torch.equal(own, greedy(logits))
    assert own[0, :4].tolist() == [-1, -1, 8999, 0]


@pytest.mark.parametrize("temperature", [1e-300, 1e-3, 0.7, 1.0, 1.5, 30.0, 1e300])
def test_equals_the_sampler(temperature: float, device: torch.device) -> None:
    """Token by token; a difference would be a tie within rounding, which these draws do not have."""
    torch.manual_seed(3)
    logits = 4 * torch.randn(2, 4, 5003, device=device)
    logits[1, 1] = -torch.inf
    logits[1, 2, 4] = torch.nan
    logits[1, 3, 100:] = -torch.inf
    depths = torch.tensor([[0, 1, 1, 2], [0, 1, 2, 0]])
    seeds, positions = [-(1 << 63) + 12345, (1 << 62) + 99], [0, (1 << 33) + 5]
    own = run(logits, seeds, positions, depths, [temperature] * 2)
    for index in range(2):
        sampler = RowSampler(SamplingParams(temperature=temperature), seeds[index], [1], 5003, device)
        rows = HostRows([0] * 4, [-1, 0, 0, 0], depths[index].tolist())
        assert torch.equal(own[index], sampler.choose(logits[index], rows, positions[index]))


def test_depends_on_position_alone(device: torch.device) -> None:
    """The same logits and absolute position choose the same token at any depth, row and place in the batch."""
    torch.manual_seed(4)
    row = torch.randn(3000, device=device)
    logits = row.expand(2, 3, 3000).contiguous()
    own = run(logits, [7, 7], [10, 12], torch.tensor([[0, 2, 4], [2, 0, 1]]), [1.0, 1.0])
    assert own[0, 1] == own[1, 1]
    assert own[0, 2] == own[1, 0]
    assert own[0, 0] != own[0, 1]


def test_mixed_batch_and_views(device: torch.device) -> None:
    """Greedy beside sampled, in poisoned, padded buffers."""
    torch.manual_seed(5)
    buffer = torch.full((2, 4, 1100), torch.nan, device=device)
    buffer[:, :3, :1003] = torch.randn(2, 3, 1003, device=device)
    logits = buffer[:, :3, :1003]
    depths = torch.full((2, 9), 77)
    depths[:, :3] = torch.tensor([0, 1, 1])
    own = run(logits, [5, 5], [20, 20], depths[:, :3], [0.0, 1.0])
    assert torch.equal(own[0], greedy(logits[0]))
    noise = torch.stack([gumbel(5, 21 + depth, 1003, device) for depth in (0, 1, 1)])
    assert torch.equal(own[1], (logits[1] + noise).argmax(-1))


def test_noise_is_the_engine_s(device: torch.device) -> None:
    """Over flat logits the noise alone decides: the first 64 positions of a seed."""
    logits = torch.zeros(1, 64, 2048, device=device)
    own = run(logits, [42], [100], torch.arange(64).unsqueeze(0), [1.0])
    wanted = [int(gumbel(42, 101 + depth, 2048).argmax()) for depth in range(64)]
    assert own[0].tolist() == wanted


@pytest.mark.parametrize("temperature", [0.0, 0.7, 3.0, 1e300])
def test_tokens_that_masks_forbid_are_never_chosen(temperature: float, device: torch.device) -> None:
    """As the sampler has it, NaN where nothing may stand included; masks count for who is limited alone."""
    torch.manual_seed(6)
    vocab, rows = 1003, HostRows([0] * 4, [-1, 0, 1, 0], [0, 1, 2, 1])
    logits = torch.randn(3, 4, vocab, device=device)
    logits[:, :, 17] = torch.nan
    may = torch.rand(3, 4, vocab) < 0.4
    may[..., 17], may[..., 31], may[1, 2], may[1, 3] = False, True, False, False
    may[1, 3, 1002] = True
    words = torch.full((3, 6, 40), -1, dtype=torch.int32)  # more rows and words than there are
    words[:, :4, :32] = torch.from_numpy(
        np.packbits(np.pad(may.numpy(), ((0, 0), (0, 0), (0, 1024 - vocab))), axis=-1, bitorder="little").view(np.int32)
    )
    allowed = Allowed(words.to(device), torch.tensor([True, True, False], device=device))
    own = choose(
        logits,
        torch.tensor([5, 6, 7], device=device),
        torch.tensor([9, 8, 7], device=device),
        torch.tensor([rows.depths] * 3, device=device),
        torch.tensor([temperature] * 3, dtype=torch.float64, device=device),
        allowed=allowed,
    )
    for index in range(2):
        sampler = RowSampler(SamplingParams(temperature=temperature), 5 + index, [1], vocab, device)
        masked = logits[index].masked_fill(~may[index].to(device), -torch.inf)
        expected = sampler.choose(masked, rows, 9 - index)
        assert own[index].tolist() == expected.tolist()
    assert own[1, 2:].tolist() == [-1, 1002]
    assert own[2].tolist() == [-1] * 4, "NaN is the best of a row that may choose it"


def test_refuses_masks_that_are_too_narrow(device: torch.device) -> None:
    logits, zeros = torch.zeros(1, 2, 65, device=device), torch.zeros(1, 2, dtype=torch.int64, device=device)
    allowed = Allowed(torch.zeros(1, 2, 2, dtype=torch.int32, device=device), zeros[0, :1].bool())
    with pytest.raises(ValueError, match="masks of 2 words: 65 tokens need 3"):
        choose(logits, zeros[0, :1], zeros[0, :1], zeros, zeros[0, :1].double(), allowed=allowed)


def test_refuses_columns_apart(device: torch.device) -> None:
    logits = torch.zeros(1, 8, 2, device=device).transpose(1, 2)
    with pytest.raises(ValueError, match="column strides 2"):
        run(logits, [1], [1], torch.zeros(1, 2, dtype=torch.int64), [0.0])
