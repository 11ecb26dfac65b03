"""Facts to the view that rules read: plain dicts, with what follows from several facts worked out once.

Every value that is not known is None. `Free` marks mappings whose keys are open, such as package names.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from packaging.version import InvalidVersion, Version

from ddtree.doctor.cards import cards
from ddtree.doctor.facts import Checkpoint, Facts, Torch
from ddtree.doctor.fit import lower, needs, weights
from ddtree.doctor.rules import Tables, is_specifier, satisfies
from ddtree.doctor.tried import MODULES, imports

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
NUMBERS = ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "block_size")


class Free(dict[str, Any]):
    """A mapping that may be asked for any key."""


def view(facts: Facts, tables: Tables) -> dict[str, Any]:
    """What rules may name. The lists are those that a rule's `each` may go through."""
    plain = asdict(facts)
    row = _set_row(facts, tables)
    tried = imports(facts)
    worked = {entry["module"]: entry["ok"] for entry in tried}
    gpus = cards(facts, tables)
    on_cpu = _on_cpu(facts, gpus)
    for gpu in gpus:
        gpu["loads"] = gpu["usable"] if facts.asked.engine == "sglang" else gpu["first"] and not on_cpu
        gpu["lower"] = {"ever": lower(facts, gpu["memory_mib"]), "now": lower(facts, gpu["free_mib"])}
    return {
        "asked": {key: "auto" if value is None else value for key, value in plain["asked"].items()},
        "system": plain["system"] | {"environment": Free(facts.system.environment)},
        "driver": plain["driver"] | {"cuda_major": _major(facts.driver.cuda), "listed": len(facts.driver.bus_ids)},
        "port": plain["port"] | {"ephemeral": _ephemeral(facts)},
        "torch": _torch(facts.torch),
        "packages": Free(facts.packages),
        "public": Free({name: version.split("+")[0] for name, version in facts.packages.items()}),
        "kernel": (plain["kernel"] or {"version": None}) | {"cuda": _kernel_cuda(facts, row)},
        "known": Free(row or {}),
        "repair": {"kernel": _repair(facts, row), "serve": _serve(facts)},
        "worked": Free(worked),
        "model": _checkpoint(facts.model),
        "drafter": _checkpoint(facts.drafter),
        "cards": {
            "count": len(gpus),
            "usable": sum(gpu["usable"] for gpu in gpus),
            "free_mib": sum(gpu["free_mib"] or 0 for gpu in gpus if gpu["usable"]),
            "memory_mib": sum(gpu["memory_mib"] or 0 for gpu in gpus if gpu["usable"]),
        },
        "need": needs(facts)
        | {"each_mib": _each(facts, gpus), "on_cpu": on_cpu, "lower": lower(facts, facts.system.memory_total_mib)},
        "gpus": gpus,
        "imports": tried,
        "mismatches": _mismatches(facts, row, worked),
        "requirements": _broken(facts, row),
        "libraries": _libraries(facts, tables, worked),
        "spaces": [
            asdict(space) | {"needed_mib": _needed(space.purpose, facts), "written": _written(space.purpose, facts)}
            for space in facts.system.spaces
        ],
    }


def is_older(installed: str, wanted: str) -> bool | None:
    """Whether a version is below another; None where one of them is no version."""
    try:
        return Version(installed.split("+")[0]) < Version(wanted)
    except InvalidVersion:
        return None


def _torch(torch: Torch | None) -> dict[str, Any]:
    blank = dict.fromkeys(("version", "cuda", "hip", "archs", "available", "devices", "said"))
    found = asdict(torch) if torch else blank
    return found | {"cuda_major": _major(found["cuda"])}


def _checkpoint(found: Checkpoint | None) -> dict[str, Any]:
    blank = dict.fromkeys(field.name for field in fields(Checkpoint))
    config = {name: value for name, value in (found.config if found else {}).items() if _sound(name, value)}
    return (asdict(found) if found else blank) | {"config": Free(config), "again": _again(found) if found else None}


def _sound(name: str, value: Any) -> bool:
    """Whether a field of config.json is of its kind: another one is not known, and reading it says what is wrong."""
    return name not in NUMBERS or (isinstance(value, int) and not isinstance(value, bool))


def _again(found: Checkpoint) -> str:
    """How to have damaged files anew."""
    if HUB_ID.fullmatch(found.name) and found.folder != found.name:
        return f"hf download {found.name} --force-download"
    if found.folder is not None:
        return f"copy or download again what is in {found.folder}"
    return "ddtree models lists what is here; give the .gguf file that it was converted from"


def _major(version: str | None) -> int | None:
    found = re.match(r"\d+", version or "")
    return int(found[0]) if found else None


def _ephemeral(facts: Facts) -> bool | None:
    span = facts.system.ephemeral
    return span[0] <= facts.port.number <= span[1] if len(span) == 2 else None


def _set_row(facts: Facts, tables: Tables) -> Mapping[str, Any] | None:
    version = facts.packages.get("sglang")
    return tables.sets.get(version.split("+")[0]) if version else None


def _kernel_cuda(facts: Facts, row: Mapping[str, Any] | None) -> int | None:
    if facts.kernel is None:
        return None
    return _major(facts.kernel.cuda) or (_major(str(row["cuda"])) if row and "cuda" in row else None)


def _repair(facts: Facts, row: Mapping[str, Any] | None) -> str:
    """The command that puts torch and SGLang's kernels back to a pair that belongs together."""
    known = row or {}
    pins = [f'"{name}=={known[name]}"' for name in ("torch", "sglang-kernel") if name in known]
    whole = f'"sglang=={facts.packages.get("sglang")}"'  # pip then takes what that release declares
    return f"pip install --force-reinstall {' '.join(pins) or whole}"


def _serve(facts: Facts) -> str:
    """The command that starts what is asked for, as far as it is sure."""
    engine = "" if facts.asked.engine == "embedded" else f" --engine {facts.asked.engine}"
    return f"ddtree serve{engine} --model {facts.asked.model}"


def _mismatches(facts: Facts, row: Mapping[str, Any] | None, worked: Mapping[str, bool]) -> list[dict[str, Any]]:
    """What differs from the known set of the installed sglang; without one, from the exact pins it declares."""
    if facts.asked.engine != "sglang" or "sglang" not in facts.packages:
        return []
    pins = {
        entry.package: entry.wanted.removeprefix("==")
        for entry in facts.requirements
        if entry.by == "sglang" and re.fullmatch(r"==[\w.+!]+", entry.wanted)
    }
    wanted = pins | {name: str(value) for name, value in (row or {}).items() if name not in ("sglang", "cuda")}
    found = []
    for package, version in wanted.items():
        installed = facts.packages.get(package)
        if installed is None or installed.split("+")[0] == version.split("+")[0]:
            continue
        module = MODULES.get(package, package)
        found.append(
            {"package": package, "installed": installed, "wanted": version, "older": is_older(installed, version),
             "works": worked.get(module)}
        )  # fmt: skip
    return found


def _broken(facts: Facts, row: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Declared requirements that are not met, but those that the known set judges already."""
    found = []
    judged = set(row or ()) | set(facts.packages if row is None else ())
    for entry in facts.requirements:
        if entry.by == "sglang" and entry.package in judged and entry.installed is not None:
            continue
        if not is_specifier(entry.wanted):  # only in a recording that was written by hand
            continue
        if entry.installed is None or satisfies(entry.installed, entry.wanted) is False:
            spec = f"{entry.package}{entry.wanted}"
            found.append(asdict(entry) | {"found": entry.installed or "nothing", "spec": spec})
    return found


def _libraries(facts: Facts, tables: Tables, worked: Mapping[str, bool]) -> list[dict[str, Any]]:
    return [
        {"name": name, "loads": loads, "needed_by": tables.libraries[name]["needed_by"],
         "works": worked.get(tables.libraries[name]["module"]), "mend": tables.libraries[name]["mend"]}
        for name, loads in facts.libraries.items()
        if name in tables.libraries
    ]  # fmt: skip


def _on_cpu(facts: Facts, gpus: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the embedded engine takes the CPU: there is no card, or torch cannot use one."""
    usable = any(gpu["usable"] for gpu in gpus)
    return facts.asked.engine == "embedded" and (not usable or (facts.torch is not None and not facts.torch.available))


def _written(purpose: str, facts: Facts) -> bool:
    """Whether the first start writes there."""
    return purpose == "models of ddtree" and facts.model is not None and facts.model.to_write


def _each(facts: Facts, gpus: Sequence[Mapping[str, Any]]) -> int | None:
    """MiB of weights on one card: all of them in the embedded engine, a share where SGLang spreads them."""
    total = weights(facts)
    usable = sum(gpu["usable"] for gpu in gpus) or 1
    return None if total is None else total if facts.asked.engine == "embedded" else -(-total // usable)


def _needed(purpose: str, facts: Facts) -> int:
    """MiB that will be written there."""
    fetching = [found for found in (facts.model, facts.drafter) if found and found.state == "to fetch"]
    if purpose == "models of ddtree":
        return sum(found.weights_mib or 0 for found in fetching) + 64
    return 512 if purpose == "compiled kernels" and facts.gpus else 64
