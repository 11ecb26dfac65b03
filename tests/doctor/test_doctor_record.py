"""Recordings: what is written is read back as it was, and anything else is refused by the field."""

import json
from pathlib import Path
from typing import Any

import pytest

from ddtree.doctor import Facts
from ddtree.doctor.record import from_json, read, to_json, write
from ddtree.errors import InvalidOption
from machines import cpu, gpu, program, sglang, with_card, with_environment, with_xid

MACHINES = [
    cpu(),
    with_xid(with_card(gpu(count=2), 1, processes=(program(9),), problem="lost"), 79, 1),
    with_environment(sglang(attention_backend="triton"), CUDA_VISIBLE_DEVICES="0"),
]


@pytest.mark.parametrize("facts", MACHINES)
def test_a_recording_is_the_machine(facts: Facts, tmp_path: Path) -> None:
    write(facts, tmp_path / "machine.json")
    assert read(tmp_path / "machine.json") == facts


def changed(path: str, value: Any) -> Any:
    plain = to_json(gpu())
    *parents, last = path.split(".")
    place: Any = plain
    for name in parents:
        place = place[int(name)] if isinstance(place, list) else place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return plain


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "not a recording"),
        ({}, "not a recording"),
        (changed("ddtree_doctor", 99), "not a recording"),
        (changed("weather", "fair"), "unknown field 'weather'"),
        (changed("gpus.0.index", "one"), r"recording.gpus\[0\].index must be int"),
        (changed("gpus.0.index", True), r"recording.gpus\[0\].index must be int"),
        (changed("gpus", {}), "recording.gpus must be a list"),
        (changed("packages", []), "recording.packages must be an object"),
        (changed("torch.available", "yes"), "recording.torch.available must be bool"),
        (changed("system", None), "recording.system must be an object"),
        (changed("port", ...), "recording lacks one of"),
        (changed("port.number", ...), "recording.port lacks one of number"),
    ],
)
def test_anything_else_is_refused(value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_json(value)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000])
def test_a_file_that_is_no_recording(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(InvalidOption, match="--record"):
        read(tmp_path / "x.json")


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="--replay"):
        read(tmp_path / "none.json")
    with pytest.raises(InvalidOption, match="--record"):
        write(cpu(), tmp_path)


def test_recordings_hold_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddtree.doctor import system

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("DDTREE_API_KEY", "secret too")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    seen = json.dumps(system.look().environment)
    assert "secret" not in seen
    assert "CUDA_VISIBLE_DEVICES" in seen
