"""The plug-in knows the release it runs in and the other one, and says of a third what differs."""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from ddtree.sglang import compat
from ddtree.sglang.adapters import ADAPTERS
from ddtree.sglang.signatures import RELEASES

OTHERS = sorted(RELEASES.keys() - {version("sglang")})


def test_this_release_is_as_expected() -> None:
    read = compat.installed()
    assert compat.version_of(read) == version("sglang") == compat.known(read)
    assert compat.problem(read) is None


@pytest.mark.parametrize("name", OTHERS)
def test_another_release_is_as_expected(name: str) -> None:
    found = sorted((Path(sys.prefix) / "wheels").glob(f"sglang-{name}-*.whl"))
    if not found:
        pytest.skip(f"the wheel of {name} was not downloaded: make test-sglang does it")
    read = compat.wheel(found[0])
    assert compat.differences(read, RELEASES[name]) == []
    assert compat.version_of(read) == name == compat.known(read)


def test_every_release_has_its_adapter() -> None:
    assert ADAPTERS.keys() == RELEASES.keys()


def test_what_differs_is_refused_by_name() -> None:
    read, place = compat.installed(), "sglang.srt.speculative.dflash_worker_v2"

    def changed(module: str) -> str | None:
        source = read(module)
        return source.replace("on_publish=None,", "publish=None,") if source and module == place else source

    said = compat.problem(changed)
    assert said is not None
    assert f"this SGLang ({version('sglang')})" in said
    assert (
        f"Compared with {version('sglang')}: {place}.DFlashWorkerV2.forward_batch_generation is (self, batch," in said
    )
    assert f"Known releases: {', '.join(RELEASES)}." in said
