"""From samples to figures: the one JSON document of a bench run. No measuring here, and nothing printed."""

import platform
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ddtree.bench.suite import CATEGORIES, Plan
from ddtree.config import Speculation

if TYPE_CHECKING:
    from ddtree.bench.run import Sample

BASELINE = "ar"
CHAIN = "linear"
EXACT_DTYPE = "float32"  # where every mode must give the tokens of plain decoding


def make_report(
    samples: Sequence["Sample"],
    stages: dict[str, dict[str, float]],
    plan: Plan,
    base: Speculation,
    info: dict[str, Any],
) -> dict[str, Any]:
    """The document of a run: `modes: {NAME: figures}`, the engine's `info`, and the settings that made the figures.

    `parity` is "equal" (every mode gave ar's tokens), "differs" (a 16-bit type, where near-ties may flip), "red" (a
    difference in float32, or a tree in shadow-linear that disagreed) or None (ar did not run). While it is red every
    `speedup` is None.
    """
    by_variant = {name: [sample for sample in samples if sample.variant == name] for name in plan.variants}
    modes = {name: _figures(own) | {"stages_ms": stages.get(name, {})} for name, own in by_variant.items()}
    for name, own in by_variant.items():
        if own[0].generation.shadow is not None:
            modes[name]["shadow"] = _shadow(own, by_variant.get(CHAIN))
        modes[name] |= _against_baseline(own, by_variant.get(BASELINE))
    parity = _parity(modes, str(info.get("dtype")))
    if parity == "red":
        for figures in modes.values():
            figures["speedup"] = figures["speedup_median"] = None
    return {
        "modes": modes,
        **info,
        "cpu": cpu_name(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "max_tokens": plan.sampling.max_tokens,
        "temperature": plan.sampling.temperature,
        "seed": plan.sampling.seed,
        "tree_budget": base.tree_budget,
        "tree_top_k": base.tree_top_k,
        "tree_spine": base.tree_spine,
        "tree_context": info.get("tree_context", base.tree_context),
        "prompts": len(plan.prompts),
        "repeat": plan.repeat,
        "parity": parity,
    }


def _figures(samples: Sequence["Sample"]) -> dict[str, Any]:
    """What one variant did, on its own: pooled speeds, and medians over prompts where a name says ms."""
    groups = _by_prompt(samples).values()
    rounds = [round_ms for group in groups if (round_ms := _round_ms(group)) is not None]
    categories = [name for name in CATEGORIES if any(sample.prompt.category == name for sample in samples)]
    return {
        "tok_s": _rounded(_tok_s(samples)),
        "acceptance_length": _pooled((s.generation.acceptance_length, s.generation.rounds) for s in samples),
        "ms_per_round": _rounded(median(rounds) if rounds else None),
        "prefill_ms": _rounded(median(1000 * sample.generation.prefill_seconds for sample in samples)),
        "tokens": sum(len(sample.generation.token_ids) for sample in samples),
        "rounds": sum(sample.generation.rounds for sample in samples),
        "prompts": len(groups),
        "tok_s_by_category": {
            name: _rounded(_tok_s([s for s in samples if s.prompt.category == name])) for name in categories
        },
    }


def _against_baseline(samples: Sequence["Sample"], baseline: "Sequence[Sample] | None") -> dict[str, Any]:
    """Speed-ups over plain decoding of the same run, and on how many prompts every token is the same."""
    if baseline is None:
        return {"speedup": None, "speedup_median": None, "matches_ar": None, "mismatches": None}
    own, other = _by_prompt(samples), _by_prompt(baseline)
    ratios = [ratio for key in own if (ratio := _ratio(_tok_s(own[key]), _tok_s(other[key]))) is not None]
    differing = [key for key in own if _token_ids(own[key]) != _token_ids(other[key])]
    return {
        "speedup": _rounded(_ratio(_tok_s(samples), _tok_s(baseline))),
        "speedup_median": _rounded(median(ratios) if ratios else None),
        "matches_ar": len(own) - len(differing),
        "mismatches": differing,
    }


def _shadow(samples: Sequence["Sample"], chain: "Sequence[Sample] | None") -> dict[str, Any]:
    """Shadow-linear's account: both acceptance lengths, and its round against linear's of the same prompt."""
    shadows = [(sample.generation.shadow, sample.generation.rounds) for sample in samples]
    found = [(shadow, rounds) for shadow, rounds in shadows if shadow is not None]
    answers = [shadow.agree for shadow, _ in found if shadow.agree is not None]
    own, other = _by_prompt(samples), _by_prompt(chain or ())
    ratios = [
        ratio
        for key in own
        if key in other and (ratio := _ratio(_round_ms(own[key]), _round_ms(other[key]))) is not None
    ]
    return {
        "linear_acceptance_length": _pooled((shadow.linear_acceptance_length, rounds) for shadow, rounds in found),
        "tree_acceptance_length": _pooled((shadow.tree_acceptance_length, rounds) for shadow, rounds in found),
        "agree": all(answers) if answers else None,
        "overhead": _rounded(median(ratios) if ratios else None),
    }


def _parity(modes: dict[str, dict[str, Any]], dtype: str) -> str | None:
    exact = dtype.removeprefix("torch.") == EXACT_DTYPE
    disagreed = any(figures.get("shadow", {}).get("agree") is False for figures in modes.values())
    differs = any(figures["mismatches"] for figures in modes.values())
    if exact and (disagreed or differs):
        return "red"
    if BASELINE not in modes:
        return None
    return "differs" if differs else "equal"


def _by_prompt(samples: Iterable["Sample"]) -> dict[str, list["Sample"]]:
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt.id, []).append(sample)
    return groups


def _token_ids(samples: Sequence["Sample"]) -> list[list[int]]:
    return [sample.generation.token_ids for sample in samples]


def _tok_s(samples: Sequence["Sample"]) -> float | None:
    """Tokens a second of decoding, pooled. The first token of an answer comes from the prefill, and is not counted."""
    tokens = sum(max(len(sample.generation.token_ids) - 1, 0) for sample in samples)
    return _ratio(tokens, sum(sample.generation.decode_seconds for sample in samples))


def _round_ms(samples: Sequence["Sample"]) -> float | None:
    seconds = sum(sample.generation.decode_seconds for sample in samples)
    return _ratio(1000 * seconds, sum(sample.generation.rounds for sample in samples))


def _pooled(pairs: Iterable[tuple[float | None, int]]) -> float | None:
    """The mean of the values weighted by their rounds: sum of (accepted + 1) over all rounds / rounds."""
    known = [(value, rounds) for value, rounds in pairs if value is not None]
    return _rounded(_ratio(sum(value * rounds for value, rounds in known), sum(rounds for _, rounds in known)))


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or not under else over / under


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def cpu_name() -> str:
    """The processor's name as the system tells it, or its architecture where it tells none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
