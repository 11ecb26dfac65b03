"""Figures of SGLang servers: acceptance by our definition, paired ratios, float32 regret, and our own engine's."""

import gc
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

Ids = list[int]
Pairs = Sequence[tuple[Ids, Ids]]  # prompt and answer


def acceptance(meta: dict[str, Any]) -> float | None:
    """Tokens a round, the bonus included; SGLang's own spec_accept_length counts the prefill's token too."""
    rounds = meta.get("spec_verify_ct")
    return 1 + meta["spec_num_correct_drafts"] / rounds if rounds else None


def interval(values: Sequence[float]) -> list[float]:
    """Median, and the 95% interval of medians of resampled turns."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return [round(x, 4) for x in (statistics.median(values), medians[50], medians[-51])]


def step_ms(seconds: Sequence[float], first: Sequence[float], rounds: Sequence[int]) -> float:
    """Milliseconds of a round: whole requests less requests of one token, over the rounds."""
    return 1000 * (sum(seconds) - sum(first)) / sum(rounds)


def ratios(mine: dict[str, list[float]], base: dict[str, list[float]]) -> dict[str, list[float]]:
    """By level, mine over base, paired by turn."""
    pairs = {level: list(zip(rates, base.get(level, []), strict=False)) for level, rates in mine.items()}
    return {level: interval([a / b for a, b in found]) for level, found in pairs.items() if found}


def regrets(target: str, judged: dict[str, Pairs], device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """By name: how far tokens are below the float32 argmax of the target, in logits; transformers computes it."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).to(device).eval()
    kept: dict[tuple[int, ...], list[float]] = {}  # servers often say the same
    for name, pairs in judged.items():
        worst = []
        for prompt, answer in pairs:
            key = (*prompt, -1, *answer)
            if key not in kept:
                kept[key] = _regret(model, prompt, answer, device)
            worst.append(max(kept[key], default=0.0))
        every = [value for pair in pairs for value in kept[(*pair[0], -1, *pair[1])]]
        yield (
            name,
            {
                "largest": round(max(worst, default=0.0), 5),
                "prompts": len(worst),
                "prompts_off_argmax": sum(value > 0 for value in worst),
                "tokens": len(every),
                "tokens_off_argmax": sum(value > 0 for value in every),
            },
        )


def _regret(model: Any, prompt: Ids, answer: Ids, device: str) -> list[float]:
    ids = torch.tensor([[*prompt, *answer]], device=device)
    with torch.inference_mode():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(answer, device=device).unsqueeze(1)).squeeze(1)
    return [float(value) for value in logits.amax(-1) - chosen]


def ours(
    target: str,
    drafter: str,
    dtype: str,
    pairwise: str,
    modes: dict[str, tuple[str, int]],
    prompts: Sequence[Ids],
    tokens: int,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Our own engine on the same prompts. modes: server's name -> our mode and budget; top-k 8, the plug-in's.

    What the plug-in does not have is off: contexts, drafts of the most frequent tokens. pairwise: on or off.
    """
    if not modes:
        return
    from ddtree.config import EngineConfig, SamplingParams, Speculation
    from ddtree.engine import Engine

    config = EngineConfig(
        model=target,
        drafter=drafter,
        device="cuda",
        dtype=dtype,
        prefix_caching=False,
        max_model_len=2048,
        draft_pairwise=pairwise,
        draft_vocab="full",
    )
    engine = Engine.load(config)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    for name, (mode, budget) in modes.items():
        speculation = Speculation(mode=mode, tree_budget=budget, tree_top_k=8, tree_context="off")
        found = [engine.generate([ids], [params], speculation)[0] for ids in prompts]
        lengths = [generation.acceptance_length for generation in found]
        told = {"ids": [g.token_ids for g in found], "rounds": [g.rounds for g in found], "acceptance": lengths}
        if mode == "shadow-linear":
            told["tree"] = [g.shadow.tree_acceptance_length if g.shadow else None for g in found]
        yield name, told
    del engine  # before another is loaded
    gc.collect()
    torch.cuda.empty_cache()


def beside_ours(server: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    """Acceptance in SGLang and in our engine, over the prompts whose tokens are the same."""
    rows = list(zip(server["ids"], engine["ids"], server["rounds"], engine["rounds"], strict=True))
    same = [(a, b) for ids, others, a, b in rows if ids == others and a]
    tokens = [len(ids) - 1 for ids, others, a, _ in rows if ids == others and a]
    if not same:
        return {"same_ids": 0}
    theirs, own = sum(a for a, _ in same), sum(b for _, b in same)
    return {
        "same_ids": len(same),
        "of": len(rows),
        "same_rounds": sum(a == b for a, b in same),
        "rounds": [theirs, own],
        "tokens_a_round": [round(sum(tokens) / theirs, 4), round(sum(tokens) / own, 4)],
    }
