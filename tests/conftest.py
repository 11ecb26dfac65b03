"""What all tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree.threads import share_cores

share_cores()  # before torch is imported
if "PYTEST_XDIST_WORKER" in os.environ:  # one process for each core already (Makefile)
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: kernels run in its interpreter, on the CPU
os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported: no test asks a hub for anything


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """The folder of the embedded model in the user's cache; downloaded and converted when it is not there."""
    from ddtree.models import resolve_model

    return resolve_model("smollm2-135m")


@pytest.fixture(scope="session")
def bundled_drafter() -> Path:
    """The folder of the drafter that ships with the package."""
    from ddtree.models import resolve_drafter

    folder = resolve_drafter("auto", "smollm2-135m")
    assert folder is not None
    return folder


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("DDTREE_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread for tiny models: with more, threads wait for each other longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
