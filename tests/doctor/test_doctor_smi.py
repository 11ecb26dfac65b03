"""nvidia-smi's answers, whole and broken, and the kernel's log."""

import stat
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from ddtree.doctor import smi
from ddtree.doctor.facts import Process
from ddtree.doctor.smi import CARD, HEALTH, Said, look, xids

HEADER = "| NVIDIA-SMI 580.159.04   Driver Version: 580.159.04   CUDA Version: 13.0 |"
ROW = "{index}, 00000000:{bus}:00.0, NVIDIA H200, GPU-{index}aaaa, 143771, 143000, 9.0, 0, No, No, Default, Disabled"
LOST = (
    "Unable to determine the device handle for GPU3: 0000:43:00.0: GPU is lost.  Reboot the system to recover this GPU"
)
NVRM = "[ 10.0] NVRM: Xid (PCI:0000:43:00): {code}, pid=77, name=python3, GPU has fallen off the bus."


class Machine:
    """Answers as nvidia-smi would; `unknown` are fields that its driver does not know."""

    def __init__(
        self, rows: Sequence[str] = (), *, apps: str = "", log: str | None = None, err: str = "", **said: Said
    ):
        self.rows, self.apps, self.log, self.err = rows, apps, log, err
        self.header = said.get("header", Said(0, HEADER, ""))
        self.unknown: tuple[str, ...] = ()
        self.asked: list[Sequence[str]] = []

    def __call__(self, command: Sequence[str]) -> Said | None:
        self.asked.append(command)
        if command[0] == "dmesg":
            return Said(0, self.log, "") if self.log is not None else Said(1, "", "Operation not permitted")
        if command[0] != "nvidia-smi":
            return None
        if len(command) == 1:
            return self.header
        if command[1].startswith("--query-compute-apps"):
            return Said(0, self.apps, "")
        if command[-1].startswith("--id="):
            place = command[-1].removeprefix("--id=0000:").removesuffix(":00.0")
            return Said(0, ROW.format(index=int(place, 16), bus=place), "")
        names = command[1].removeprefix("--query-gpu=").split(",")
        for name in self.unknown:
            if name in names:
                return Said(2, f'Field "{name}" is not a valid field to query.', "")
        order = [*CARD, *HEALTH]
        cut = [
            ", ".join(cell for name, cell in zip(order, row.split(", "), strict=True) if name in names)
            if row.count(", ") + 1 == len(order) else row
            for row in self.rows
        ]  # fmt: skip
        return Said(0, "\n".join(cut), self.err)


def rows(*buses: str) -> list[str]:
    return [ROW.format(index=index, bus=bus) for index, bus in enumerate(buses)]


def test_a_healthy_machine(tmp_path: Path) -> None:
    apps = "GPU-1aaaa, 4711, /usr/bin/python3, with a comma, 73000\nGPU-1aaaa, 4712, other, [N/A]"
    driver, gpus = look(Machine(rows("10", "20"), apps=apps, log="[ 1.0] Linux"), tmp_path)
    assert (driver.smi, driver.version, driver.cuda, driver.xids) == ("ok", "580.159.04", "13.0", ())
    assert [(gpu.index, gpu.bus_id, gpu.capability, gpu.memory_mib, gpu.problem) for gpu in gpus] == [
        (0, "00000000:10:00.0", "9.0", 143771, None),
        (1, "00000000:20:00.0", "9.0", 143771, None),
    ]
    assert gpus[0].processes == ()
    assert gpus[1].processes == (
        Process(4711, "/usr/bin/python3, with a comma", 73000),
        Process(4712, "other", None),
    )
    assert (gpus[0].ecc_uncorrected, gpus[0].remap_failed, gpus[0].mig) == (0, False, False)


def test_no_nvidia_smi(tmp_path: Path) -> None:
    driver, gpus = look(lambda command: None, tmp_path)
    assert (driver.smi, driver.version, gpus) == ("missing", None, ())
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build"
    )
    assert look(lambda command: None, tmp_path)[0].version == "580.159.04"


def test_an_older_driver_is_asked_without_the_fields_that_it_lacks(tmp_path: Path) -> None:
    machine = Machine(rows("10"))
    machine.unknown = ("compute_cap", "mig.mode.current")
    _, gpus = look(machine, tmp_path)
    assert (gpus[0].capability, gpus[0].mig, gpus[0].compute_mode) == (None, None, "Default")


@pytest.mark.parametrize(
    "row",
    [
        "1, 00000000:20:00.0, " + ", ".join(["[GPU is lost]"] * 5 + ["[N/A]"] * 5),
        "1, 00000000:20:00.0, NVIDIA H200, GPU-1aaaa, [Unknown Error], [Unknown Error], 9.0" + ", [N/A]" * 5,
        "1, 00000000:20:00.0, NVIDIA H200, GPU-1aaaa, 143771, [GPU requires reset], 9.0, 0, No, No, Default, Disabled",
    ],
    ids=["lost", "unknown error", "reset"],
)  # fmt: skip
def test_a_row_without_an_answer_is_a_lost_card(tmp_path: Path, row: str) -> None:
    _, gpus = look(Machine([*rows("10"), row]), tmp_path)
    assert [gpu.problem is None for gpu in gpus] == [True, False]
    assert gpus[1].bus_id == "00000000:20:00.0"


def test_what_a_card_lacks_is_not_known_and_no_fault(tmp_path: Path) -> None:
    row = "0, 00000000:10:00.0, NVIDIA RTX, GPU-0aaaa, 32607, 32000, 12.0, [N/A], [N/A], [N/A], Default, [N/A]"
    _, gpus = look(Machine([row]), tmp_path)
    assert (gpus[0].ecc_uncorrected, gpus[0].remap_failed, gpus[0].mig, gpus[0].problem) == (None, None, None, None)


@pytest.mark.parametrize("listed", [True, False])
def test_a_card_that_is_named_as_out_of_reach(tmp_path: Path, listed: bool) -> None:
    if listed:
        for bus in ("10", "20", "30", "43"):
            (tmp_path / "gpus" / f"0000:{bus}:00.0").mkdir(parents=True)
    machine = Machine(rows("10", "20", "30"), err=LOST, log=NVRM.format(code=13) + "\n" + NVRM.format(code=79))
    driver, gpus = look(machine, tmp_path)
    assert [gpu.index for gpu in gpus] == [0, 1, 2, 3]
    assert gpus[3].bus_id == "00000000:43:00.0"
    assert "GPU is lost" in (gpus[3].problem or "")
    assert driver.xids is not None
    assert [(xid.bus_id, xid.code) for xid in driver.xids] == [("00000000:43:00.0", 79)]


def test_the_other_spelling_gives_no_index_and_the_bus_tells_it(tmp_path: Path) -> None:
    for bus in ("0b", "0c"):
        (tmp_path / "gpus" / f"0000:{bus}:00.0").mkdir(parents=True)
    said = Said(15, "Unable to determine the device handle for GPU 0000:0B:00.0: Unknown Error", "")
    driver, gpus = look(Machine([], header=said, err=said.out), tmp_path)
    assert [(gpu.index, gpu.bus_id) for gpu in gpus] == [(0, "00000000:0b:00.0"), (12, "00000000:0c:00.0")]
    assert "Unknown Error" in (gpus[0].problem or "")
    assert (gpus[1].problem, gpus[1].memory_mib) == (None, 143771), "the other one was asked by itself"
    assert driver.smi == "ok"


def test_a_card_that_only_the_driver_lists(tmp_path: Path) -> None:
    for bus in ("10", "20"):
        (tmp_path / "gpus" / f"0000:{bus}:00.0").mkdir(parents=True)
    _, gpus = look(Machine(rows("10")), tmp_path)
    assert [gpu.index for gpu in gpus] == [0], "a container may list the cards of its whole host"
    _, gpus = look(Machine(rows("10"), log=NVRM.format(code=79).replace("43", "20")), tmp_path)
    assert [(gpu.index, gpu.problem) for gpu in gpus] == [(0, None), (1, "the driver lists it, nvidia-smi does not")]


@pytest.mark.parametrize(
    "said", ["Failed to initialize NVML: Driver/library version mismatch", "No devices were found", ""]
)
def test_nvidia_smi_fails_as_a_whole(tmp_path: Path, said: str) -> None:
    machine = Machine([], header=Said(18, said, ""))
    driver, gpus = look(machine, tmp_path)
    assert (driver.smi, gpus) == ("failed", ())
    assert driver.problem == (said or "nvidia-smi ended with code 18")


def test_a_bus_id_of_no_known_form_is_no_crash(tmp_path: Path) -> None:
    (tmp_path / "gpus/odd").mkdir(parents=True)
    _, gpus = look(Machine(["0, odd, Card, GPU-0aaaa, 1, 1, 9.0, 0, No, No, Default, Disabled"]), tmp_path)
    assert [(gpu.index, gpu.bus_id) for gpu in gpus] == [(0, "odd")]


def test_nvidia_smi_hangs(tmp_path: Path) -> None:
    driver, gpus = look(Machine([], header=Said(None, "", "nvidia-smi did not answer within 30 s")), tmp_path)
    assert (driver.smi, driver.problem, gpus) == ("timeout", "nvidia-smi did not answer within 30 s", ())


def test_a_log_that_may_not_be_read_is_not_an_empty_one() -> None:
    assert xids(Machine()) is None
    assert xids(Machine(log="[ 1.0] Linux")) == ()


def test_programs_are_run_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\n[ -n \"$1\" ] && exec sleep 60\nprintf 'caf\\351'\nexit 3\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert smi.ask([str(program)]) == Said(3, "caf\ufffd", "")
    monkeypatch.setattr(smi, "SECONDS", 0.5)
    said = smi.ask([str(program), "-q"])
    assert said is not None
    assert said.code is None
    assert smi.ask([str(tmp_path / "none")]) is None


def test_what_a_hanging_program_started_is_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, note = tmp_path / "nvidia-smi", tmp_path / "pid"
    program.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {note}\nwait\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(smi, "SECONDS", 1)
    said = smi.ask([str(program)])
    assert said is not None
    assert said.code is None
    left = Path(f"/proc/{int(note.read_text())}/stat")
    deadline = time.monotonic() + 10
    while (
        running := left.exists() and left.read_text().rpartition(")")[2].split()[0] != "Z"
    ) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running
