"""Masks and attention against loops that say what they mean."""

import math

import pytest
import torch
from torch import Tensor

from ddtree.layers import attend, attention_mask

pytestmark = pytest.mark.usefixtures("one_thread")


def naive_mask(start: list[int], visible: Tensor, span: int, window: int | None) -> Tensor:
    """[B, N, span] bool: row i of a sequence lies at slot start + i."""
    batch, n, _ = visible.shape
    allowed = torch.zeros(batch, n, span, dtype=torch.bool)
    for b in range(batch):
        for row in range(n):
            for slot in range(span):
                if slot < start[b]:
                    sees = True
                elif slot < start[b] + n:
                    sees = bool(visible[b, row, slot - start[b]])
                else:
                    sees = False
                near = window is None or abs(start[b] + row - slot) < window
                allowed[b, row, slot] = sees and near
    return allowed


def tree_visible(parents: list[int]) -> Tensor:
    visible = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            visible[row] |= visible[parent]
    return visible


TREE = tree_visible([-1, 0, 0, 1, 2, 2])
CAUSAL = torch.ones(6, 6, dtype=torch.bool).tril()
FULL = torch.ones(6, 6, dtype=torch.bool)


@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
@pytest.mark.parametrize("start", [[0], [5], [4, 9], [0, 13, 2]])
@pytest.mark.parametrize("visible", [TREE, CAUSAL, FULL], ids=["tree", "causal", "full"])
def test_mask_equals_the_naive_one(visible: Tensor, start: list[int], window: int | None) -> None:
    rows = visible.expand(len(start), -1, -1)
    span, groups = max(start) + 6, 3
    mask = attention_mask(torch.tensor(start), rows, span, torch.float32, groups, window)
    expected = naive_mask(start, rows, span, window)
    if mask is None:
        assert expected.all()
        return
    assert mask.shape == (len(start), 1, groups * 6, span)
    assert mask.dtype is torch.float32
    assert ((mask == 0) | (mask == -torch.inf)).all()
    assert torch.equal(mask[:, 0] == 0, expected.repeat(1, groups, 1))


def test_each_sequence_has_its_own_tree() -> None:
    rows, start = torch.stack([TREE, CAUSAL]), [3, 8]
    mask = attention_mask(torch.tensor(start), rows, 14, torch.bfloat16, 1)
    assert mask is not None
    assert mask.dtype is torch.bfloat16
    assert torch.equal(mask[:, 0] == 0, naive_mask(start, rows, 14, None))


@pytest.mark.parametrize("n", [1, 4])
def test_no_mask_where_every_row_sees_every_key(n: int) -> None:
    assert attention_mask(torch.tensor([5]), torch.ones(1, n, n, dtype=torch.bool), 5 + n, torch.float32, 2) is None


def test_a_window_needs_a_mask_even_for_one_row() -> None:
    mask = attention_mask(torch.tensor([5]), torch.ones(1, 1, 1, dtype=torch.bool), 6, torch.float32, 1, window=2)
    assert mask is not None
    assert (mask == 0).flatten().tolist() == [False] * 4 + [True] * 2


def naive_attention(query: Tensor, keys: Tensor, values: Tensor, allowed: Tensor) -> Tensor:
    """query [B, N, heads, hd]; keys, values [B, kv, span, hd]; allowed [B, N, span] -> [B * N, heads * hd]."""
    batch, n, heads, dim = query.shape
    out = torch.zeros(batch, n, heads, dim, dtype=torch.float64)
    for b in range(batch):
        for head in range(heads):
            shared = head // (heads // keys.shape[1])  # the key head of a group of neighbouring query heads
            for row in range(n):
                seen = allowed[b, row].nonzero().flatten()
                scores = keys[b, shared, seen].double() @ query[b, row, head].double() / math.sqrt(dim)
                out[b, row, head] = scores.softmax(0) @ values[b, shared, seen].double()
    return out.reshape(batch * n, heads * dim)


@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (4, 2), (6, 2), (3, 1), (1, 1)])
@pytest.mark.parametrize("start", [[0], [7], [2, 7, 0]])
def test_attention_equals_the_naive_one(heads: int, kv: int, start: list[int]) -> None:
    torch.manual_seed(0)
    batch, span = len(start), max(start) + 6
    query = torch.randn(batch, 6, heads, 8)
    keys, values = torch.randn(2, batch, kv, span, 8) * 2
    for visible in (TREE, FULL):
        rows = visible.expand(batch, -1, -1)
        mask = attention_mask(torch.tensor(start), rows, span, torch.float32, heads // kv)
        out = attend(query, keys, values, mask)
        assert out.shape == (batch * 6, heads * 8)
        expected = naive_attention(query, keys, values, naive_mask(start, rows, span, None))
        torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-5)


def test_what_a_row_does_not_see_does_not_move_it() -> None:
    torch.manual_seed(0)
    query, (keys, values) = torch.randn(1, 6, 2, 8), torch.randn(2, 1, 2, 10, 8)
    mask = attention_mask(torch.tensor([4]), TREE[None], 10, torch.float32, 1)
    before = attend(query, keys, values, mask)
    keys[:, :, 4 + 3], values[:, :, 4 + 3] = 1e6, 1e6  # row 3 is seen by itself alone
    after = attend(query, keys, values, mask)
    others = torch.tensor([0, 1, 2, 4, 5])
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[3], after[3])
