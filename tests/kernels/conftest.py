"""Kernels under test: on a GPU where there is one, else in Triton's interpreter on the CPU."""

from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest
import torch

# triton has packages for Linux alone; the interpreter is chosen in ../conftest.py
collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", autouse=True)
def _mend_interpreter() -> Iterator[None]:
    """Triton 3.6's interpreter takes int() of arrays of one element, which numpy 2.4 refuses; and its products of
    bfloat16 multiply the bits as integers."""
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
