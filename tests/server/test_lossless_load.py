"""Lossless under load: requests of every kind, eight at a time over HTTP, and each gets what it gets alone."""

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random

import pytest

from ddtree.config import MODES, TREE_CONTEXTS, EngineConfig
from ddtree.engine import Engine
from scripted_text import END, Book, book_engine, byte_text, serving, tell

AT_ONCE = 8
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "ö", "🌍"]}, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}
CALL = '<tool_call>{"name": "find", "arguments": {"name": "Bo", "tags": ["ö"]}}</tool_call>'
TOPICS = [
    "Grüße aus Köln, ",
    "the quick brown fox jumps over it, ",
    '{"name": "Bo", "tags": ["ö"]} ',
    "🌍🌍 naïve 中文 ",
]


def mixed(number: int, ends: int, longest: int) -> dict:
    """Request `number` of a load: what it asks for is drawn from its number alone. ends: a token that ends texts."""
    chance = Random(number)
    topic = chance.choice(TOPICS) * chance.randrange(1, 4)
    options = {
        "temperature": chance.choice([0, 0, 0.3, 0.8, 1, 1.7]),
        "seed": chance.choice([number, -number, 2**62 + number]),
        "max_tokens": chance.randrange(1, longest),
        "speculative": {"mode": chance.choice(MODES)},
    }
    if options["speculative"]["mode"] in ("tree", "shadow-linear"):
        budget, ranks, spine = chance.choice([1, 3, 8, 31]), chance.choice([1, 3, 8]), chance.choice([0, 0, 2])
        options["speculative"] |= {"tree_budget": budget, "tree_top_k": ranks, "tree_spine": spine}
    if options["speculative"]["mode"] != "ar":
        options["speculative"]["tree_context"] = TREE_CONTEXTS[number % len(TREE_CONTEXTS)]
    some = {
        "top_p": lambda: chance.choice([0.5, 0.9, 0.99]),
        "top_k": lambda: chance.choice([1, 2, 20]),
        "min_p": lambda: chance.choice([0.05, 0.3]),
        "presence_penalty": lambda: chance.uniform(-2, 2),
        "frequency_penalty": lambda: chance.uniform(-2, 2),
        "repetition_penalty": lambda: chance.choice([0.8, 1.3]),
        "logit_bias": lambda: {str(chance.randrange(97, 123)): chance.uniform(-9, 9), str(ends): chance.uniform(-2, 2)},
        "stop": lambda: chance.choice(["o", ["ow", " f"], ["ß", "🌍n", "zz"], "üß"]),
        "stop_token_ids": lambda: [chance.randrange(97, 123)],
        "ignore_eos": lambda: True,
        "min_tokens": lambda: chance.randrange(options["max_tokens"] + 1),
        "n": lambda: chance.choice([2, 3]),
    }
    for name in chance.sample(sorted(some), chance.randrange(6)):
        options[name] = some[name]()
    if number % 4 == 3:  # a text to go on with
        options["logprobs"] = chance.choice([0, 2, 5]) if number % 8 == 3 else None
        return options | {"prompt": f"<|user|>{topic}<|end|><|assistant|><|go|>"}
    if number % 3 == 0:
        options |= {"logprobs": True, "top_logprobs": chance.choice([0, 3])}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    if number % 5 in (1, 2):
        options |= chance.choice(
            [
                {"response_format": form},
                {"response_format": {"type": "json_object"}},
                {"tools": [TOOL], "tool_choice": "required"},
                {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False},
            ]
        )
        # Those that end a text beside the grammar make no sense with one, and may leave no token at all.
        for name in ("stop", "stop_token_ids", "logit_bias", "ignore_eos", "min_tokens"):
            options.pop(name, None)
        if "tools" in options:
            topic, options["max_tokens"] = CALL, longest + 80
            if number % 2:  # some of them should come to their end
                options["temperature"] = min(options["temperature"], 0.3)
                for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
                    options.pop(name, None)
    system = {"role": "system", "content": chance.choice(["Be brief.", "Be brief. Use few words. " * 3])}
    return options | {"messages": [system, {"role": "user", "content": topic}]}


def check(server, requests: list[dict], rounding: float = 0.0) -> list:
    """Asks for each alone, then for all of them, eight at a time and in another order, and compares. The answers.

    rounding: how far log-probabilities may be apart.
    """
    with server.openai(timeout=300) as client:
        alone = [tell(client, **request) for request in requests]
        batches, honest = [], server.engine.target.verify
        server.engine.target.verify = lambda cache, rows, position: (
            batches.append(len(rows.tokens)), honest(cache, rows, position))[1]  # fmt: skip
        order = list(range(len(requests)))
        Random(1).shuffle(order)
        gate = threading.Barrier(min(AT_ONCE, len(requests)))

        def ask(place: int) -> tuple[int, object]:
            if place < gate.parties:
                gate.wait(60)
            number = order[place]
            return number, tell(client, bool(number % 2), **requests[number])

        with ThreadPoolExecutor(AT_ONCE) as pool:
            together = dict(pool.map(ask, range(len(requests))))
        server.engine.target.verify = honest
    for number, one in enumerate(alone):
        assert close(together[number].logprobs, one.logprobs, rounding), requests[number]
        assert replace(together[number], logprobs=one.logprobs) == one, requests[number]
        for block, other in zip(together[number].blocks, one.blocks, strict=True):
            # How it was drafted does not depend on the neighbours either.
            assert (block["mode"], block["rounds"], block["acceptance_length"], block["shadow"]) == (
                other["mode"], other["rounds"], other["acceptance_length"], other["shadow"])  # fmt: skip
    assert max(batches) >= min(AT_ONCE, len(requests)) / 2, "they must have shared rounds"
    stats = server.engine.scheduler.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    return alone


def close(one, other, rounding: float) -> bool:
    """Equality of JSON, numbers that are no integers but for rounding."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= rounding
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(close(one[name], other[name], rounding) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(close(a, b, rounding) for a, b in zip(one, other, strict=True))
    return one == other


def test_64_requests_of_a_scripted_model(tmp_path):
    text = byte_text(tmp_path / "tokenizer")
    book = Book(variety=4.5, rank=lambda place: [0, 0, 1, 0, 0, 9, 0, 2][place % 8])
    engine = book_engine(text, book, mode="tree", config={"max_running_requests": AT_ONCE, "prefill_chunk": 32})
    with serving(engine, reasoning_parser="qwen3") as server:
        told = check(server, [mixed(number, END, 24) for number in range(64)])
    assert {reason for one in told for reason, _ in one.reasons} == {"stop", "length", "tool_calls"}
    blocks = [block for one in told for block in one.blocks]
    assert {block["mode"] for block in blocks} == set(MODES)
    assert sum((block["acceptance_length"] or 1) > 1.5 for block in blocks) > 20, "blocks must be accepted"
    assert sum(bool(one.calls[0]) for one in told) > 1
    assert len({json.dumps(one.ids) for one in told}) > 55


def embedded(numbers: Sequence[int], longest: int, caching: bool) -> None:
    """The same of the embedded model.

    Where a prompt's beginning is reused, the rest of it is computed in another shape, so its numbers may differ by
    their last bits. Without reuse they are the very same.
    """
    engine = Engine.load(EngineConfig(dtype="float32", max_model_len=1024, prefix_caching=caching))
    with serving(engine) as server:
        told = check(server, [mixed(number, 2, longest) for number in numbers], 1e-4 if caching else 0.0)
    assert len({block["mode"] for one in told for block in one.blocks}) > 1


@pytest.mark.usefixtures("embedded_model")
def test_4_requests_of_the_embedded_model():
    embedded([0, 3, 5, 6], 9, caching=False)


@pytest.mark.full
@pytest.mark.usefixtures("embedded_model")
@pytest.mark.parametrize("caching", [False, True])
def test_16_requests_of_the_embedded_model(caching):
    embedded(range(16), 40, caching)
