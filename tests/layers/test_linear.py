"""Packed products equal plain ones, and do not depend on how many rows are computed."""

import pytest
import torch
import torch.nn.functional as F

from ddtree.layers import Linear, packs

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = [(61, 32), (1, 8), (96, 64), (257, 48)]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddtree.layers.linear.packs", lambda device_type, dtype: False)


def random_linear(out: int, columns: int, bias: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(out)
    weight = torch.randn(out, columns, generator=generator) / columns**0.5
    return weight.to(dtype), torch.randn(out, generator=generator).to(dtype) if bias else None


def need_packing(dtype: torch.dtype) -> None:
    if not packs("cpu", dtype):
        pytest.skip(f"this machine does not pack {dtype}")  # plain products are tested everywhere


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("bias", [False, True])
def test_plain_is_torch_linear(bias: bool) -> None:
    weight, offset = random_linear(61, 32, bias, torch.float32)
    linear, x = Linear(weight, offset), torch.randn(5, 32)
    assert not linear.packed
    assert (linear.out_features, linear.in_features) == (61, 32)
    assert torch.equal(linear(x), F.linear(x, weight, offset))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_equals_the_exact_product(
    shape: tuple[int, int], bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    need_packing(dtype)
    weight, offset = random_linear(*shape, bias, dtype)
    linear = Linear(weight, offset)
    assert linear.packed
    assert (linear.out_features, linear.in_features) == shape
    for rows in (1, 2, 16, 17, 70):
        x = torch.randn(rows, shape[1]).to(dtype)
        out = linear(x)
        assert out.dtype is dtype
        exact = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(96, 64), (61, 32), (1536, 576)])
def test_a_packed_row_hardly_depends_on_its_neighbours(shape: tuple[int, int]) -> None:
    """In any place, beside any row, it differs by a rounding at most. (Bitwise equal only on some processors.)"""
    need_packing(torch.bfloat16)
    linear = Linear(*random_linear(*shape, True, torch.bfloat16))
    x = torch.randn(64, shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = linear(x)

    def near(out: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-3)

    for rows in (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33, 48):
        near(linear(x[:rows]), whole[:rows])
        near(linear(x[-rows:]), whole[-rows:])
    junk = x.clone()
    junk[1:] = 1e4
    near(linear(junk)[0], whole[0])


def test_rows_of_a_view_are_read_right() -> None:
    """chunk() and slices hand over views with strides."""
    weight, _ = random_linear(61, 32, False, torch.float32)
    x = torch.randn(9, 64)
    for view in (x[:, :32], x[:, 32:], x[::2, 32:]):
        torch.testing.assert_close(Linear(weight)(view), view @ weight.T)


def test_nothing_is_packed_for_other_devices() -> None:
    assert not packs("cuda", torch.float32)
    assert not packs("cpu", torch.int64)
