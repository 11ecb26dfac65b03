"""SamplingParams checks itself: each message names the value and what to do."""

from typing import Any

import pytest

from ddtree.config import Grammar, SamplingParams
from ddtree.errors import InvalidOption

NAN, INF = float("nan"), float("inf")
GOOD: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 1e300},
    {"top_p": 1},
    {"top_p": 1e-300},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": 10**30},
    {"min_p": 0},
    {"min_p": 1},
    {"presence_penalty": -2},
    {"presence_penalty": 2},
    {"frequency_penalty": 2},
    {"repetition_penalty": 2},
    {"repetition_penalty": 1e-30},
    {"logit_bias": ((5, -100), (0, 100.0))},
    {"stop_token_ids": (0, 7)},
    {"min_tokens": 3, "max_tokens": 3},
    {"logprobs": 0},
    {"logprobs": 20},
    {"seed": -(2**63)},
    {"grammar": Grammar("json_object")},
    {"grammar": Grammar("regex", "a+")},
]
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
BAD: list[tuple[str, Any]] = [
    *((name, value) for name in NUMBERS for value in (True, "1", None, NAN, INF, -INF, 10**400, [1])),
    ("temperature", -0.1),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", True),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1.0),
    ("logit_bias", {1: 2.0}),
    ("logit_bias", ((1, 2.0, 3.0),)),
    ("logit_bias", ((1, 101),)),
    ("logit_bias", ((1, NAN),)),
    ("logit_bias", ((1, True),)),
    ("logit_bias", ((-1, 1.0),)),
    ("logit_bias", (("1", 1.0),)),
    ("logit_bias", ((1, 1.0), (1, 2.0))),
    ("stop_token_ids", [1]),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", ("1",)),
    ("stop", ("",)),
    ("stop", ["a"]),
    ("stop", ("a", "b", "c", "d", "e")),
    ("min_tokens", -1),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", True),
    ("max_tokens", 0),
    ("ignore_eos", 1),
    ("grammar", "json"),
    ("seed", 2**63),
    ("seed", 1.0),
]


@pytest.mark.parametrize("options", GOOD, ids=str)
def test_accepted(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    assert all(getattr(params, name) == value for name, value in options.items())
    assert params == SamplingParams(**options)
    hash(params)


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidOption) as raised:
        SamplingParams(**{name: value})
    assert raised.value.param == name
    assert name in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"top_p": 0},
            "top_p must be a number above 0 and at most 1, not 0: use 1 to keep all tokens, or temperature 0",
        ),
        ({"presence_penalty": 3}, "presence_penalty must be a number from -2 to 2, not 3: use 0 for none"),
        ({"logit_bias": ((7, 200),)}, "the logit_bias of token 7 must be a number from -100 to 100, not 200"),
        ({"logit_bias": ((7, 1), (7, 2))}, "logit_bias names token 7 twice"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be from 0 to 4, not 5"),
    ],
    ids=str,
)
def test_messages_name_value_and_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption) as raised:
        SamplingParams(**options)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "source"), [("yaml", "a"), ("regex", ""), ("json_schema", ""), ("json_object", "{}"), ("lark", None)]
)
def test_grammars_need_their_source(kind: str, source: Any) -> None:
    with pytest.raises(InvalidOption, match=kind) as raised:
        Grammar(kind, source)
    assert raised.value.param == "response_format"
