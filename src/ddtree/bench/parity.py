"""Whether speculation changed a token: every mode against plain decoding, and half precision against float32."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ddtree.config import SamplingParams, Speculation
from ddtree.engine import Engine, Generation
from ddtree.tree import RoundState, chain

NEAR_TIE = 1e-4  # of a logit: float32 over 1 and over n rows may differ in the last bits
_ROWS = 64  # teacher-forced rows per forward


@dataclass(frozen=True)
class Difference:
    """The first token of one answer that is not plain decoding's."""

    prompt: int
    mode: str
    batch: int
    place: int
    expected: int
    found: int
    margin: float  # of the scores (logit plus noise is not counted: greedy only), float32; below NEAR_TIE it is a tie


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """The first place where two answers differ, or None."""
    if list(expected) == list(found):
        return None
    pairs = zip(expected, found, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))


def logits_along(engine: Engine, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """Teacher-forced logits [len(answer), V] float32: row i chose answer[i]."""
    target, ids = engine.target, [*prompt, *answer]
    cache = target.allocate(1, len(ids) + _ROWS)
    position = torch.zeros(1, dtype=torch.int64)
    rows = []
    with torch.inference_mode():
        if len(prompt) > 1:
            target.prefill(cache, torch.tensor([list(prompt[:-1])]), position)
            position += len(prompt) - 1
        while int(position) < len(ids) - 1:
            block = ids[int(position) : min(int(position) + _ROWS, len(ids) - 1)]
            state = RoundState.allocate(1, len(block), len(block) - 1)
            state.tokens[0, 0] = block[0]
            state.lay([chain(len(block) - 1)], [[[token] for token in block[1:]]])
            logits, _ = target.verify(cache, state.rows, position)
            rows.append(logits[0].float())
            position += len(block)  # a chain lies where a commit would put it
    return torch.cat(rows)


def regrets(engine: Engine, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """Per token of an answer: the float32 maximum minus the float32 logit of the token chosen.

    engine: one in float32; the answer may come from any.
    """
    logits = logits_along(engine, prompt, answer)
    chosen = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
    return [float(x) for x in logits.amax(1) - chosen]


def answers(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, speculation: Speculation, batch: int
) -> list[Generation]:
    """Decode prompts in batches of `batch`; prompt i has the seed params.seed + i in every mode."""
    found: list[Generation] = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        seeds = [replace(params, seed=(params.seed or 0) + start + i) for i in range(len(part))]
        found += engine.generate(part, seeds, speculation)
    return found


def compare_modes(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    speculations: Sequence[Speculation],
    batches: Sequence[int] = (1, 4),
    on_run: Callable[[dict[str, Any]], None] = lambda run: None,
) -> dict[str, Any]:
    """Decode every prompt in every mode, alone and in batches, and compare with `ar` alone.

    on_run is called with each run's part of the report as it ends.
    Returns: answers (ar's ids), per run rounds, acceptance_length, equal (answers equal to ar's) and differences.
    """
    plain = answers(engine, prompts, params, Speculation(mode="ar"), 1)
    runs = []
    for speculation in speculations:
        for batch in batches:
            found = answers(engine, prompts, params, speculation, batch)
            pairs = list(zip(plain, found, strict=True))
            differences = [
                _difference(engine, i, prompts[i], a.token_ids, b.token_ids, speculation.mode, batch, params)
                for i, (a, b) in enumerate(pairs)
                if a.token_ids != b.token_ids
            ]
            rounds = sum(g.rounds for g in found)
            accepted = sum((g.acceptance_length or 0.0) * g.rounds for g in found)
            runs.append(
                {
                    "mode": speculation.mode,
                    "batch": batch,
                    "tree_budget": speculation.tree_budget,
                    "rounds": rounds,
                    "acceptance_length": accepted / rounds if rounds else None,
                    "equal": sum(a.token_ids == b.token_ids for a, b in pairs),
                    "differences": [asdict(d) for d in differences],
                    "shadow_agree": None
                    if found[0].shadow is None
                    else all(g.shadow and g.shadow.agree for g in found),
                }
            )
            on_run(runs[-1])
    return {"prompts": len(prompts), "answers": [g.token_ids for g in plain], "runs": runs}


def _difference(
    engine: Engine,
    index: int,
    prompt: Sequence[int],
    expected: Sequence[int],
    found: Sequence[int],
    mode: str,
    batch: int,
    params: SamplingParams,
) -> Difference:
    """Describe the first differing token; its margin is that of the two tokens' logits (greedy)."""
    place = first_difference(expected, found)
    assert place is not None
    a = expected[place] if place < len(expected) else -1
    b = found[place] if place < len(found) else -1
    margin = float("nan")
    if params.temperature == 0 and a >= 0 and b >= 0:
        logits = logits_along(engine, prompt, expected[: place + 1])[-1]
        margin = float(logits[a] - logits[b])
    return Difference(index, mode, batch, place, a, b, margin)
