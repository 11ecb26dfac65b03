"""Memory, planned before it is taken: what each part takes, and whether the device has it. A leaf: numbers alone."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ddtree.errors import InvalidOption

log = logging.getLogger("ddtree.engine")

MIB, GIB = 2**20, 2**30
SHORTEST_CONTEXT = 128  # tokens; advice to serve less would be of no use


def in_words(size: int) -> str:
    """Bytes as people read them."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"


@dataclass(frozen=True)
class Load:
    """What an operator may lower where memory is short."""

    requests: int  # max_running_requests
    context: int  # max_model_len, tokens
    budget: int  # max_tree_budget, nodes


NAMES = {"requests": "max_running_requests", "context": "max_model_len", "budget": "max_tree_budget"}


@dataclass(frozen=True)
class Part:
    """One line of a plan."""

    name: str  # a key: words_with_lines_between
    size: int  # bytes
    note: str = ""  # for people: how much of what
    there: bool = False  # taken already

    def __str__(self) -> str:
        note = f": {self.note}" if self.note else ""
        return f"{in_words(self.size)} {self.name.replace('_', ' ')}{note}"


@dataclass(frozen=True)
class MemoryPlan:
    """The parts that an engine's memory is made of at its fullest, in bytes."""

    parts: tuple[Part, ...]

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(part.size for part in self.parts)

    @property
    def there(self) -> int:
        """Bytes that are taken already."""
        return sum(part.size for part in self.parts if part.there)

    def facts(self) -> dict[str, int]:
        """Bytes by part, and in all, as plain values."""
        return {part.name: part.size for part in self.parts} | {"total": self.total}

    def __str__(self) -> str:
        """The sum, line by line."""
        return "".join(f"\n  {part};" for part in self.parts) + f"\n  {in_words(self.total)} in all"


@dataclass(frozen=True)
class Memory:
    """What a device has, in bytes."""

    where: str
    free: int  # beside what is taken already
    total: int
    lazy: bool = False  # pages are taken as they are written: what is not free yet may be when it is asked for

    def room(self, plan: MemoryPlan) -> int:
        """The most that a plan may come to, what is there already counted."""
        return self.total if self.lazy else self.free + plan.there


def fit(plan_of: Callable[[Load], MemoryPlan], load: Load, memory: Memory | None, least_budget: int = 1) -> MemoryPlan:
    """The plan of a load, if the device has the memory; memory: None where nobody knows what it has.

    Args:
        plan_of: grows with each number of a load.
        least_budget: no smaller budget is advised.
    Raises InvalidOption with the sum, and with values that would fit.
    """
    plan = plan_of(load)
    if memory is None:
        return plan
    if plan.total > memory.room(plan):
        words, param = advice(plan_of, load, memory, least_budget)
        raise InvalidOption(
            f"the planned memory does not fit: {in_words(plan.total)} of the {in_words(memory.room(plan))} that"
            f" {memory.where} has for it:{plan}; {words}",
            param=param,
        )
    if plan.total - plan.there > memory.free:  # of memory that is taken lazily
        log.warning(
            "the planned memory, %s, is more than the %s that are free now on %s: it suffices only if other programs"
            " give theirs back, or contexts stay short%s",
            in_words(plan.total - plan.there), in_words(memory.free), memory.where, plan,
        )  # fmt: skip
    return plan


def advice(
    plan_of: Callable[[Load], MemoryPlan], load: Load, memory: Memory, least_budget: int
) -> tuple[str, str | None]:
    """What to lower where a load does not fit, and the first option of it: each alone if that suffices, else together.

    The option is None where lowering does not suffice. Arguments as of `fit`.
    """

    def fits(load: Load) -> bool:
        plan = plan_of(load)
        return plan.total <= memory.room(plan)

    def lowered(load: Load, name: str) -> int | None:
        low, high = getattr(least, name), getattr(load, name)
        return _largest(lambda value: fits(replace(load, **{name: value})), low, high)

    least = Load(1, min(SHORTEST_CONTEXT, load.context), min(least_budget, load.budget))
    found = [(said, value) for name, said in NAMES.items() if (value := lowered(load, name)) is not None]
    if found:
        return "lower " + ", or ".join(f"{name} to {value}" for name, value in found), found[0][0]
    context = lowered(replace(least, context=load.context), "context")
    if context is None:
        return "not even one request fits: use a smaller model or dtype, or another device", None
    budget = f", max_tree_budget to {least.budget}" if least.budget < load.budget else ""
    return f"lower max_running_requests to 1{budget} and max_model_len to {context}", "max_model_len"


def _largest(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest number from low to high that fits; None where low does not."""
    if not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def machine_memory(root: Path = Path("/")) -> Memory | None:
    """What this machine has for this process: /proc/meminfo, and the limits of its control groups.

    root: where `proc` and `sys` lie. Returns: None where the system does not tell.
    """
    known = _numbers(root / "proc/meminfo")
    if "MemTotal" not in known:
        return None
    total, free = known["MemTotal"] * 1024, known.get("MemAvailable", known["MemTotal"]) * 1024
    for limit, used in _limits(root):
        total, free = min(total, limit), min(free, max(limit - used, 0))
    return Memory("this machine", free, total, lazy=True)


# By the controllers that a line of /proc/self/cgroup names: where the groups lie, and their files (versions 2 and 1).
_GROUPS = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of this process's groups and those around them, as far as they have a limit."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in _GROUPS:
            continue
        base, limit_file, used_file = _GROUPS[controllers]
        group = Path(path.strip("/"))
        for inner in (group, *group.parents):
            folder = root / base / inner
            limit, used = _text(folder / limit_file).strip(), _text(folder / used_file).strip()
            if limit.isdecimal() and used.isdecimal():
                files = _numbers(folder / "memory.stat")  # cached files give way
                yield int(limit), int(used) - files.get("inactive_file", 0) - files.get("active_file", 0)


def _numbers(path: Path) -> dict[str, int]:
    """Lines such as "MemTotal:  1024 kB" or "active_file 4096"."""
    words = [line.split() for line in _text(path).splitlines()]
    return {line[0].rstrip(":"): int(line[1]) for line in words if len(line) > 1 and line[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
