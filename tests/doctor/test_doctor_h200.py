"""A real machine: what `ddtree doctor --record` wrote on a host of four H200, two programs on three of them.

Names of folders, numbers of processes and cards, and addresses on the bus are made up; all else is as it was seen.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from ddtree.doctor import Diagnosis, Facts, judge, load
from ddtree.doctor.facts import Asked
from ddtree.doctor.record import read, to_json, write
from machines import sglang, with_environment, with_weights

RECORDING = Path(__file__).with_name("h200.json")
TABLES = load()


@pytest.fixture
def h200() -> Facts:
    return read(RECORDING)


def ids(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    return [(finding.level, finding.id) for finding in diagnosis.findings]


def test_the_recording_is_what_this_version_writes(h200: Facts, tmp_path: Path) -> None:
    write(h200, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text(encoding="utf-8") == RECORDING.read_text(encoding="utf-8")
    assert to_json(h200)["asked"]["engine"] == "embedded"


def test_there_is_no_false_alarm_for_the_embedded_engine(h200: Facts) -> None:
    diagnosis = judge(h200, TABLES)
    assert (diagnosis.findings, diagnosis.exit_code) == ((), 0)
    (card,) = diagnosis.advice
    assert card.card == "NVIDIA H200, compute capability 9.0, 138 of 140 GiB free"
    assert (card.index, card.dtype, card.graphs) == (0, "bfloat16", "on")


@pytest.mark.parametrize("shown", ["3", "GPU-00000003-aaaa", "0,1,2,3"])
def test_nor_on_cards_that_others_use_too(h200: Facts, shown: str) -> None:
    assert judge(with_environment(h200, CUDA_VISIBLE_DEVICES=shown), TABLES).findings == ()


def test_what_others_hold_is_seen_where_it_matters(h200: Facts) -> None:
    large = with_weights(h200, 100_000)
    assert ids(judge(large, TABLES)) == []
    (found,) = judge(with_environment(large, CUDA_VISIBLE_DEVICES="2"), TABLES).findings
    assert (found.id, found.about) == ("gpu-full", "00000000:12:00.0")
    assert "/venv/bin/python3 (pid" in found.seen


def test_sglang_is_not_installed_there(h200: Facts) -> None:
    diagnosis = judge(replace(h200, asked=replace(h200.asked, engine="sglang")), TABLES)
    assert (ids(diagnosis), diagnosis.exit_code) == ([("fail", "sglang-missing")], 1)


def test_with_a_set_known_to_work_sglang_would_start_there(h200: Facts) -> None:
    known = sglang("9.0", 4)
    machine = replace(
        h200, asked=Asked("sglang"), packages=h200.packages | {**known.packages, "torch": h200.packages["torch"]},
        imports=known.imports, kernel=known.kernel, libraries=known.libraries,
    )  # fmt: skip
    diagnosis = judge(machine, TABLES)
    assert ids(diagnosis) == []
    (card,) = diagnosis.advice
    assert (card.index, card.attention) == (0, judge(known, TABLES).advice[0].attention)
