"""Every rule that ships: the made-up machine that has the fault, and its healthy neighbour, which has none."""

import json
from dataclasses import replace

import pytest

import faults_machine
import faults_sglang
from ddtree.doctor import Diagnosis, Facts, judge, load
from ddtree.doctor.facts import Asked, Checkpoint, Driver, Port, Requirement
from ddtree.doctor.record import from_json, to_json
from faults import Fault
from machines import (
    card,
    cpu,
    gpu,
    sglang,
    with_card,
    with_environment,
    with_model,
    with_packages,
    with_system,
    with_torch,
)

TABLES = load()
FAULTS = [*faults_sglang.FAULTS, *faults_machine.FAULTS]


def examined(facts: Facts) -> Diagnosis:
    """As `ddtree doctor --replay` would judge a recording of it."""
    return judge(from_json(json.loads(json.dumps(to_json(facts)))), TABLES)


def ids(facts: Facts) -> list[str]:
    return [finding.id for finding in examined(facts).findings]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.rule)
def test_the_fault_is_found_alone(fault: Fault) -> None:
    diagnosis = examined(fault.broken())
    assert sorted({finding.id for finding in diagnosis.findings}) == sorted({fault.rule, *fault.also})
    found = next(finding for finding in diagnosis.findings if finding.id == fault.rule)
    assert found.level == fault.level
    said = f"{found.what}\n{found.seen}\n{found.mend}"
    for words in fault.says:
        assert words in said
    assert diagnosis.exit_code == {"fail": 1, "unknown": 2, "warn": 0}[diagnosis.findings[0].level]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.rule)
def test_the_sound_neighbour_has_no_finding(fault: Fault) -> None:
    assert ids(fault.sound()) == list(fault.neighbour)
    assert examined(fault.sound()).exit_code == 0


def test_every_rule_has_its_machines() -> None:
    assert {fault.rule for fault in FAULTS} == {rule.id for rule in TABLES.rules}


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1"])
@pytest.mark.parametrize("count", [1, 8])
def test_healthy_cards_raise_nothing_with_the_embedded_engine(capability: str, count: int) -> None:
    diagnosis = examined(gpu(capability, count))
    assert (diagnosis.findings, diagnosis.verdict, diagnosis.exit_code) == ((), "fine", 0)
    assert [advice.dtype for advice in diagnosis.advice] == ["bfloat16"] * count


@pytest.mark.parametrize("version", ["0.5.13.post1", "0.5.17", "0.5.20", "0.5.23"])
@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.0", "10.0", "12.0"])
def test_healthy_sets_of_sglang_raise_nothing(version: str, capability: str) -> None:
    diagnosis = examined(sglang(capability, 2, version))
    assert diagnosis.findings == ()
    assert {(advice.tree_attention, advice.grammar) for advice in diagnosis.advice} == {("triton", "xgrammar")}


@pytest.mark.parametrize(
    ("capability", "attention"),
    [("8.0", "flashinfer"), ("9.0", "fa3"), ("10.0", "trtllm_mha"), ("10.3", "trtllm_mha"), ("12.0", "triton")],
)
def test_what_a_card_should_get_is_not_refused_there(capability: str, attention: str) -> None:
    assert examined(sglang(capability)).advice[0].attention == attention
    assert ids(sglang(capability, attention_backend=attention)) == []


def test_an_unfit_xgrammar_is_advised_against() -> None:
    assert examined(with_packages(sglang(), xgrammar="0.1.10")).advice[0].grammar == "none"
    assert ids(with_packages(sglang(grammar_backend="none"), xgrammar="0.1.10")) == ["set-mismatch"]


def test_a_card_of_no_known_family_is_said_to_be_one() -> None:
    odd = with_torch(gpu("99.0"), archs=("compute_120",))
    assert examined(odd).advice[0].family is None
    assert ids(odd) == []


def test_without_nvidia_smi_the_cards_are_those_of_torch() -> None:
    inside = replace(gpu(), gpus=(), driver=Driver("missing"))
    diagnosis = examined(with_environment(inside, CUDA_VISIBLE_DEVICES="5"))  # torch counts what it sees anew
    assert [advice.index for advice in diagnosis.advice] == [0]
    assert ("health and processes of the GPUs", "there is no nvidia-smi") in diagnosis.unseen


def test_parts_of_a_card_are_named_otherwise() -> None:
    parts = with_environment(with_card(gpu(), mig=True), CUDA_VISIBLE_DEVICES="MIG-1234")
    assert ids(parts) == ["mig"]
    assert len(examined(parts).advice) == 1


@pytest.mark.parametrize("version", ["from source", "unknown"])
def test_a_version_that_is_none_raises_nothing(version: str) -> None:
    assert ids(with_packages(with_system(sglang(), nvcc=version), transformers=version)) == ["set-mismatch"]
    asks = (Requirement("ddtree", "transformers", ">=5.12", version),)
    assert ids(replace(cpu(), requirements=asks)) == []


def test_worst_first() -> None:
    mixed = replace(
        with_card(gpu(count=2), 1, mig=True), port=Port(30000, False, "taken"), drafter=Checkpoint("org/d", "to fetch")
    )
    assert [finding.level for finding in examined(mixed).findings] == ["fail", "unknown", "warn"]
    assert examined(mixed).verdict == "would fail"


def test_what_is_not_known_raises_nothing() -> None:
    """Cards of which nvidia-smi tells next to nothing, and no torch."""
    bare = card(capability="9.0", memory_mib=None, free_mib=None, ecc_uncorrected=None, remap_pending=None,
                remap_failed=None, compute_mode=None, mig=None)  # fmt: skip
    dark = replace(gpu(), gpus=(replace(bare, capability=None),), driver=Driver("ok"))
    assert ids(dark) == []
    assert examined(replace(dark, torch=None)).unseen[-1][0] == "GPUs as torch sees them"


@pytest.mark.parametrize("value", ["8192", 8192.5, True, None, [1]])
def test_a_field_of_a_model_that_is_of_another_kind_leaves_the_rest_of_the_report(value: object) -> None:
    odd = with_model(replace(cpu(), port=Port(30000, False, "taken")), max_position_embeddings=value)
    assert ids(odd) == ["port-taken"]


def test_which_drafter_is_loaded() -> None:
    asked = [Asked(drafter=drafter, mode=mode) for drafter in ("auto", "org/d", "none") for mode in ("tree", "ar")]
    assert [one.loaded_drafter for one in asked] == ["auto", "none", "org/d", "org/d", "none", "none"]
    assert Asked("sglang", drafter="org/d", mode="ar").loaded_drafter == "none"
