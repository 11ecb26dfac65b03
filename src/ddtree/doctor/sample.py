"""A machine with one of everything, on which the paths of every rule are tried before any machine is judged."""

from collections.abc import Mapping
from typing import Any

from ddtree.doctor import facts
from ddtree.doctor.derive import view
from ddtree.doctor.rules import LISTS, Rule, Tables


def scope(rule: Rule, seen: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the rule may name on a machine: `seen`, and the first item of the list that it goes through."""
    return {**seen, LISTS[rule.each]: seen[rule.each][0]} if rule.each else seen


def sample(tables: Tables) -> Mapping[str, Any]:
    """The view of such a machine. tables: with at least one library."""
    context = facts.Context(1, 1, 2, 2, 2)
    checkpoint = facts.Checkpoint("model", "here", "/model", "", 1, {}, "", "", 1, "", context=context)
    machine = facts.Facts(
        facts.Asked(engine="sglang"),
        facts.System(
            "3.12.0", "/python", "Linux", "x86_64", "2.39", 1, 1, 1, "gcc", True, "13.0", (1, 2),
            spaces=(facts.Space("temporary files", "/tmp", 1),), memory_total_mib=1,
        ),
        facts.Driver("ok", "580.1", "13.0", "", ("0000:01:00.0",), ()),
        facts.Port(1, True, ""),
        gpus=(facts.Gpu(0, "00000000:01:00.0", "card", "GPU-0", "9.0", 2, 1, 0, False, False, "Default", False),),
        torch=facts.Torch("2.11.0", "13.0", "", ("sm_90",), True, (facts.Device("card", "9.0", 2),), ""),
        packages={"sglang": "0", "wanted": "1"},
        requirements=(
            facts.Requirement("sglang", "wanted", "==2", "1"),
            facts.Requirement("ddtree", "other", ">=2", "1"),
        ),
        imports=(facts.Import("module", True, "", ""),),
        kernel=facts.Kernel("1", "13"),
        libraries={next(iter(tables.libraries)): False},
        model=checkpoint,
        drafter=checkpoint,
    )  # fmt: skip
    return view(machine, tables)
