"""What is read of a release's source, and what is said where it differs."""

import zipfile
from pathlib import Path

import pytest

from ddtree.sglang import compat, plugin
from ddtree.sglang.signatures import RELEASES, Release

SOURCE = {
    "sglang.version": "__version__ = version = '9.9'\n",
    "sglang.srt.one": """
from sglang.srt.other import helper, first as second

class Worker(Base):
    limit: int = 3

    def __init__(self, size: int, *rest, name="x", **more: str) -> None:
        self.size = self.other = size
        self.kind: str = name

    @property
    def width(self): ...

def run(batch: "Batch", *, wait=None): ...
""",
}
EXPECTED = Release(
    signatures={"one:Worker.__init__": "(self, size, *rest, name='x', **more)", "one:run": "(batch, *, wait=None)"},
    fields={"one:Worker": ("limit", "size", "other", "kind", "width")},
    imports={"one": ("helper", "second")},
)


def test_a_source_as_expected() -> None:
    assert compat.differences(SOURCE.get, EXPECTED) == []


def test_what_differs_is_named() -> None:
    release = Release(
        signatures={"one:run": "(batch)", "one:Worker.gone": "(self)", "two:run": "()"},
        fields={"one:Worker": ("size", "weight"), "one:Gone": ("a",)},
        imports={"one": ("helper", "first"), "two": ("b",)},
    )
    assert compat.differences(SOURCE.get, release) == [
        "sglang.srt.one.run is (batch, *, wait=None), expected (batch)",
        "sglang.srt.one.Worker.gone is missing, expected (self)",
        "sglang.srt.two.run is missing, expected ()",
        "sglang.srt.one.Worker has no weight",
        "sglang.srt.one.Gone has no a",
        "sglang.srt.one does not import first",
        "sglang.srt.two does not import b",
    ]


def test_a_wheel_is_read_as_an_installation_is(tmp_path: Path) -> None:
    path = tmp_path / "sglang-9.9-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for module, text in SOURCE.items():
            archive.writestr(module.replace(".", "/") + ".py", text)
    read = compat.wheel(path)
    assert compat.version_of(read) == "9.9"
    assert compat.differences(read, EXPECTED) == []
    assert read("sglang.srt.two") is None


def test_a_release_that_nobody_knows_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compat, "installed", lambda: SOURCE.get)
    plugin.register()  # and touches nothing: there may be no SGLang to touch
    (said,) = caplog.messages
    assert said.startswith("DDTREE is not registered: this SGLang (9.9) is not as the plug-in knows it. Compared with")
    assert "sglang.srt.plugins.hook_registry.HookRegistry.register is missing" in said
    assert said.endswith(f"Known releases: {', '.join(RELEASES)}. Install one of them (pip install sglang==0.5.17).")
