"""Plain text tables, for the report of a bench run and for any other list."""

from collections.abc import Sequence
from typing import Any

from ddtree.bench.suite import CATEGORIES


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Columns as wide as their widest cell: those in `left` to the left, the others (figures) to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.ljust(widths[column]) if column in left else cell.rjust(widths[column])
            for column, cell in enumerate(row)
        )
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, (head, *rows)))


def format_report(report: dict[str, Any]) -> str:
    """The document of `make_report` for a reader: settings, modes, categories, stages, shadow-linear, parity."""
    modes: dict[str, dict[str, Any]] = report["modes"]
    categories = [name for name in CATEGORIES if any(name in m["tok_s_by_category"] for m in modes.values())]
    by_category = [
        [name, *(_cell(m["tok_s_by_category"].get(category)) for category in categories)] for name, m in modes.items()
    ]
    stages = list(dict.fromkeys(stage for m in modes.values() for stage in m["stages_ms"]))
    by_stage = [[name, *(_cell(m["stages_ms"].get(stage), 2) for stage in stages)] for name, m in modes.items()]
    parts = [
        _settings(report),
        _modes_table(modes),
        "tok/s by category\n" + format_table(["mode", *categories], by_category),
    ]
    if stages:
        parts.append("ms a round by stage, from a short pass of its own\n" + format_table(["mode", *stages], by_stage))
    parts += [_shadow_line(name, m["shadow"]) for name, m in modes.items() if "shadow" in m]
    return "\n\n".join([*parts, _parity_line(report)])


def _settings(report: dict[str, Any]) -> str:
    return "\n".join(
        (
            "{model}, drafter {drafter}, {device}, {dtype}, {threads} threads, {cpu}".format_map(report),
            "{prompts} prompts x {repeat}, up to {max_tokens} tokens, temperature {temperature:g}, "
            "budget {tree_budget}, top-k {tree_top_k}, spine {tree_spine}, context {tree_context}".format_map(report),
        )
    )


def _modes_table(modes: dict[str, dict[str, Any]]) -> str:
    columns = {"tok/s": ("tok_s", 1), "speed-up": ("speedup", 2), "(median)": ("speedup_median", 2)}
    columns |= {"accepted": ("acceptance_length", 2), "ms/round": ("ms_per_round", 1), "prefill ms": ("prefill_ms", 1)}
    rows = [
        [name, *(_cell(m[key], digits) for key, digits in columns.values()), str(m["tokens"]), _equal(m)]
        for name, m in modes.items()
    ]
    return format_table(["mode", *columns, "tokens", "equal to ar"], rows)


def _shadow_line(name: str, shadow: dict[str, Any]) -> str:
    return (
        f"{name}: linear accepts {_cell(shadow['linear_acceptance_length'], 2)}, a tree from the same roots "
        f"{_cell(shadow['tree_acceptance_length'], 2)} (a real tree run visits other roots); "
        f"round {_cell(shadow['overhead'], 2)} times linear's; tree's tokens agree: {shadow['agree']}"
    )


def _parity_line(report: dict[str, Any]) -> str:
    match report["parity"]:
        case "equal":
            return "parity: every mode gave ar's tokens on every prompt."
        case "differs":
            return f"parity: some answers differ from ar's: in {report['dtype']} near-ties may flip, in float32 never."
        case "red":
            wrong = [
                name
                for name, m in report["modes"].items()
                if m["mismatches"] or m.get("shadow", {}).get("agree") is False
            ]
            return f"parity: RED. In float32 answers of {', '.join(wrong)} differ from ar's, so no speed-up is shown."
    return "parity: not measured, ar did not run; no speed-up either."


def _equal(figures: dict[str, Any]) -> str:
    return "-" if figures["matches_ar"] is None else f"{figures['matches_ar']}/{figures['prompts']}"


def _cell(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
