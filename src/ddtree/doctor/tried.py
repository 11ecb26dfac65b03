"""The imports that were tried, as rules read them: which failed of what, and of which earlier one."""

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ddtree.doctor.facts import Facts, Import

MODULES = {
    "sglang-kernel": "sgl_kernel", "sgl-kernel": "sgl_kernel", "flashinfer-python": "flashinfer",
    "apache-tvm-ffi": "tvm_ffi", "sglang": "sglang.srt.entrypoints.http_server",
}  # fmt: skip
PACKAGES_OF = {module: package for package, module in reversed(MODULES.items())} | {
    "ddtree.engine": "ddtree",
    "ddtree.models": "ddtree",
}
NO_MODULE = re.compile(r"No module named '?([\w.]+)")
NO_LIBRARY = re.compile(r"(lib[\w.+-]+\.so[\w.]*): cannot open shared object file")
BRIEF = 300  # characters of an error in a finding


def imports(facts: Facts) -> list[dict[str, Any]]:
    """The list `imports` of the view."""
    entries: list[dict[str, Any]] = []
    for tried in facts.imports:
        error = tried.error or ""
        package = PACKAGES_OF.get(tried.module, tried.module)
        module, library = NO_MODULE.search(error), NO_LIBRARY.search(error)
        cause = next((entry["module"] for entry in entries if _same(entry, tried)), None)
        entries.append(
            asdict(tried)
            | {
                "brief": brief(_crash(tried) if tried.signal else error) or None,
                "package": package,
                "version": facts.packages.get(package),
                "no_module": module[1] if module else None,
                "no_library": library[1] if library else None,
                "cause": cause,
            }
        )
    return entries


def _crash(tried: Import) -> str:
    """The signal, what Python says of it, and the innermost place."""
    text = tried.error or ""
    begin = text.find("Fatal Python error")
    lines = [line.strip() for line in text[max(begin, 0) :].splitlines()]
    kept = [line for line in lines if line and not line.startswith(("Current thread", "Thread 0x"))]
    return " ".join([f"ended by {tried.signal}", *(kept[:2] if begin >= 0 else kept[-1:])])


def _same(earlier: Mapping[str, Any], tried: Import) -> bool:
    """Whether an earlier import failed of the same: one signal, or the same last line of the error."""
    if earlier["ok"] or tried.ok or earlier["timed_out"] or tried.timed_out:
        return False
    if earlier["signal"] or tried.signal:
        return bool(earlier["signal"] == tried.signal)
    lines = [(text or "").strip().splitlines()[-1:] for text in (earlier["error"], tried.error)]
    return bool(lines[0]) and lines[0] == lines[1]


def brief(text: str | None, limit: int = BRIEF) -> str | None:
    """On one line, shortened in the middle."""
    if text is None:
        return None
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit // 2]} ... {line[-limit // 2 :]}"
