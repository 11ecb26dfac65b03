"""Embedding, features of a path, the report of a round, and the norm that keeps its stream, against torch."""

import pytest
import torch

from ddtree import kernels
from ddtree.engine.ops import report
from ddtree.layers import RMSNorm
from ddtree.tree import Accepted, RoundState, chain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_embedding(device, dtype):
    table = torch.randn(37, 1500, device=device).to(dtype)
    ids = torch.tensor([[36, 0, 5], [7, 7, 2]], device=device)
    got = kernels.embed(ids, table)
    assert got.dtype == torch.float32
    assert torch.equal(got, torch.nn.functional.embedding(ids, table).float())
    assert torch.equal(kernels.embed(ids[:, 0], table), table[ids[:, 0]].float())


def test_features_of_paths(device):
    features = torch.randn(2, 7, 1100, device=device).bfloat16()
    path = torch.tensor([[0, 3, 6, -1, 9], [0, 1, -1, -1, 9]], device=device)[:, :4]
    want = features.gather(1, path.clamp(min=0).unsqueeze(-1).expand(-1, -1, 1100))
    assert torch.equal(kernels.take(features, path), want)


@pytest.mark.parametrize("shadows", [False, True])
def test_report(device, shadows):
    state = RoundState.allocate(3, 9, 4, device)
    state.lay([chain(4), chain(0), chain(2)], [[[1]] * 4, [], [[2]] * 2])
    for index, tensor in enumerate((state.committed, state.n_accepted, state.n_committed)):
        tensor.copy_(torch.arange(tensor.numel(), device=device).view(tensor.shape) + 10 * index)
    tree = Accepted(state.path, state.n_accepted + 5, state.committed + 7) if shadows else None
    assert torch.equal(kernels.report(state, tree), report(state, tree))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_keeps_the_stream(device, dtype):
    norm = RMSNorm(torch.rand(300, device=device) + 0.5, 1e-6)
    x, delta = torch.randn(3, 300, device=device), torch.randn(3, 300, device=device).to(dtype)
    room = torch.zeros(3, 700, device=device, dtype=dtype)
    want = x + delta.float()
    got = kernels.add_norm(x, delta, norm.scale, norm.squares, dtype, room[:, 200:500])
    assert torch.equal(x, want)
    # The interpreter rounds to bfloat16 toward zero.
    torch.testing.assert_close(room[:, 200:500], want.to(dtype), atol=0, rtol=1e-2 if dtype is torch.bfloat16 else 0)
    assert not room[:, :200].any()
    torch.testing.assert_close(got, norm(want, dtype), atol=1e-6, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5)
    alone = kernels.add_norm(delta, None, norm.scale, norm.squares, dtype)  # of a stream in its own dtype
    torch.testing.assert_close(alone, norm(delta.float(), dtype), atol=1e-6, rtol=1e-2)
