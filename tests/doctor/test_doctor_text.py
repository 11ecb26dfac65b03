"""What people read: worst first, one paragraph a finding, nothing broken that is to be copied."""

import json
from dataclasses import replace

import pytest

from ddtree.doctor import Facts, judge, load
from ddtree.doctor.facts import Checkpoint, Port
from ddtree.doctor.record import from_json
from ddtree.doctor.text import as_json, as_text
from faults import lost
from machines import cpu, gpu, sglang, with_card, with_model, with_packages, with_torch

TABLES = load()


def shown(facts: Facts, width: int = 0) -> str:
    return as_text(facts, judge(facts, TABLES), width=width)


def test_a_fine_machine() -> None:
    lines = shown(cpu()).splitlines()
    assert lines[0].startswith("fine: the embedded engine with smollm2-135m")
    assert lines[1:3] == ["", "machine"]
    assert lines[-2:] == ["not looked at", "  GPUs  there is no nvidia-smi, so this machine is taken to have none"]
    assert "\x1b" not in shown(cpu())


def test_worst_first_one_paragraph_each() -> None:
    facts = replace(with_card(gpu(count=2), 1, mig=True), port=Port(80, False, "Permission denied"))
    first, *paragraphs = shown(facts).split("\n\n")
    assert first.startswith("would fail: ")
    assert paragraphs[0].splitlines() == [
        "FAIL  port 80 cannot be listened on",
        "      seen  bind: Permission denied",
        "      mend  ss -ltnp 'sport = :80' shows who has it; or choose another with --port",
    ]
    assert paragraphs[1].startswith("warn  GPU 1 (NVIDIA H200) is divided by MIG")


def test_like_cards_are_one_paragraph_and_one_line() -> None:
    text = shown(with_torch(gpu("12.0", 8), archs=("sm_90",)))
    assert text.count("FAIL") == 1
    assert text.count("00000000:1") == 7
    assert "GPU 0,1,2,3,4,5,6,7  NVIDIA GeForce RTX 5090" in text
    odd = shown(lost(gpu(count=8)))
    assert "GPU 0,1,2,4,5,6,7  NVIDIA H200" in odd


def test_findings_with_other_remedies_stay_apart() -> None:
    text = shown(with_packages(sglang(), sglang_kernel="0.4.4", flashinfer_python="0.6.12", flashinfer_cubin=None))
    assert 'pip install "sglang-kernel==0.4.5"' in text
    assert 'pip install "flashinfer-python==0.6.15.post1"' in text


def test_cards_get_what_their_engine_takes() -> None:
    assert "--dtype bfloat16 --cuda-graphs on" in shown(gpu())
    assert "--attention-backend" not in shown(gpu())
    assert "--attention-backend fa3, for a tree triton; --grammar-backend xgrammar" in shown(sglang())
    assert "no family of cards is known" in shown(gpu("99.0"))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_terminal_is_not_overrun_but_by_what_is_to_be_copied(width: int) -> None:
    text = shown(with_model(sglang("10.0", 2, attention_backend="flashinfer"), linear_attention=True), width)
    long = [line for line in text.splitlines() if len(line) > width and "mend  " not in line]
    assert [line for line in long if not line.startswith("would fail")] == []


def test_the_verdict_names_what_could_not_be_told() -> None:
    text = shown(replace(cpu(), drafter=Checkpoint("org/drafter", "to fetch")))
    assert text.startswith("could not tell: ")
    assert "\n?     the drafter org/drafter is not on this machine" in text


def test_styles_go_around_words_only() -> None:
    facts = replace(cpu(), port=Port(80, False, "x"))
    styled = as_text(facts, judge(facts, TABLES), lambda text, level: f"<{level}>{text}</>")
    assert styled.startswith("<fail>would fail</>: ")
    assert "<fail>FAIL </> port 80" in styled


def test_json_holds_all_of_it() -> None:
    facts = lost(gpu(count=8))
    value = json.loads(json.dumps(as_json(facts, judge(facts, TABLES))))
    assert (value["verdict"], value["exit_code"]) == ("would fail", 1)
    (finding,) = value["findings"]
    assert set(finding) == {"level", "id", "about", "what", "seen", "mend", "source"}
    assert finding["id"] == "gpu-lost"
    assert [card["index"] for card in value["cards"]] == [0, 1, 2, 4, 5, 6, 7]
    assert from_json(value["facts"]) == facts


@pytest.mark.parametrize("width", [0, 80])
def test_nothing_steers_the_terminal(width: int) -> None:
    """A damaged nvidia-smi says any bytes, and so may a recording of somebody else."""
    odd = "\x1b[2J\x00\x9b\u202eabc\nnext"
    facts = replace(
        with_card(gpu(), name=odd, problem=odd),
        port=Port(80, False, odd),
        drafter=Checkpoint(odd, "missing", problem=odd),
    )
    text = shown(replace(facts, asked=replace(facts.asked, model=odd)), width)
    assert "abc next" in text
    assert all(letter.isprintable() or letter == "\n" for letter in text)
