"""Triton 3.6's interpreter with two mistakes mended and one detour left out, for tests that run kernels in it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


def mend(change: Callable[[Any, str, Any], None]) -> None:
    """It takes int() of arrays of one element, which numpy 2.4 refuses; its products of bfloat16 multiply the bits
    as integers; and for every function that a kernel calls it exchanges the whole language anew, half of its time.

    change: setattr, or one that can be taken back.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot
    exchange, exchanged = interpreter._patch_lang, set()  # modules that were, in the launch that runs

    def patch_lang(fn):
        if id(fn.__globals__) in exchanged:
            return None  # what a call inside of a kernel gives nobody reads
        launches, scope = not exchanged, exchange(fn)
        exchanged.add(id(fn.__globals__))
        if launches:
            restore = scope.restore
            scope.restore = lambda: (exchanged.clear(), restore())
        return scope

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

    change(interpreter, "_patch_lang", patch_lang)
    change(interpreter, "_patch_lang_tensor", patch_tensor)
    change(interpreter.InterpreterBuilder, "create_dot", create_dot)


@contextmanager
def mended() -> Iterator[None]:
    """For a while."""
    import pytest

    with pytest.MonkeyPatch.context() as monkeypatch:
        mend(monkeypatch.setattr)
        yield
