"""Norm of heads, rotary turn and cache write in one kernel, against the layers' own."""

import pytest
import torch

from ddtree.kernels.attention import AttentionRows
from ddtree.kernels.qkv import HeadNorms, write_heads
from ddtree.layers import KVCache, RMSNorm, Rope

# float32 differs in the last bits (order of a sum, fused products); half precision then in a rounding now and then.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
EPS = 1e-5


def case(device, dtype, dim, heads, kv, n):
    torch.manual_seed(1)
    starts, slots = [20, 3], [2, 0]
    cache = KVCache.allocate(2, 3, 40, kv, dim, dtype, device)
    cache.data.fill_(float("nan"))
    raw = (torch.randn(2 * n, (heads + 2 * kv) * dim) * 3).to(device, dtype)
    depths = torch.zeros(2, n + 2, dtype=torch.int64, device=device)
    depths[:, 1:] = torch.randint(1, 9, (2, n + 1))
    rope = Rope(dim, 10_000.0, None, device)
    table = rope.turns(torch.arange(40, device=device))
    start, slot = torch.tensor(starts, device=device), torch.tensor(slots, device=device)
    return cache, raw, depths[:, :n], rope, table, start, slot


def norm(dim, device):
    return RMSNorm((torch.rand(dim) + 0.5).to(device), EPS)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "dim", "heads", "kv", "n"),
    [(torch.float32, 64, 5, 3, 4), (torch.float16, 96, 4, 1, 3), (torch.bfloat16, 128, 9, 3, 1)],
)
def test_equals_layers(device, dtype, dim, heads, kv, n, normed):
    cache, raw, depths, rope, table, start, slot = case(device, dtype, dim, heads, kv, n)
    query_norm, key_norm = norm(dim, device), norm(dim, device)
    want = raw.float().unflatten(-1, (-1, dim)).clone()
    if normed:
        want[:, :heads] = query_norm(want[:, :heads], torch.float32)
        want[:, heads : heads + kv] = key_norm(want[:, heads : heads + kv], torch.float32)
    rope.apply_(want[:, : heads + kv], rope.turns((start.unsqueeze(1) + depths).flatten()))
    expected = KVCache(cache.data.clone())
    view = expected.view(slot.tolist())
    view.write(1, view.segments(start.tolist(), [n, n]), want[:, heads:])

    norms = HeadNorms(query_norm.scale, key_norm.scale, EPS) if normed else None
    got = write_heads(raw, cache.data[1], AttentionRows(slot, start, depths), table, norms)
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    assert got is not None
    torch.testing.assert_close(got.flatten(0, 1), want[:, :heads].to(dtype), **close)
    torch.testing.assert_close(cache.data, expected.data, equal_nan=True, **close)


def test_parts_alone(device):
    """A drafter projects queries, and keys with values, by themselves; a block's rows stand one behind another."""
    cache, raw, _, rope, table, start, slot = case(device, torch.float16, 64, 4, 2, 3)
    rows = AttentionRows(slot, start)
    whole = cache.data[1].clone()
    query_norm, key_norm = norm(64, device), norm(64, device)
    norms = HeadNorms(query_norm.scale, key_norm.scale, EPS)
    together = write_heads(raw, whole, rows, table, norms)
    out = torch.empty(2, 3, 4, 64, dtype=torch.float16, device=device)
    queries = raw[:, : 4 * 64].contiguous()
    assert write_heads(queries, None, rows, table, norms, out) is out
    assert torch.equal(out, together)
    assert write_heads(raw[:, 4 * 64 :].contiguous(), cache.data[1], rows, table, norms) is None
    assert torch.equal(cache.data[1].view(torch.int16), whole.view(torch.int16))
    assert torch.isnan(cache.data[0]).all()
    places = start.unsqueeze(1) + torch.arange(3, device=device)
    want = query_norm(queries.float().unflatten(-1, (-1, 64)), torch.float32)
    rope.apply_(want, rope.turns(places.flatten()))
    torch.testing.assert_close(out.flatten(0, 1), want.half(), atol=1e-3, rtol=1e-3)


def test_refusals(device):
    cache, raw, _, _, table, start, slot = case(device, torch.float16, 64, 4, 2, 3)
    rows = AttentionRows(slot, start)
    with pytest.raises(ValueError, match="dense rows"):
        write_heads(raw[:, :100], cache.data[0], rows, table)
    with pytest.raises(ValueError, match="must be dense, with heads of 64"):
        write_heads(raw, cache.data[0].flip(1).transpose(0, 1).contiguous().transpose(0, 1), rows, table)
    with pytest.raises(ValueError, match="complex64"):
        write_heads(raw, cache.data[0], rows, table.to(torch.complex128))
