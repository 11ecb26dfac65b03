"""What a fault is: a rule, a machine that it finds, and the nearest one that is sound."""

from collections.abc import Callable
from dataclasses import dataclass

from ddtree.doctor import Facts
from machines import with_card, with_torch, with_xid

LOST = {"problem": 'nvidia-smi: "Unable to determine the device handle for GPU3: 0000:13:00.0: GPU is lost"',
        "name": None, "capability": None, "memory_mib": None, "free_mib": None}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A rule, a machine that it finds, and the nearest one that is sound."""

    rule: str
    broken: Callable[[], Facts]
    sound: Callable[[], Facts]
    level: str = "fail"
    says: tuple[str, ...] = ()
    also: tuple[str, ...] = ()  # other findings that belong to the same machine
    neighbour: tuple[str, ...] = ()  # findings of other kinds that the neighbour rightly has


def lost(facts: Facts) -> Facts:
    """The fourth of eight cards does not answer; torch says that there is none at all."""
    broken = with_xid(with_card(facts, 3, **LOST), 79, 3)
    return with_torch(broken, available=False, devices=(), said="CUDA unknown error")
