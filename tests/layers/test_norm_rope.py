"""RMSNorm against torch's, Rope against rotating halves, its scaling against transformers."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree.errors import UnsupportedModel
from ddtree.layers import RMSNorm, Rope, interleave

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.1])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("shape", [(8,), (3, 48), (2, 5, 3, 64)])
def test_norm_equals_torch(shape: tuple[int, ...], scale: float, eps: float) -> None:
    torch.manual_seed(0)
    weight, x = torch.rand(shape[-1]) + 0.5, torch.randn(shape) * scale
    before = x.clone()
    out = RMSNorm(weight, eps)(x, torch.float32)
    torch.testing.assert_close(out, F.rms_norm(x, shape[-1:], weight, eps), rtol=1e-5, atol=1e-6)
    assert torch.equal(x, before)


def test_norm_of_zero_is_zero() -> None:
    assert not RMSNorm(torch.ones(8), 1e-6)(torch.zeros(2, 8), torch.float32).any()


def test_norm_in_bfloat16_rounds_once() -> None:
    torch.manual_seed(0)
    weight, x = torch.rand(48).bfloat16(), torch.randn(7, 48)
    norm = RMSNorm(weight, 1e-5)
    out = norm(x, torch.bfloat16)
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, norm(x, torch.float32).bfloat16())
    torch.testing.assert_close(out.float(), F.rms_norm(x, (48,), weight.float(), 1e-5), rtol=1e-2, atol=1e-3)


def rotate_halves(x: Tensor, positions: Tensor, theta: float, dim: int) -> Tensor:
    """x [M, heads, dim] in the usual layout: component i is paired with i + dim / 2. In float64."""
    freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = positions.double()[:, None, None] * torch.cat([freq, freq])
    first, second = x.double().chunk(2, -1)
    return x.double() * angle.cos() + torch.cat([-second, first], -1) * angle.sin()


def pair(x: Tensor) -> Tensor:
    """x [M, heads, dim] as a projection would give it whose rows (here: columns of x) were interleaved."""
    return interleave(x.flatten(1).T, x.shape[-1]).T.reshape(x.shape).clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize(("dim", "heads", "theta"), [(8, 3, 1e4), (16, 1, 5e5), (64, 2, 1e6), (2, 4, 100.0)])
def test_rope_equals_rotated_halves(dim: int, heads: int, theta: float) -> None:
    torch.manual_seed(0)
    positions, x = torch.tensor([[0, 1, 2, 77], [5, 6, 6, 1000]]), torch.randn(8, heads, dim)
    paired, turns = pair(x), Rope(dim, theta, None, CPU).turns(positions)
    assert turns.shape == (8, 1, dim // 2)
    Rope.apply_(paired, turns)
    expected = rotate_halves(x, positions.flatten(), theta, dim).float()
    torch.testing.assert_close(paired, pair(expected), rtol=5e-4, atol=5e-4)


def test_interleave_puts_pairs_side_by_side() -> None:
    assert interleave(torch.arange(16), 8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    weight = torch.randn(16, 5)
    order = interleave(torch.arange(16), 8)
    assert torch.equal(interleave(weight, 8), weight[order])


def test_rope_turns_a_slice_of_heads_in_place() -> None:
    rope, x = Rope(8, 1e4, {}, CPU), torch.randn(2, 5, 8)
    whole, kept = x.clone(), x.clone()
    turns = rope.turns(torch.tensor([[3, 9]]))
    Rope.apply_(whole, turns)
    Rope.apply_(x[:, :3], turns)
    assert torch.equal(x[:, :3], whole[:, :3])
    assert torch.equal(x[:, 3:], kept[:, 3:])
    assert torch.equal(whole.norm(dim=-1).round(decimals=4), kept.norm(dim=-1).round(decimals=4))


SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]


@pytest.mark.parametrize("dim", [8, 64, 128])
@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: f"{s['rope_type']} {s.get('factor', 1)}")
def test_frequencies_equal_those_of_transformers(scaling: dict[str, Any], theta: float, dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(head_dim=dim, rope_parameters={"rope_theta": theta, **scaling})
    theirs = LlamaRotaryEmbedding(config).inv_freq
    torch.testing.assert_close(Rope(dim, theta, scaling, CPU).inv_freq, theirs, rtol=1e-6, atol=0)


def test_the_older_name_of_the_type_is_read() -> None:
    old = Rope(8, 1e4, {"type": "linear", "factor": 2.0}, CPU)
    assert torch.equal(old.inv_freq, Rope(8, 1e4, {"rope_type": "linear", "factor": 2.0}, CPU).inv_freq)


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "nonsense"])
def test_other_scalings_are_refused(kind: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"rope_type '{kind}'") as caught:
        Rope(8, 1e4, {"rope_type": kind, "factor": 2.0}, CPU)
    assert caught.value.param == "rope_parameters.rope_type"
