"""The room imports without triton, and says what is missing when a kernel is called."""

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["triton"] = None
import torch
from ddtree.errors import InvalidOption
from ddtree.kernels import top_k
try:
    top_k(torch.zeros(1, 4), 1)
except InvalidOption as error:
    print(error)
"""


def test_import_without_triton() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert "pip install triton" in result.stdout, result.stderr
