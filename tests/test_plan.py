"""Memory plans: the sum, what is refused, and advice that really fits; what a machine says it has."""

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.errors import InvalidOption
from ddtree.plan import GIB, Load, Memory, MemoryPlan, Part, fit, machine_memory

FIELDS = {"max_running_requests": "requests", "max_model_len": "context", "max_tree_budget": "budget"}
LOAD = Load(requests=8, context=4096, budget=64)


def plan_of(load: Load) -> MemoryPlan:
    """Weights of 1 GiB, half a MiB a position, 8 MiB a row of a round."""
    return MemoryPlan(
        (
            Part("target_weights", GIB, "loaded already", there=True),
            Part("target_context", load.requests * (load.context + load.budget) * 2**19, "so many positions"),
            Part("states", load.requests * (1 + load.budget) * 2**23),
        )
    )


def test_a_plan_that_fits_is_given_back():
    plan = fit(plan_of, LOAD, Memory("here", free=plan_of(LOAD).total - GIB, total=1))
    assert plan == plan_of(LOAD)
    assert plan.facts() == {
        "target_weights": GIB, "target_context": 8 * 4160 * 2**19, "states": 8 * 65 * 2**23, "total": plan.total,
    }  # fmt: skip
    assert plan.there == GIB
    assert fit(plan_of, LOAD, None) == plan, "where nobody knows what there is"


def test_a_plan_that_does_not_fit_is_refused_with_its_sum_line_by_line():
    with pytest.raises(InvalidOption) as caught:
        fit(plan_of, LOAD, Memory("cuda:0", free=10 * GIB, total=80 * GIB))
    assert str(caught.value).split("; lower")[0].splitlines() == [
        "the planned memory does not fit: 21.31 GiB of the 11.00 GiB that cuda:0 has for it:",
        "  1.00 GiB target weights: loaded already;",
        "  16.25 GiB target context: so many positions;",
        "  4.06 GiB states;",
        "  21.31 GiB in all",
    ]
    assert str(caught.value).endswith("; lower max_running_requests to 3, or max_model_len to 1456")
    assert caught.value.param == "max_running_requests"


def advised(message: str) -> list[dict[str, int]]:
    """What a refusal says would do: alternatives, each by field."""
    said = message.rpartition("; lower ")[2]
    ways = said.split(", or ") if ", or " in said or " and " not in said else [said]
    found = []
    for way in ways:
        pairs = [pair.split(" to ") for pair in way.replace(" and ", ", ").split(", ")]
        found.append({FIELDS[name]: int(value) for name, value in pairs})
    return found


@given(
    requests=st.integers(1, 40), context=st.integers(2, 9000), budget=st.integers(1, 300), least=st.integers(1, 40),
    free=st.integers(0, 40 * 1024), lazy=st.booleans(),
)  # fmt: skip
def test_what_is_advised_fits_and_nothing_more_does(requests, context, budget, least, free, lazy):
    load, memory = Load(requests, context, budget), Memory("here", free * 2**20, free * 2**20, lazy)

    def fits(load: Load) -> bool:
        return plan_of(load).total <= memory.room(plan_of(load))

    try:
        assert fit(plan_of, load, memory, least) == plan_of(load)
        assert fits(load)
        return
    except InvalidOption as error:
        message = str(error)
    assert not fits(load)
    if "not even one" in message:
        assert not fits(Load(1, min(context, 128), min(least, budget)))
        return
    for way in advised(message):
        lowered = Load(**{"requests": requests, "context": context, "budget": budget} | way)
        assert fits(lowered)
        assert lowered.budget >= min(least, budget)
        if len(way) == 1:
            (name, value), *_ = way.items()
            assert not fits(Load(**{**vars(load), name: value + 1}))


def test_where_nothing_alone_suffices_all_are_lowered():
    with pytest.raises(InvalidOption, match=r"lower max_running_requests to 1, max_tree_budget to 4 and max_model_len"):
        fit(plan_of, Load(64, 40960, 64), Memory("here", 2**28, 0), least_budget=4)
    with pytest.raises(InvalidOption, match="not even one request fits: use a smaller model") as caught:
        fit(plan_of, LOAD, Memory("here", 2**25, 0))
    assert caught.value.param is None


def test_on_a_machine_that_gives_pages_when_they_are_written_only_the_total_counts(caplog):
    memory = Memory("this machine", free=2 * GIB, total=22 * GIB, lazy=True)
    with caplog.at_level(logging.WARNING, "ddtree.engine"):
        assert fit(plan_of, LOAD, memory) == plan_of(LOAD)
    assert "20.31 GiB, is more than the 2.00 GiB that are free now on this machine" in caplog.text
    assert "16.25 GiB target context" in caplog.text
    caplog.clear()
    fit(plan_of, LOAD, Memory("this machine", free=21 * GIB, total=22 * GIB, lazy=True))
    assert not caplog.text
    with pytest.raises(InvalidOption, match=r"does not fit: 21\.31 GiB of the 21\.00 GiB that this machine has"):
        fit(plan_of, LOAD, Memory("this machine", free=GIB, total=21 * GIB, lazy=True))


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\nHugePages_Total:  0\n"


def test_what_a_machine_has(tmp_path):
    assert machine_memory(tmp_path) is None, "no /proc"
    write(tmp_path, proc__meminfo=MEMINFO)
    assert machine_memory(tmp_path) == Memory("this machine", 8 * GIB, 16 * GIB, lazy=True)


def test_control_groups_limit_it_with_what_lies_around_them(tmp_path):
    write(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/outer/inner\n")
    groups = tmp_path / "sys/fs/cgroup"
    (groups / "outer/inner").mkdir(parents=True)
    (groups / "outer/inner/memory.max").write_text("max\n")
    (groups / "outer/inner/memory.current").write_text("5\n")
    assert machine_memory(tmp_path) == Memory("this machine", 8 * GIB, 16 * GIB, lazy=True)
    (groups / "outer/memory.max").write_text(f"{4 * GIB}\n")
    (groups / "outer/memory.current").write_text(f"{3 * GIB}\n")
    (groups / "outer/memory.stat").write_text(f"anon 7\nactive_file {GIB // 2}\ninactive_file {GIB // 4}\n")
    assert machine_memory(tmp_path) == Memory("this machine", int(1.75 * GIB), 4 * GIB, lazy=True)
    (groups / "outer/memory.current").write_text(f"{9 * GIB}\n")
    assert machine_memory(tmp_path) == Memory("this machine", 0, 4 * GIB, lazy=True)


def test_control_groups_of_the_first_version(tmp_path):
    write(
        tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="9:name=systemd:/\n4:memory:/box\n2:cpu:/\n0::/\n",
        sys__fs__cgroup__memory__box__placeholder="",
    )  # fmt: skip
    box = tmp_path / "sys/fs/cgroup/memory/box"
    (box / "memory.limit_in_bytes").write_text(f"{6 * GIB}\n")
    (box / "memory.usage_in_bytes").write_text(f"{GIB}\n")
    (box.parent / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (box.parent / "memory.usage_in_bytes").write_text(f"{2 * GIB}\n")
    assert machine_memory(tmp_path) == Memory("this machine", 5 * GIB, 6 * GIB, lazy=True)


def test_this_machine_has_some():
    memory = machine_memory()
    assert memory is None or 0 < memory.free <= memory.total
