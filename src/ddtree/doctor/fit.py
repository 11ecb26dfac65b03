"""What the embedded engine takes at the least: weights, and the keys and values of every slot. Numbers alone, no torch.

The sum is that of the engine's own plan (`engine.memory.Planner`), in 16 bits and without logits, masks and the like: a
lower bound. What does not fit here is refused at the start; what fits here may still be.
"""

from collections.abc import Callable
from typing import Any

from ddtree.config import DEFAULT_MAX_BUDGET
from ddtree.doctor.facts import Checkpoint, Facts
from ddtree.plan import MIB, NAMES, Load, Memory, MemoryPlan, Part, advice

HALF = 2  # bytes of a number of 16 bits; the engine computes in no fewer


def weights(facts: Facts) -> int | None:
    """MiB of both models' weights; None where the target's are not known."""
    if facts.model is None or facts.model.weights_mib is None or facts.model.state != "here":
        return None
    drafter = facts.drafter.weights_mib if facts.drafter else 0
    return facts.model.weights_mib + (drafter or 0)


def needs(facts: Facts) -> dict[str, Any]:
    """What rules may say of memory: MiB of weights, of contexts and of both, and the sum in words.

    What is not known is None; contexts are those of the embedded engine alone.
    """
    found: dict[str, Any] = {"weights_mib": weights(facts)}
    load, planner = load_of(facts), planner_of(facts)
    if load is None or planner is None or facts.model is None or facts.model.context is None:
        return found | dict.fromkeys(("contexts_mib", "least_mib", "sum", "model_len", "longest"))
    plan = planner(load)
    contexts = sum(part.size for part in plan.parts if part.name.endswith("_context"))
    rounded = sum(part.name.endswith("_weights") for part in plan.parts)  # MiB: each was rounded up
    return found | {
        "contexts_mib": contexts // MIB,
        "least_mib": plan.total // MIB - rounded,
        "sum": "; ".join(map(str, plan.parts)),
        "model_len": facts.asked.max_model_len,
        "longest": facts.model.context.longest,
    }


def lower(facts: Facts, room_mib: int | None) -> str | None:
    """Which options to lower so that the sum is no more than the room; None where it is not, or is not known."""
    load, planner = load_of(facts), planner_of(facts)
    if load is None or planner is None or room_mib is None:
        return None
    memory = Memory("it", room_mib * MIB, room_mib * MIB)
    if planner(load).total <= memory.free:
        return None
    text, param = advice(planner, load, memory, load.budget)
    for name in NAMES.values():
        text = text.replace(name, f"--{name.replace('_', '-')}")
    return text if param is None else f"{text} (or less: rounds take memory too)"


def load_of(facts: Facts) -> Load | None:
    """What is asked for, with the engine's own defaults; None for another engine, and where the model is not known."""
    asked, model = facts.asked, facts.model
    if asked.engine != "embedded" or model is None or model.context is None:
        return None
    longest = model.context.longest
    context = min(asked.max_model_len or longest, longest)
    return Load(asked.max_running_requests, context, asked.max_tree_budget or DEFAULT_MAX_BUDGET)


def planner_of(facts: Facts) -> Callable[[Load], MemoryPlan] | None:
    """The parts that are counted, for any load; None where the model's sizes are not known."""
    model, drafter = facts.model, facts.drafter
    if weights(facts) is None or model is None or model.context is None:
        return None
    block = drafter.context.block if drafter and drafter.context else 0
    depths = max(block - 1, 0)

    def plan(load: Load) -> MemoryPlan:
        slots, length = load.requests + 1, load.context + max(1 + depths + load.budget, block)
        found = [("target", model), *([("drafter", drafter)] if drafter else [])]
        sizes = [Part(f"{name}_weights", (one.weights_mib or 0) * MIB) for name, one in found]
        note = f"{slots} slots of {length} positions"
        sizes += [Part(f"{name}_context", slots * length * _position(one), note) for name, one in found]
        return MemoryPlan(tuple(part for part in sizes if part.size))

    return plan


def _position(found: Checkpoint) -> int:
    """Bytes of the keys and values of one position, all layers; 0 where they are not known."""
    of = found.context
    return of.layers * 2 * of.kv_heads * of.head_dim * HALF if of else 0
