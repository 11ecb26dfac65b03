"""Triton 3.6's interpreter with two mistakes mended, for tests that run kernels in it."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest


@contextmanager
def mended() -> Iterator[None]:
    """It takes int() of arrays of one element, which numpy 2.4 refuses; and its products of bfloat16 multiply the bits
    as integers."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).item()))

    def widen(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        data = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    def create_dot(self, a, b, *rest):
        return dot(self, widen(a), widen(b), *rest)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_tensor)
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield
