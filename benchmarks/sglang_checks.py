"""What must also work inside SGLang: each check asks one server, and says whether it is as it should be.

Tokens of greedy answers are kept under `judged`, for the float32 regret of benchmarks/sglang_judge.py.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

from sglang_servers import Server

REGEX = r"(yes|no), because [a-z ]{10,60}\."
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
SAMPLES, SAMPLED_TOKENS, SHUFFLES = 1024, 4, 999
SAMPLED = ({"temperature": 1.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 50})  # a prompt each
Ids = list[int]


@dataclass
class Asked:
    """What the checks share."""

    prompts: Sequence[Ids]
    answers: Sequence[Ids]  # of the same server
    context: int
    regex_prompt: Ids
    plain: dict[str, Any] = field(default_factory=dict)  # what the checks found on the plain server


def context(server: Server, asked: Asked) -> dict[str, Any]:
    """A request that runs to the end of the context."""
    ids: Ids = []
    for prompt in [*asked.prompts] * 50:
        ids += prompt
    ids = ids[: asked.context - 60]
    answer = server.generate(ids, asked.context - len(ids))
    reason = answer["meta_info"]["finish_reason"]["type"]
    before = asked.answers[0][:16]
    again = server.generate(asked.prompts[0], len(before))["output_ids"] == before
    told = len(answer["output_ids"])
    return {"ok": reason == "length" and told >= 50, "tokens": told, "next_request_as_before": again} | _judged(
        [(ids, answer["output_ids"])]
    )


def radix(server: Server, asked: Asked) -> dict[str, Any]:
    """Prompts that go on behind an answer whose cache the rounds wrote."""
    cached, same, pairs = [], 0, []
    for prompt, answer in list(zip(asked.prompts, asked.answers, strict=True))[:12]:
        cut = len(answer) * 3 // 4
        found = server.generate([*prompt, *answer[:cut]], len(answer) - cut)
        cached.append(found["meta_info"]["cached_tokens"] - len(prompt))
        same += found["output_ids"] == answer[cut:]
        pairs.append(([*prompt, *answer[:cut]], found["output_ids"]))
    reached = sum(count > 0 for count in cached)
    return {"ok": reached == len(cached), "same_as_before": same, "cached_of_the_answer": cached} | _judged(pairs)


def together(server: Server, asked: Asked) -> dict[str, Any]:
    """Many requests at once: for servers whose graphs or cache are too small for them."""
    prompts = [*asked.prompts][:16]
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(lambda ids: server.generate(ids, 192), prompts))
    log = server.log.read_text(errors="replace")
    eager, retracted = (
        len(re.findall(r"cuda graph: False", log)),
        len(re.findall(r"Retract requests|KV cache pool is full", log)),
    )
    wanted = (eager > 0 if "@graph" in server.name else True) and (retracted > 0 if "@tokens" in server.name else True)
    ok = wanted and all(len(answer["output_ids"]) == 192 for answer in found)
    same = sum(a["output_ids"][: len(b)] == b for a, b in zip(found, asked.answers, strict=False))
    pairs = [(ids, answer["output_ids"]) for ids, answer in zip(prompts, found, strict=True)]
    told = {"ok": ok, "same_as_alone": same, "eager_lines": eager, "retract_lines": retracted}
    return told | _judged(pairs)


def regex(server: Server, asked: Asked) -> dict[str, Any]:
    """A regular expression."""
    answer = server.generate(asked.regex_prompt, 80, ignore_eos=False, regex=REGEX)
    text = answer["text"]
    return {"ok": re.fullmatch(REGEX, text) is not None, "text": text[:160]} | _rounds(answer)


def json_schema(server: Server, asked: Asked) -> dict[str, Any]:
    """A JSON schema."""
    prompt = asked.prompts[1 % len(asked.prompts)]  # the suite's second prompt asks for JSON
    answer = server.generate(prompt, 160, ignore_eos=False, json_schema=json.dumps(SCHEMA))
    text = answer["text"]
    try:
        ok = {"name", "age"} <= json.loads(text).keys()
    except (ValueError, AttributeError):
        ok = False
    return {"ok": ok, "text": text[:160]} | _rounds(answer)


def penalties(server: Server, asked: Asked) -> dict[str, Any]:
    """Penalties make an answer repeat itself less; stock DFLASH leaves them out.

    `as_plain` counts leading tokens that are the plain server's, which with overlap applies its penalties a token late:
    name it plain@nooverlap.
    """
    usual = server.generate(asked.prompts[0], 128)["output_ids"]
    found = server.generate(asked.prompts[0], 128, frequency_penalty=1.0, presence_penalty=0.5)
    fewer = len(set(found["output_ids"])) > len(set(usual))
    told = {"different_tokens": len(set(found["output_ids"])), "without": len(set(usual)), "said": found["output_ids"]}
    plain = asked.plain.get("penalties", {}).get("said")
    if plain is not None and server.mode != "plain":
        pairs = zip(found["output_ids"], plain, strict=False)
        told["as_plain"] = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return {"ok": fewer or server.mode in ("dflash", "linear")} | told | _rounds(found)


def sampled(server: Server, asked: Asked) -> dict[str, Any]:
    """The distribution of sampled tokens against plain decoding's: permutation tests of the two behind the first.

    The plain server draws twice as many, and its second half is tested against its first: what equals would give.
    """
    told: dict[str, Any] = {"samples": SAMPLES, "p": []}
    drawn, others = [], asked.plain.get("sampled", {}).get("drawn")
    for at, params in enumerate(SAMPLED):
        prompt = asked.prompts[at % len(asked.prompts)]
        count = SAMPLES * (2 if server.mode == "plain" else 1)
        with ThreadPoolExecutor(32) as pool:
            ask = partial(server.generate, prompt, SAMPLED_TOKENS, **params)
            mine = [tuple(found["output_ids"][1:3]) for found in pool.map(lambda _, ask=ask: ask(), range(count))]
        drawn.append(mine[:SAMPLES])
        other = mine[SAMPLES:] if server.mode == "plain" else others and [tuple(pair) for pair in others[at]]
        told["p"].append(permutation(mine[:SAMPLES], other) if other else None)
    told["ok"] = all(p is None or p > 0.005 / len(SAMPLED) for p in told["p"])
    return told | ({"drawn": drawn} if server.mode == "plain" else {})


def permutation(a: Sequence[Any], b: Sequence[Any]) -> float:
    """p of the chi-square distance between two samples, by shuffled labels; rare values count as one."""
    counts = Counter([*a, *b])
    pool = [value if counts[value] >= 8 else None for value in [*a, *b]]

    def distance(values: Sequence[Any]) -> float:
        left, right = Counter(values[: len(a)]), Counter(values[len(a) :])
        return sum((left[v] / len(a) - right[v] / len(b)) ** 2 / (left[v] + right[v]) for v in {*left, *right})

    seen, draw, worse = distance(pool), random.Random(0), 1
    for _ in range(SHUFFLES):
        draw.shuffle(pool)
        worse += distance(pool) >= seen
    return worse / (SHUFFLES + 1)


CHECKS: dict[str, Callable[[Server, Asked], dict[str, Any]]] = {
    "context": context,
    "radix": radix,
    "regex": regex,
    "json": json_schema,
    "penalties": penalties,
    "sampled": sampled,
}
# Checks that want servers of their own: name -> modifiers of the server.
OWN = {"retract": "@tokens1800@optimism1", "above-graph": "@graph4@log5"}


def _judged(pairs: Sequence[tuple[Ids, Ids]]) -> dict[str, Any]:
    return {"judged": [[list(prompt), list(answer)] for prompt, answer in pairs]}


def _rounds(answer: dict[str, Any]) -> dict[str, Any]:
    meta = answer["meta_info"]
    return {"tokens": len(answer["output_ids"]), "rounds": meta.get("spec_verify_ct")}
