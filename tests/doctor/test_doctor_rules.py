"""Rules as data: what a file of one's own can do, and what is refused in it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree.doctor import judge, load
from ddtree.doctor.cards import covered
from ddtree.doctor.derive import is_older
from ddtree.doctor.facts import Port, Requirement
from ddtree.doctor.rules import LISTS
from ddtree.errors import InvalidOption
from machines import cpu, failing, gpu, sglang, with_card, with_packages

OWN = """
[[rule]]
id = "few-cores"
level = "warn"
when = [["system.cores", "<", 32]]
what = "there are {system.cores} cores"
seen = "counted, {system.memory_mib|gib}"
mend = "get more"
"""

CARD = (
    '[[card]]\nname = "Next"\nlow = 130\nhigh = 139\ndtype = "float16"\ngraphs = "off"\nattention = "a"\n'
    'tree_attention = "b"\n'
)
LIBRARY = '[[library]]\nname = "libx.so"\nengine = "embedded"\nmodule = "torch"\nneeded_by = "x"\nmend = "y"\n'


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return tmp_path / "own.toml"


def test_a_rule_of_ones_own(own: Path) -> None:
    own.write_text(OWN)
    (finding,) = judge(cpu(), load(own)).findings
    assert (finding.id, finding.what, finding.seen) == ("few-cores", "there are 16 cores", "counted, 125.0 GiB")
    assert judge(replace(cpu(), system=replace(cpu().system, cores=32)), load(own)).findings == ()


def test_the_sample_of_the_documentation(own: Path) -> None:
    text = (Path(__file__).parents[2] / "docs/doctor.md").read_text(encoding="utf-8")
    own.write_text(re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0])
    assert judge(sglang("10.0"), load(own)).findings == ()
    older = replace(sglang("10.0"), driver=replace(sglang().driver, version="570.1"))
    assert [finding.id for finding in judge(older, load(own)).findings] == ["our-driver"]


def test_a_level_can_be_changed_and_a_rule_turned_off(own: Path) -> None:
    taken = replace(cpu(), port=Port(30000, False, "taken"))
    for level, code in (("warn", 0), ("unknown", 2), ("fail", 1), ("off", 0)):
        own.write_text(f'[[rule]]\nid = "port-taken"\nlevel = "{level}"\n')
        diagnosis = judge(taken, load(own))
        assert diagnosis.exit_code == code
        assert len(diagnosis.findings) == (level != "off")


def test_a_known_set_can_be_added(own: Path) -> None:
    newer = with_packages(sglang(), sglang="0.6.0", xgrammar="0.2.0")
    assert [finding.id for finding in judge(newer, load()).findings] == ["set-unknown"]
    own.write_text('[[set]]\nsglang = "0.6.0"\nxgrammar = "0.2.1"\n')
    assert [finding.id for finding in judge(newer, load(own)).findings] == ["xgrammar-old"]


def test_cards_xids_and_libraries_can_be_added(own: Path) -> None:
    own.write_text(CARD + '[[xid]]\ncode = 999\nmeaning = "new"\n' + LIBRARY)
    tables = load(own)
    assert judge(gpu("13.0"), tables).advice[0].family == "Next"
    assert tables.xids[999] == "new"
    assert tables.sonames("embedded") == ["libgomp.so.1", "libx.so"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[rules]]", "unknown table 'rules'"),
        ("not toml", "own.toml"),
        (OWN.replace("what =", "source ="), "rule 'few-cores': what must be text"),
        ('[[rule]]\nid = "x"\nlevel = "fail"', "rule 'x': no rule that ships has this id: a rule of your own"),
        ('[[rule]]\nid = "port-ephemral"\nlevel = "off"', "did you mean 'port-ephemeral'?"),
        ('[[rule]]\nid = "port-taken"\nlevel = "loud"', "rule 'port-taken': level must be one of"),
        ('[[rule]]\nid = ["x"]\nlevel = "off"', "rule ['x']: id must be text"),
        (OWN.replace('"warn"', '"loud"'), "level must be one of fail, unknown, warn, off"),
        (OWN.replace('"<", 32', '"less", 32'), "unknown operator 'less'"),
        (OWN.replace('"<", 32', '"set", 32'), "'set' takes no value"),
        (OWN.replace('"<", 32', '"matches", "("'), "cannot be used with 'matches'"),
        (OWN.replace('"<", 32', '"version", "newer"'), "cannot be used with 'version'"),
        (OWN.replace('"<", 32', '"in", 32'), "'in' needs a list"),
        (OWN.replace('"<", 32', '"<", { key = "x" }'), "must be {path = ...}"),
        (OWN.replace('when = [["system.cores", "<", 32]]', ""), "it needs conditions"),
        (OWN + 'each = "gpu"', "each must be one of gpus"),
        (OWN + 'engine = "vllm"', "engine must be one of embedded, sglang"),
        (OWN + 'color = "red"', "unknown field ['color']"),
        ('[[set]]\ntorch = "2.11.0"', "lacks 'sglang'"),
        ('[[card]]\nname = "x"', "card 'x'"),
        ('[[library]]\nname = "x"', "lacks 'engine'"),
        *(
            (f"[{name}]\nx = 1", f"{name} must be written [[{name}]]")
            for name in ("rule", "set", "card", "xid", "library")
        ),
        *((f"{name}", "rule must be written [[rule]]") for name in ("rule = 3", "rule = [3]", 'rule = "x"')),
        ("card = 3", "card must be written [[card]]"),
        (OWN + OWN, "the rule 'few-cores' is there twice"),
        (OWN + "hides = 3", "hides must be a list of rule ids, not 3"),
        (OWN + "hides = [3]", "hides must be a list of rule ids, not [3]"),
        (OWN + 'hides = "import-failed"', "hides must be a list of rule ids, not 'import-failed'"),
        (
            OWN + 'hides = ["import-faild:torch"]',
            "hides: there is no rule 'import-faild:torch': did you mean 'import-failed'?",
        ),
        (OWN + "about = 3", "about must be text, not 3"),
        (OWN.replace('[["system.cores", "<", 32]]', "3"), "when must be a list of conditions, not 3"),
        (OWN.replace('"system.cores", "<", 32', '5, "set"'), "when: the path of [5, 'set'] must be text"),
        (OWN.replace('"<", 32', '["<"], 32'), "when: unknown operator ['<']"),
        (OWN.replace('"<", 32', '"<", { path = 5 }'), "when: {'path': 5} must be {path = ...} with text"),
        (
            OWN.replace('"<", 32', '"version", { path = "system.executable" }'),
            "when: it cannot be applied: system.cores is",
        ),
        (OWN.replace('"<", 32', '"in", { path = "system.cores" }'), "'in' does not go with 1 (of system.cores)"),
        (
            OWN.replace("{system.cores}", "{system.executable|gib}"),
            "what: it cannot be applied: {system.executable|gib} needs",
        ),
        ("[[xid]]\ncode = [1]\nmeaning = 'm'", "xid [1]: code must be a whole number, not [1]"),
        ("[[xid]]\ncode = 1\nmeaning = 3", "xid 1: meaning must be text, not 3"),
        (CARD.replace("130", '"a"'), "card 'Next': low must be a whole number, not 'a'"),
        (CARD + "colour = 3", "card 'Next': unknown field ['colour']"),
        ('[[set]]\nsglang = "1"\ntorch = 2', "set '1': torch must be text, not 2"),
        ('[[set]]\nsglang = "1"\ncuda = "x"', "set '1': cuda must be a whole number, not 'x'"),
        ("[[set]]\nsglang = 1", "set 1: sglang must be text"),
        (LIBRARY.replace('"embedded"', "5"), "library 'libx.so': engine must be text, not 5"),
        (LIBRARY.replace('"embedded"', '"vllm"'), "library 'libx.so': engine must be one of embedded, sglang, both"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name(own: Path, text: str, words: str) -> None:
    own.write_text(text)
    with pytest.raises(InvalidOption, match="--rules") as refused:
        load(own)
    said = str(refused.value)
    assert words in said
    assert "own.toml" in said
    assert not re.search("__init__|invalid literal|object|NoneType", said), "Python's own words"


def test_a_file_that_is_not_there(own: Path) -> None:
    with pytest.raises(InvalidOption, match="cannot be read"):
        load(own)


@pytest.mark.parametrize(
    "changed",
    [
        OWN.replace("system.cores", "system.corse"),
        OWN.replace("{system.cores}", "{system.corse}"),
        OWN.replace('"<", 32', '"<", "many"'),
        OWN.replace('["system.cores", "<", 32]', '["driver.smi", "is", "never"], ["model.colour", "is", "red"]'),
    ],
)
def test_a_misspelled_path_is_refused_before_any_machine(own: Path, changed: str) -> None:
    own.write_text(changed)
    with pytest.raises(InvalidOption, match=r"own\.toml: rule 'few-cores': (when|what): it cannot be applied"):
        load(own)


@pytest.mark.parametrize("each", ["gpus", "imports", "mismatches", "requirements", "libraries", "spaces"])
def test_paths_of_other_engines_and_of_empty_lists_are_refused_too(own: Path, each: str) -> None:
    item = LISTS[each]
    own.write_text(f'{OWN}each = "{each}"\nany = [["{item}.nope", "set"]]')
    with pytest.raises(InvalidOption, match=f"any: it cannot be applied: there is no '{item}.nope'"):
        load(own)
    own.write_text(OWN.replace("system.memory_mib|gib", "torch.nope") + 'engine = "sglang"')
    with pytest.raises(InvalidOption, match=r"seen: it cannot be applied: there is no 'torch\.nope'"):
        load(own)


def test_what_only_one_machine_shows_names_the_rule_too(own: Path) -> None:
    """The file is sound; a version that is looked up is none on this machine."""
    own.write_text(OWN.replace('"system.cores", "<", 32', '"torch.version", "version", { path = "known.range" }'))
    machine = with_packages(sglang(), sglang="1")
    for wanted, found in ((">=2", ["few-cores"]), ("newer", None)):
        tables = replace(load(own), sets={"1": {"sglang": "1", "range": wanted}})
        if found:
            assert [finding.id for finding in judge(machine, tables).findings if finding.id == "few-cores"] == found
        else:
            with pytest.raises(
                InvalidOption, match=r"own\.toml: rule 'few-cores': when: .*'version' does not go with 'newer'"
            ):
                judge(machine, tables)


def test_a_hand_written_recording_may_ask_for_no_version() -> None:
    asks = (Requirement("ddtree", "transformers", "newer", "5.12.1"),)
    assert judge(replace(cpu(), requirements=asks), load()).findings == ()


def test_a_card_with_memory_shared_with_the_host() -> None:
    shared = with_card(gpu("12.1"), memory_mib=None, free_mib=90_000)
    diagnosis = judge(shared, load())
    assert (diagnosis.findings, diagnosis.advice[0].card) == ((), "NVIDIA Card, compute capability 12.1, 88 GiB free")


@pytest.mark.parametrize(
    ("sm", "archs", "expected"),
    [
        (90, ("sm_90",), True),
        (90, ("sm_90a",), True),
        (89, ("sm_80", "sm_90"), True),
        (80, ("sm_86",), False),
        (120, ("sm_100", "sm_90"), False),
        (121, ("sm_120",), True),
        (120, ("compute_90",), True),
        (120, ("compute_90a",), False),
        (103, ("sm_100f",), True),
        (103, ("sm_100a",), False),
        (80, ("compute_90",), False),
        (90, ("gfx942",), False),
        (None, ("sm_90",), None),
        (90, (), None),
    ],
)
def test_which_builds_run_on_which_cards(sm: int | None, archs: tuple[str, ...], expected: bool | None) -> None:
    assert covered(sm, archs) is expected


def test_a_crash_is_told_by_its_place() -> None:
    error = (
        "loading\nFatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
        '  File "/venv/a.py", line 1 in <module>\n  File "/venv/b.py", line 2 in <module>'
    )
    (finding,) = judge(failing(cpu(), "ddtree.engine", error, signal="SIGSEGV"), load()).findings
    assert finding.seen.endswith(
        'ended by SIGSEGV Fatal Python error: Segmentation fault File "/venv/a.py", line 1 in <module>; ddtree 0.1.0'
    )
    (quiet,) = judge(failing(cpu(), "ddtree.engine", "", signal="SIGKILL"), load()).findings
    assert "ended by SIGKILL;" in quiet.seen


@pytest.mark.parametrize(
    ("installed", "wanted", "expected"),
    [
        ("0.4.4", "0.4.5", True),
        ("0.4.5", "0.4.5", False),
        ("0.4.10", "0.4.9", False),
        ("0.6.15", "0.6.15.post1", True),
        ("0.6.15.post1", "0.6.15", False),
        ("2.11.0+cu130", "2.11.0", False),
        ("0.2.1rc1", "0.2.1", True),
        ("from source", "0.2.1", None),
    ],
)
def test_which_version_is_older(installed: str, wanted: str, expected: bool | None) -> None:
    assert is_older(installed, wanted) is expected
