import torch


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    """Rotate query and key in place, as vLLM's kernel does."""
    assert is_neox
    cos, sin = cos_sin_cache[positions.flatten()].chunk(2, -1)
    for x in (query, key):
        heads = x.view(len(cos), -1, head_size)
        half = cos.shape[-1]
        one, two = heads[..., :half].clone(), heads[..., half : 2 * half].clone()
        c, s = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
        heads[..., :half] = one * c - two * s
        heads[..., half : 2 * half] = two * c + one * s
    return query, key


def rms_norm(*_, **__):
    raise NotImplementedError  # imported by SGLang, but never called on a CPU: a call must be seen


fused_add_rms_norm = rms_norm
_ = torch
