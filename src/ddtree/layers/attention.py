"""Attention of the rows of a forward to the committed context and to each other."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree.layers.cache import KVCache, Segment


def attention_mask(
    start: Tensor, visible: Tensor, span: int, dtype: torch.dtype, groups: int, window: int | None = None
) -> Tensor | None:
    """The additive mask of one forward, shared by its layers; None where every row sees every key.

    Args:
        start: [B] int64, committed length of each sequence; its rows lie at slots start .. start + N - 1.
        visible: [B, N, N] bool, which rows a row sees (itself included).
        span: keys read per sequence, max(start) + N.
        groups: query heads per key head; they are packed into the rows.
        window: rows see only slots less than this far away (sliding-window layers; slot = position for a block).
    Returns: [B, 1, groups * N, span] of 0 and -inf in `dtype`.
    """
    batch, n, _ = visible.shape
    if batch == 1 and window is None and (n == 1 or bool(visible.all())):
        return None
    slots = torch.arange(span, device=start.device)
    allowed = (slots < start.unsqueeze(1)).unsqueeze(1).expand(batch, n, span).clone()
    place = start.unsqueeze(1) + torch.arange(n, device=start.device)  # [B, N]
    allowed.scatter_(2, place.unsqueeze(1).expand(batch, n, n), visible)
    if window is not None:
        allowed &= (place.unsqueeze(2) - slots).abs() < window
    mask = torch.zeros(batch, n, span, dtype=dtype, device=start.device).masked_fill_(~allowed, -torch.inf)
    return mask.unsqueeze(1).repeat(1, 1, groups, 1)


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Scaled dot-product attention with grouped query heads packed into the rows.

    Args:
        query: [B, N, heads, hd]; keys, values: [B, kv_heads, span, hd]; mask: see attention_mask.
    Returns: [B * N, heads * hd].
    """
    batch, n, heads, dim = query.shape
    kv = keys.shape[1]
    packed = query.unflatten(2, (kv, -1)).permute(0, 2, 3, 1, 4).reshape(batch, kv, -1, dim)  # [B, kv, G * N, hd]
    out = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask)
    return out.unflatten(2, (-1, n)).permute(0, 3, 1, 2, 4).reshape(batch * n, heads * dim)


def attend_segments(
    query: Tensor, cache: KVCache, layer: int, segments: Sequence[Segment], masks: Sequence[Tensor | None]
) -> Tensor:
    """Attention of a batch without padding, one sequence after another.

    Args:
        query: [M, heads, hd], the segments' rows one after another, in the cache's dtype.
        masks: each segment's, see attention_mask.
    A sequence's result does not depend on its neighbours, not in its last bit. Returns: [M, heads * hd].
    """
    parts = [
        attend(query[s.rows].unsqueeze(0), *cache.read(layer, s), mask) for s, mask in zip(segments, masks, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
