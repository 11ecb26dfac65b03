"""These tests run SGLang itself and so need its environment: `make test-sglang`. Elsewhere they are not collected."""

import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent

if find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    sys.path[:0] = [str(HERE), str(HERE / "stubs")]  # before transformers is imported, which looks for what is a stub
