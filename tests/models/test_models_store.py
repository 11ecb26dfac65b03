"""The cache: whole folders or none, one maker at a time, nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_gguf import tiny_llama

from ddtree.errors import DDTreeError, DownloadFailed
from ddtree.models import cache_dir, store

MANIFEST = store.Manifest("tiny", "a test", "none", "0", "ddtree 0")


def make(work: Path, out: Path) -> store.Manifest:
    (work / "download").write_text("x")
    tiny_llama().save_pretrained(out)
    (out / "tokenizer.json").write_text("{}")
    return MANIFEST


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "models").iterdir()}


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DDTREE_CACHE", "~/here")
    assert cache_dir() == tmp_path / "here"
    monkeypatch.delenv("DDTREE_CACHE")
    assert cache_dir().is_relative_to(tmp_path) or "XDG_CACHE_HOME" in os.environ
    assert cache_dir().name == "ddtree"


def test_made_once(empty_cache: Path) -> None:
    calls = []

    def counting(work: Path, out: Path) -> store.Manifest:
        calls.append(out)
        return make(work, out)

    folder = store.prepare("tiny", counting)
    assert store.prepare("tiny", counting) == folder == empty_cache / "models" / "tiny"
    assert len(calls) == 1
    sizes = {file.name: file.stat().st_size for file in folder.iterdir() if file.name != store.MANIFEST}
    assert store.read_manifest(folder) == replace(MANIFEST, files=sizes)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= sizes.keys()
    assert names(empty_cache) == {"tiny", ".tiny.lock"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, DownloadFailed("no"), SystemExit])
def test_an_interruption_leaves_nothing(empty_cache: Path, error: BaseException | type[BaseException]) -> None:
    def broken(work: Path, out: Path) -> store.Manifest:
        make(work, out)
        raise error

    with pytest.raises(error if isinstance(error, type) else type(error)):
        store.prepare("tiny", broken)
    assert names(empty_cache) == {".tiny.lock"}
    assert store.is_whole(store.prepare("tiny", make))


def test_a_process_that_ends_at_once_takes_its_work_along(empty_cache: Path) -> None:
    seen = []

    def ended(work: Path, out: Path) -> store.Manifest:
        make(work, out)
        store.drop_unfinished()
        seen.append(work.exists())
        raise SystemExit

    with pytest.raises(SystemExit):
        store.prepare("tiny", ended)
    assert seen == [False]
    store.drop_unfinished()
    assert store.is_whole(store.prepare("tiny", make))


@pytest.mark.parametrize("lost", ["ddtree.json", "config.json", "model.safetensors", "tokenizer.json"])
def test_what_is_not_whole_is_made_again(empty_cache: Path, lost: str) -> None:
    folder = store.prepare("tiny", make)
    (folder / lost).unlink()
    (folder / "extra").write_text("")
    assert not store.is_whole(folder)
    assert store.is_whole(store.prepare("tiny", make))
    assert not (folder / "extra").exists()


@pytest.mark.parametrize("cut", ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"])
def test_what_changed_its_size_is_made_again(empty_cache: Path, cut: str) -> None:
    file = store.prepare("tiny", make) / cut
    whole = file.read_bytes()
    for damaged in (b"", whole + b"\n"):
        file.write_bytes(damaged)
        assert not store.is_whole(file.parent)
        store.prepare("tiny", make)
        assert file.read_bytes() == whole


@pytest.mark.parametrize("files", [3, None, {"gone": 1}, {"config.json": "1"}])
def test_a_manifest_of_other_sizes(empty_cache: Path, files: object) -> None:
    folder = store.prepare("tiny", make)
    manifest = json.loads((folder / store.MANIFEST).read_text())
    (folder / store.MANIFEST).write_text(json.dumps(manifest | {"files": files}))
    assert not store.is_whole(folder)


def test_the_home_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDTREE_CACHE", "~nobodyx/z")
    with pytest.raises(DDTreeError, match=r"DDTREE_CACHE is '~nobodyx/z'.* set it to another folder"):
        cache_dir()


def test_another_format_is_made_again(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store.prepare("tiny", make)
    monkeypatch.setattr(store, "FORMAT", store.FORMAT + 1)
    assert not store.is_whole(folder)
    (folder / store.MANIFEST).write_text('{"unknown": 1}')
    assert store.read_manifest(folder) is None
    (folder / store.MANIFEST).write_text("[" * 100_000)
    assert store.read_manifest(folder) is None


def test_two_at_once(empty_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started, calls = threading.Event(), []

    def slow(work: Path, out: Path) -> store.Manifest:
        calls.append(out)
        started.set()
        time.sleep(0.8)
        return make(work, out)

    first = threading.Thread(target=store.prepare, args=("tiny", slow))
    first.start()
    assert started.wait(10)
    folder = store.prepare("tiny", slow)
    first.join()
    assert len(calls) == 1
    assert store.is_whole(folder)
    assert "waiting for another process that is preparing tiny" in capsys.readouterr().err


def test_a_killed_process_leaves_no_half_model(empty_cache: Path) -> None:
    script = textwrap.dedent("""
        import time
        from ddtree.models import store
        def make(work, out):
            (out / "config.json").write_text("{}")
            print("half", flush=True)
            time.sleep(60)
        store.prepare("tiny", make)
    """)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
    assert not (empty_cache / "models" / "tiny").exists()
    assert store.is_whole(store.prepare("tiny", make))  # and the dead process's lock is no obstacle
    assert names(empty_cache) == {"tiny", ".tiny.lock"}
