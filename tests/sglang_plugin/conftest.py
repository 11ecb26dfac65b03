"""The plug-in's parts that need no SGLang. What does is in ../sglang_server."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from mended_interpreter import mended

collect_ignore_glob = (
    []
    if find_spec("triton")
    else [f"test_sglang_{name}.py" for name in ("rows", "head", "tails", "pairwise", "compile")]
)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", autouse=True)
def _mend_interpreter() -> Iterator[None]:
    if not find_spec("triton"):
        yield
        return
    with mended():
        yield
