"""The plug-in's parts that need no SGLang. What does is in ../sglang_server."""

from importlib.util import find_spec

import pytest
import torch

collect_ignore_glob = (
    [] if find_spec("triton") else [f"test_sglang_{name}.py" for name in ("rows", "head", "tails", "compile")]
)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
