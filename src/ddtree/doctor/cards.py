"""The cards of a machine, with what follows from torch, the environment and the kernel's log for each of them."""

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ddtree.doctor.facts import Facts, Gpu
from ddtree.doctor.rules import Tables


def cards(facts: Facts, tables: Tables) -> list[dict[str, Any]]:
    """The list `gpus` of the view: nvidia-smi's cards or, in a container without it, those of torch."""
    found = facts.gpus
    devices = facts.torch.devices if facts.torch else ()
    if not found and facts.driver.smi != "failed":
        found = tuple(
            Gpu(index, None, device.name, None, device.capability, device.memory_mib)
            for index, device in enumerate(devices)
        )
    # torch's own list holds only what may be seen, and counts anew
    shown = facts.system.environment.get("CUDA_VISIBLE_DEVICES") if facts.gpus else None
    visible = [_visible(card, shown) for card in found]
    usable = [seen and card.problem is None for card, seen in zip(found, visible, strict=True)]
    archs = facts.torch.archs if facts.torch and facts.torch.cuda else ()
    xids = {xid.bus_id: xid for xid in facts.driver.xids or ()}
    entries = []
    for place, card in enumerate(found):
        sm = _sm(card.capability)
        xid = xids.get(card.bus_id or "")
        rest = [str(other.index) for other, good in zip(found, usable, strict=True) if good and other is not card]
        entries.append(
            asdict(card)
            | {
                "sm": sm,
                "title": f"GPU {card.index if card.index is not None else card.bus_id}"
                + (f" ({card.name})" if card.name else ""),
                "visible": visible[place],
                "usable": usable[place],
                "first": usable[place] and not any(usable[:place]),
                "covered": covered(sm, archs),
                "xid": xid.code if xid else None,
                "xid_text": f"Xid {xid.code} {xid.text}".strip() if xid else "no Xid in the kernel's log"
                if facts.driver.xids is not None else "the kernel's log could not be read",
                "xid_meaning": tables.xids.get(xid.code) if xid else None,
                "rest": ",".join(rest),
                "process_list": _listed(card),
                "process_count": len(card.processes),
                "unseen_mib": _unseen(card),
            }
        )  # fmt: skip
    return entries


def covered(sm: int | None, archs: Sequence[str]) -> bool | None:
    """Whether a build for these architectures runs on a card: machine code of its family, or PTX of an older one."""
    if sm is None or not archs:
        return None
    for arch in archs:
        found = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", arch)
        if not found:
            continue
        number, exact = int(found[2]), found[3] == "a"
        same_family = number // 10 == sm // 10 and number <= sm
        if sm == number or (not exact and (same_family or (found[1] == "compute" and number <= sm and not found[3]))):
            return True
    return False


def _visible(card: Gpu, shown: str | None) -> bool:
    if shown is None:
        return True
    names = [name.strip() for name in shown.split(",") if name.strip()]
    return any(
        name == str(card.index)
        or bool(card.uuid and len(name) > 4 and card.uuid.startswith(name))
        or (name.startswith("MIG-") and card.mig is True)  # a part of a card, whose number is not told here
        for name in names
    )


def _listed(card: Gpu) -> str | None:
    listed = (f"{program.name} (pid {program.pid}, {program.memory_mib} MiB)" for program in card.processes)
    return ", ".join(listed) or None


def _unseen(card: Gpu) -> int | None:
    if card.memory_mib is None or card.free_mib is None:
        return None
    return card.memory_mib - card.free_mib - sum(process.memory_mib or 0 for process in card.processes)


def _sm(capability: str | None) -> int | None:
    found = re.fullmatch(r"(\d+)\.(\d)", capability or "")
    return int(found[1]) * 10 + int(found[2]) if found else None
