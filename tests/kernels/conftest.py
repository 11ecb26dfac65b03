"""Kernels under test: on a GPU where there is one, else in Triton's interpreter on the CPU."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from graph_engines import either, folders, loaded, scripted  # noqa: F401 - fixtures

from mended_interpreter import mended

# triton has packages for Linux alone; the interpreter is chosen in ../conftest.py
collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", autouse=True)
def _mend_interpreter() -> Iterator[None]:
    with mended():
        yield
