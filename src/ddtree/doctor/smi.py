"""NVIDIA's cards: nvidia-smi's CSV, what the driver lists, and the last Xid of each card. Nothing is changed."""

import csv
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddtree.doctor.children import end
from ddtree.doctor.facts import Driver, Gpu, Process, Xid

SECONDS = 30.0  # a dead card can hold nvidia-smi for ever
PROC = Path("/proc/driver/nvidia")
# The first of a line are needed of every card; a driver that does not know one of the others is asked without it.
CARD = ("index", "pci.bus_id", "name", "uuid", "memory.total", "memory.free")
HEALTH = (
    "compute_cap", "ecc.errors.uncorrected.volatile.total", "remapped_rows.pending", "remapped_rows.failure",
    "compute_mode", "mig.mode.current",
)  # fmt: skip
APPS = ("gpu_uuid", "pid", "process_name", "used_memory")
NOTHING = ("", "[n/a]", "n/a", "[not supported]", "[not found]", "[insufficient permissions]")
TROUBLE = re.compile(r"(?i)unknown error|gpu is lost|\berr!|reset required|requires reset|fallen off")
UNREACHABLE = re.compile(
    r"(?i)unable to determine the device handle for gpu\s*(?P<index>\d{1,3}(?=:\s))?:?\s*"
    r"(?P<bus>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])?:?\s*(?P<why>[^\n]*)"
)
XID = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)\): (?P<code>\d+)(?P<text>[^\n]*)")


@dataclass(frozen=True)
class Said:
    """What a program answered."""

    code: int | None  # None: it did not end in time
    out: str
    err: str


Ask = Callable[[Sequence[str]], Said | None]  # None: there is no such program


def ask(command: Sequence[str]) -> Said | None:
    """Run one query. Its output may hold any bytes; a program that hangs is ended."""
    if shutil.which(command[0]) is None:
        return None
    try:
        # In a session of its own, so that what it started in turn can be ended with it.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        return Said(1, "", str(error))
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        end(process)
        with suppress(subprocess.TimeoutExpired):  # one that a dead card holds in the kernel does not even die
            process.communicate(timeout=1)
        return Said(None, "", f"{command[0]} did not answer within {SECONDS:.0f} s")
    except BaseException:  # Ctrl-C
        end(process)
        raise
    return Said(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


def look(query: Ask = ask, proc: Path = PROC) -> tuple[Driver, tuple[Gpu, ...]]:
    """The driver and every card, those that do not answer too."""
    bus_ids = tuple(sorted(entry.name for entry in (proc / "gpus").glob("*")))
    header = query(["nvidia-smi"])
    if header is None:
        text = _read(proc / "version")
        found = re.search(r"Kernel Module.*?\s(\d{3,}\.\d[.\d]*)", text)
        return Driver("missing", found[1] if found else None, bus_ids=bus_ids), ()
    if header.code is None:
        return Driver("timeout", problem=header.err, bus_ids=bus_ids, xids=xids(query)), ()
    cuda = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+\.\d+)", header.out)
    version = re.search(r"(?:Driver|KMD) Version\s*:\s*(\d+[.\d]*)", header.out)
    answering, said = _cards(query)
    lost = _lost(f"{header.out}\n{header.err}\n{said}", bus_ids)
    if lost and not answering:  # some releases say nothing of the others then: they are asked one by one
        dead = {gpu.bus_id for gpu in lost}
        answering = [gpu for bus in bus_ids if _bus(bus) not in dead for gpu in _cards(query, bus)[0]]
    errors = xids(query)
    gpus = _merge(answering, lost, bus_ids, {xid.bus_id for xid in errors or ()})
    problem = None
    if not gpus:
        problem = " ".join((header.out + header.err).split())[:300] or f"nvidia-smi ended with code {header.code}"
    driver = Driver(
        "failed" if problem else "ok", version[1] if version else None, cuda[1] if cuda else None, problem, bus_ids,
        errors,
    )  # fmt: skip
    return driver, _with_processes(gpus, query)


def xids(query: Ask) -> tuple[Xid, ...] | None:
    """The last Xid of each card since the machine started; None where the kernel's log may not be read."""
    for command in (["dmesg"], ["journalctl", "--dmesg", "--no-pager", "--quiet", "--boot"]):
        said = query(command)
        if said is not None and said.code == 0 and said.out.strip():
            last = {
                _bus(found["bus"]): Xid(_bus(found["bus"]), int(found["code"]), found["text"].strip(" ,"))
                for found in XID.finditer(said.out)
            }
            return tuple(last.values())
    return None


def _cards(query: Ask, only: str | None = None) -> tuple[list[Gpu], str]:
    """The rows of the cards that answer, or of one of them, and all that nvidia-smi said besides."""
    health = list(HEALTH)
    one = [f"--id={only}"] if only else []
    while True:
        fields = f"--query-gpu={','.join((*CARD, *health))}"
        said = query(["nvidia-smi", fields, "--format=csv,noheader,nounits", *one])
        if said is None:
            return [], ""
        unknown = re.search(r'Field "([\w.]+)" is not a valid field', said.out + said.err)
        if unknown is None or unknown[1] not in health:
            break
        health.remove(unknown[1])
    names = (*CARD, *health)
    gpus, other = [], [said.err]
    for row in csv.reader(said.out.splitlines(), skipinitialspace=True):
        if len(row) == len(names):
            gpus.append(_card(dict(zip(names, (cell.strip() for cell in row), strict=True))))
        else:
            other.append(", ".join(row))
    return gpus, "\n".join(other)


def _card(row: dict[str, str]) -> Gpu:
    troubles = [cell for cell in row.values() if TROUBLE.search(cell)]
    return Gpu(
        index=_number(row["index"]),
        bus_id=_bus(row["pci.bus_id"]) if _known(row["pci.bus_id"]) else None,
        name=_known(row["name"]),
        uuid=_known(row["uuid"]),
        capability=_known(row.get("compute_cap")),
        memory_mib=_number(row["memory.total"]),
        free_mib=_number(row["memory.free"]),
        ecc_uncorrected=_number(row.get("ecc.errors.uncorrected.volatile.total")),
        remap_pending=_flag(row.get("remapped_rows.pending")),
        remap_failed=_flag(row.get("remapped_rows.failure")),
        compute_mode=_known(row.get("compute_mode")),
        mig=_flag(row.get("mig.mode.current")),
        problem=f"nvidia-smi answers {troubles[0]!r} for it" if troubles else None,
    )


def _lost(text: str, bus_ids: Sequence[str]) -> list[Gpu]:
    """The cards that nvidia-smi names as out of reach."""
    lost = {}
    for found in UNREACHABLE.finditer(text):
        bus = _bus(found["bus"]) if found["bus"] else None
        index = int(found["index"]) if found["index"] else _place(bus, bus_ids)
        lost[bus or index] = Gpu(index, bus, problem=f'nvidia-smi: "{" ".join(found[0].split())}"')
    return list(lost.values())


def _merge(gpus: list[Gpu], lost: list[Gpu], bus_ids: Sequence[str], troubled: set[str]) -> tuple[Gpu, ...]:
    """All cards by index: a lost one replaces its row, and one that only the driver lists is lost after an Xid.

    Without an Xid it is not: in a container the driver may list the whole host's cards.
    """
    dead = {gpu.bus_id for gpu in lost if gpu.bus_id}
    found = [gpu for gpu in gpus if gpu.bus_id not in dead]
    known = dead | {gpu.bus_id for gpu in found}
    if found or lost:
        silent = [bus for bus in map(_bus, bus_ids) if bus in troubled and bus not in known]
        problem = "the driver lists it, nvidia-smi does not"
        lost = [*lost, *(Gpu(_place(bus, bus_ids), bus, problem=problem) for bus in silent)]
    return tuple(sorted((*found, *lost), key=lambda gpu: (gpu.index is None, gpu.index or 0, gpu.bus_id or "")))


def _with_processes(gpus: tuple[Gpu, ...], query: Ask) -> tuple[Gpu, ...]:
    said = query(["nvidia-smi", f"--query-compute-apps={','.join(APPS)}", "--format=csv,noheader,nounits"])
    found: dict[str, list[Process]] = {}
    for row in csv.reader(said.out.splitlines() if said else [], skipinitialspace=True):
        cells = [cell.strip() for cell in row]
        if len(cells) >= len(APPS) and cells[1].isdigit():
            name = ", ".join(cells[2:-1])  # a name may hold commas
            found.setdefault(cells[0], []).append(Process(int(cells[1]), name, _number(cells[-1])))
    return tuple(replace(gpu, processes=tuple(found.get(gpu.uuid or "", ()))) for gpu in gpus)


def _bus(text: str) -> str:
    """One spelling for a bus id: 8 digits of domain, lower case, with a function. Anything else stays as it is."""
    parts = text.lower().split(":")
    if len(parts) != 3:
        return text
    domain, bus, device = parts
    return f"{domain[-8:]:0>8}:{bus}:{device if '.' in device else device + '.0'}"


def _place(bus: str | None, bus_ids: Sequence[str]) -> int | None:
    order = sorted(_bus(entry) for entry in bus_ids)  # nvidia-smi counts in the order of the bus
    return order.index(bus) if bus in order else None


def _known(text: str | None) -> str | None:
    return None if text is None or text.lower() in NOTHING or TROUBLE.search(text) else text


def _number(text: str | None) -> int | None:
    found = re.fullmatch(r"(\d+)(?:\.\d+)?(?: MiB)?", _known(text) or "")
    return int(found[1]) if found else None


def _flag(text: str | None) -> bool | None:
    value: Any = {"yes": True, "enabled": True, "1": True, "no": False, "disabled": False, "0": False}.get(
        (_known(text) or "").lower()
    )
    return value if isinstance(value, bool) else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
