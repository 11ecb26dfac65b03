"""top_k and propose against ddtree.tree."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from ddtree.kernels import propose, top_k
from ddtree.kernels.backend import jit
from ddtree.kernels.select import SelectTiles, select
from ddtree.tree import largest
from ddtree.tree import top_k as reference

module = import_module("ddtree.kernels.select")
HALF = (torch.float16, torch.bfloat16)

# The interpreter computes with numpy, which warns where a GPU gives an infinity or NaN in silence.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def check(logits: torch.Tensor, k: int, bitonic: bool = False) -> None:
    found = select(logits, k, SelectTiles(bitonic=bitonic))
    values, ids = largest(logits, min(k, logits.shape[-1]))
    assert torch.equal(found.ids, ids)
    assert torch.equal(found.values.isnan(), values.isnan())
    assert torch.equal(found.values.nan_to_num(), values.float().nan_to_num())
    norm = logits.float().logsumexp(-1)
    torch.testing.assert_close(found.norm, norm, rtol=1e-6, atol=1e-6, equal_nan=True)
    log_q = (values.float() - norm.unsqueeze(-1)).clamp(max=0.0)
    torch.testing.assert_close(found.log_q, log_q, rtol=1e-5, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize(("columns", "k"), [(1, 1), (3, 8), (127, 16), (129, 5), (4097, 32), (9001, 16)])
def test_sizes(dtype: torch.dtype, columns: int, k: int, device: torch.device) -> None:
    torch.manual_seed(columns)
    check((3 * torch.randn(2, columns, device=device)).to(dtype), k)


def test_ties_go_to_the_lowest_id(device: torch.device) -> None:
    torch.manual_seed(1)
    check(torch.randint(-2, 3, (3, 5000), device=device).to(torch.bfloat16), 32)
    check(torch.zeros(1, 700, device=device), 8)
    signs = torch.zeros(1, 300, device=device)
    signs[0, ::2] = -0.0
    check(signs, 8)


def test_nan_and_infinities(device: torch.device) -> None:
    torch.manual_seed(2)
    logits = torch.randn(7, 5000, device=device)
    logits[0, 4321] = torch.nan
    logits[0, 17] = -torch.nan
    logits[1] = -torch.inf
    logits[2, 100:] = -torch.inf
    logits[3, 4999] = torch.inf
    logits[4, :3] = torch.inf
    logits[5] = -300.0  # a segment of nothing must not become 0 * inf
    logits[5, 4096:] = -torch.inf
    logits[6] = torch.nan
    check(logits, 16)
    check(logits.half(), 16)


def test_large_numbers(device: torch.device) -> None:
    logits = torch.full((2, 4500), -3e38, device=device)
    logits[1, 4400] = 3e38
    check(logits, 4)


def test_poisoned_padding_is_not_read(device: torch.device) -> None:
    torch.manual_seed(3)
    padded = torch.full((4, 3100), torch.nan, device=device)
    padded[:, :3001] = torch.randn(4, 3001, device=device)
    check(padded[:, :3001], 16)


def test_bitonic_is_equal(device: torch.device) -> None:
    torch.manual_seed(4)
    check(torch.randint(-9, 9, (1, 300), device=device).float(), 3, bitonic=True)


def test_propose_has_the_reference_s_types(device: torch.device) -> None:
    torch.manual_seed(5)
    logits = torch.randn(2, 3, 400, device=device).bfloat16()
    logits[0, 0, 7] = 90.0  # certain: no probability above 1
    found, wanted = propose(logits, 8), reference(logits, 8)
    assert torch.equal(found.tokens, wanted.tokens)
    assert found.log_q.max() <= 0
    torch.testing.assert_close(found.log_q, wanted.log_q, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("columns", [5, 300, 4099])
def test_a_vocabulary_names_the_columns(columns: int, device: torch.device) -> None:
    torch.manual_seed(6)
    logits = torch.randint(-9, 9, (2, 3, columns), device=device).bfloat16()
    vocabulary = torch.randperm(3 * columns, device=device)[:columns].sort().values
    found, wanted = propose(logits, 8, vocabulary), reference(logits, 8, vocabulary)
    assert torch.equal(found.tokens, wanted.tokens)
    assert torch.equal(found.tokens, vocabulary[propose(logits, 8).tokens])
    torch.testing.assert_close(found.log_q, wanted.log_q, rtol=1e-5, atol=2e-6)


def test_refuses(device: torch.device) -> None:
    logits = torch.zeros(2, 64, device=device)
    for k in (0, 33):
        with pytest.raises(ValueError, match=f"k = {k}"):
            top_k(logits, k)
    with pytest.raises(ValueError, match="column stride"):
        top_k(logits.T, 1)
    with pytest.raises(ValueError, match="for 64 columns"):
        propose(logits.view(1, 2, 64), 1, torch.arange(63, device=device))


def test_no_number_of_ranks_is_compiled_for_alone(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests choose k: the constants of the launches follow its power of two, so there are six kernels at most."""
    kernels, seen = jit("select"), set()

    class Told:
        def __getitem__(self, grid):
            def launch(*args, **constants):
                seen.add(tuple(sorted(constants.items())))
                return kernels.merge[grid](*args, **constants)

            return launch

    monkeypatch.setattr(module, "jit", lambda name: SimpleNamespace(scan=kernels.scan, merge=Told()))
    logits = torch.randn(1, 4100, device=device, generator=torch.Generator(device).manual_seed(3))
    for k in range(1, 33):
        check(logits, k)
    assert len(seen) == 6
