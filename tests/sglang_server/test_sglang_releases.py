"""The plug-in knows the release it runs in, and says of another what differs."""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from ddtree.sglang import compat
from ddtree.sglang.signatures import RELEASES


def test_this_release_is_as_expected() -> None:
    assert compat.version_of(compat.installed()) == version("sglang") == "0.5.17"
    assert compat.differences(compat.installed(), RELEASES["0.5.17"]) == []
    assert compat.problem(compat.installed()) is None


def test_a_newer_release_is_refused_by_name() -> None:
    found = sorted((Path(sys.prefix) / "wheels").glob("sglang-0.5.23-*.whl"))
    if not found:
        pytest.skip("the wheel of 0.5.23 was not downloaded: make test-sglang does it")
    said = compat.problem(compat.wheel(found[0]))
    assert said is not None
    assert "this SGLang (0.5.23)" in said
    assert "DFlashWorkerV2.__init__ is (self, server_args, gpu_id, nccl_port, target_worker), expected" in said
    assert "Known releases: 0.5.17" in said
