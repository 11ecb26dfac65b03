"""Grammars at their limits: what an answer is, and where it ends, is the same in every mode, alone and with others."""

import json
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from llguidance import LLParserLimits
from torch import Tensor

from ddtree.config import EngineConfig, Grammar, SamplingParams, Speculation
from ddtree.engine import Engine, Text
from ddtree.engine import grammar as grammars
from ddtree.engine.following import APART
from ddtree.engine.grammar import MAX_SOURCE, GrammarCompiler, check_schema
from ddtree.engine.scheduler import _no_answer
from ddtree.errors import DDTreeError, InvalidOption
from scripted import ScriptedDrafter, ScriptedTarget
from scripted_text import FIRST_PIECE, byte_text

pytestmark = pytest.mark.usefixtures("one_thread")

PATTERNS = MappingProxyType({
    "vowels": "^(?:[a-z ]*[aeiou][a-z ]{50}){20}$",
    "far": "^(.*a.{200}|.*b.{201}|.*c.{203})$",
    "classes": r"^(\w{0,500}\W{0,500}){20}$",
    "milder": "^(?:[a-z ]*[aeiou][a-z ]{10}){5}$",
    "late": "^[a-z]{12}(?:[a-z ]*[aeiou][a-z ]{50}){20}$",
})  # fmt: skip
MODES = {
    "ar": Speculation(mode="ar"),
    "linear": Speculation(mode="linear"),
    "shadow-linear": Speculation(mode="shadow-linear", tree_budget=15),
    "tree 3": Speculation(mode="tree", tree_budget=3),
    "tree 15": Speculation(mode="tree", tree_budget=15),
    "tree 64": Speculation(mode="tree", tree_budget=64),
    "tree 15 mix": Speculation(mode="tree", tree_budget=15, tree_context="mix"),
}


def by_pattern(pattern: str) -> Grammar:
    return Grammar("json_schema", json.dumps({"type": "string", "pattern": pattern}))


class Scribe(ScriptedTarget):
    """Prefers words of letters; what it says next looks random. `liked`: the tokens it prefers."""

    def __init__(self, vocab: int, end_ids: tuple[int, ...], liked: Sequence[int]) -> None:
        super().__init__(lambda seen: [], vocab, end_ids)
        self.liked = torch.tensor(liked)

    def _logits(self, seen: tuple[int, ...]) -> Tensor:
        draw = torch.Generator().manual_seed(hash(seen[-3:]) % 2**31)
        logits = torch.rand(self.spec.vocab_size, generator=draw, dtype=torch.float64)
        logits[self.liked] += 2
        logits[list(self.spec.end_ids)] -= 1
        return logits


class Copyist(ScriptedDrafter):
    """Proposes what the target would say without a grammar, at every other depth with a better candidate before it."""

    def __init__(self, target: Scribe, block: int = 8) -> None:
        def propose(seen: tuple[int, ...]) -> list[list[float]]:
            rows = []
            for depth in range(block - 1):
                logits = target._logits(seen).float()
                best = int(logits.argmax())
                if (depth + len(seen)) % 3 == 2:
                    logits[target.liked[(len(seen) * 7 + depth) % len(target.liked)]] += 2
                rows.append(logits.tolist())
                seen = (*seen, best)
            return rows

        super().__init__(propose, block)


def scribe_engine(text: Text, vocab: int, end: int, liked: Sequence[int]) -> Engine:
    target = Scribe(vocab, (end,), liked)
    config = EngineConfig(speculation=Speculation(mode="tree"), max_tree_budget=64, max_running_requests=8)
    return Engine(target, Copyist(target), text, config)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pieces() -> list[str]:
    letters = "abcdefghijklmnopqrstuvwxyz "
    return [a + b for a in letters for b in letters] + [
        a + "aet"[n % 3] + a * (n % 5) + "o" for n, a in enumerate(letters)
    ]


@pytest.fixture(scope="module")
def small(tmp_path_factory, pieces) -> Engine:
    text = byte_text(tmp_path_factory.mktemp("bytes"), pieces)
    return scribe_engine(text, FIRST_PIECE + len(pieces), 256, range(FIRST_PIECE, FIRST_PIECE + len(pieces)))


@pytest.fixture(scope="module")
def real(embedded_model) -> Engine:
    text = Text(embedded_model)
    spelled = [text.token_bytes(token) for token in range(3, 49152)]
    liked = [n + 3 for n, s in enumerate(spelled) if 0 < len(s) < 5 and s.isascii() and (s.strip() or b"x").islower()]
    return scribe_engine(
        text, 49152, 0, [token for token in liked if text.token_bytes(token).decode().strip().isalpha()]
    )


def answers(
    engine: Engine, grammar: Grammar, speculation: Speculation, size: int, fresh: bool = True
) -> tuple[list[int], str]:
    """An answer's tokens, and how it ends: its finish reason, or its error. fresh: nothing was asked before."""
    if fresh:
        engine.__dict__.pop("_grammars", None)
    tokens: list[int] = []
    params = SamplingParams(max_tokens=size, grammar=grammar)
    try:
        for chunk in engine.stream([7, 8, 9], params, speculation):
            tokens += chunk.token_ids
        return tokens, str(chunk.finish_reason)
    except DDTreeError as error:
        return tokens, str(error)


def set_limits(monkeypatch: pytest.MonkeyPatch, shared: Mapping[str, int], alone: Mapping[str, int]) -> None:
    for name, limits in (("_LIMITS", shared), ("_ALONE", alone)):
        monkeypatch.setattr(grammars, name, LLParserLimits(**limits, verbose_errors=False), raising=False)


LIMITS = {  # of a shared lexer, and of an answer's own
    "fuel": ({"step_lexer_fuel": 1500}, {"step_lexer_fuel": 24_000}),
    "little fuel": ({"step_lexer_fuel": 300}, {"step_lexer_fuel": 5000}),
    "states": ({"max_lexer_states": 250}, {"max_lexer_states": 500}),
}


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("name", PATTERNS)
def test_every_mode_gives_the_same_tokens_and_the_same_end(small, monkeypatch, name, limits):
    set_limits(monkeypatch, *LIMITS[limits])
    plain = answers(small, by_pattern(PATTERNS[name]), MODES["ar"], 30)
    for mode, speculation in MODES.items():
        assert answers(small, by_pattern(PATTERNS[name]), speculation, 30) == plain, mode
        assert answers(small, by_pattern(PATTERNS[name]), speculation, 30, fresh=False) == plain, mode


@pytest.mark.parametrize("name", ["vowels", "far"])
def test_every_mode_gives_the_same_with_a_real_vocabulary(real, name):
    plain = answers(real, by_pattern(PATTERNS[name]), MODES["ar"], 24)
    assert plain[0]
    for mode in ("linear", "tree 3", "tree 15"):
        assert answers(real, by_pattern(PATTERNS[name]), MODES[mode], 24) == plain, mode


def test_one_of_them_ends_at_a_limit_and_says_so(real):
    tokens, said = answers(real, by_pattern(PATTERNS["vowels"]), MODES["tree 15"], 60)
    assert tokens
    assert "became too complex" in said
    assert "too many expressions" in said
    assert "simplify the schema" in said
    assert "logit_bias" not in said
    assert "widen" not in said


@pytest.mark.parametrize("mode", MODES)
def test_neighbours_do_not_change_an_answer_at_its_limits(small, mode):
    grammar = by_pattern(PATTERNS["late"])
    alone = [answers(small, grammar, MODES[mode], size)[0] for size in (20, 40)]
    small.__dict__.pop("_grammars", None)
    params = [SamplingParams(max_tokens=size, grammar=grammar) for size in (20, 40)]
    together = small.generate([[7, 8, 9]] * 2, params, MODES[mode])
    assert [one.token_ids for one in together] == alone


def test_an_ordinary_schema_is_never_followed_alone(real, monkeypatch):
    def refuse(*_: Any) -> None:
        raise AssertionError("compiled for one answer")

    monkeypatch.setattr(GrammarCompiler, "alone", refuse)
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 200}, "date": {"type": "string", "format": "date-time"}},
        "required": ["name", "date"],
    }
    tokens, end = answers(real, Grammar("json_schema", json.dumps(schema)), MODES["tree 15"], 20)
    assert len(tokens) == 20
    assert end == "length"


def test_an_answer_that_fills_its_own_lexer_gets_a_fresh_one_now_and_then(small, monkeypatch):
    """What plain decoding itself uses up: a long answer goes on, and compiles at most once in APART tokens."""
    set_limits(monkeypatch, {"max_lexer_states": 350}, {"max_lexer_states": 700})
    compiled = []
    made = GrammarCompiler._made
    monkeypatch.setattr(GrammarCompiler, "_made", lambda *args: compiled.append(1) or made(*args))
    branches = "|".join(f"{letter}[a-z ]{{0,700}}{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")
    grammar = by_pattern(f"^({branches})$")
    results = {mode: answers(small, grammar, speculation, 300) for mode, speculation in MODES.items()}
    assert len(results["ar"][0]) == 300
    assert all(result == results["ar"] for result in results.values())
    assert len(MODES) * 4 < len(compiled) <= len(MODES) * (4 + 300 // APART)


def test_recovering_is_paid_once(small, monkeypatch):
    """An answer at its limits takes a time that grows with its length, not with its square."""
    compiled = []
    made = GrammarCompiler._made
    monkeypatch.setattr(GrammarCompiler, "_made", lambda *args: compiled.append(1) or made(*args))
    for size in (15, 60):
        answers(small, by_pattern(PATTERNS["milder"]), MODES["tree 15"], size)
    assert len(compiled) <= 2 * 4


MANY = {
    "type": "object",
    "properties": {f"p{n}": {"type": "string"} for n in range(3000)},
    "additionalProperties": False,
}


@pytest.mark.parametrize("schema", [MANY, {"type": "object", "properties": {"inner": MANY}, "required": ["inner"]}])
def test_a_schema_that_is_too_complex_at_its_beginning_is_refused_before_prefill(real, schema):
    params = SamplingParams(max_tokens=5, grammar=Grammar("json_schema", json.dumps(schema)))
    with pytest.raises(InvalidOption, match=r"too complex.* items; max is") as caught:
        real.check([7], params)
    assert caught.value.code == "invalid_grammar"
    assert "left-recursive" not in str(caught.value)


def test_a_request_makes_one_matcher_to_be_checked_and_one_to_be_followed(small, monkeypatch):
    made, matcher = [], GrammarCompiler.matcher
    monkeypatch.setattr(GrammarCompiler, "matcher", lambda *args: made.append(matcher(*args)) or made[-1])
    params = SamplingParams(max_tokens=4, grammar=by_pattern("[a-z]{4}"))
    small.check([7], params)  # as a server does, in another thread
    assert len(made) == 1
    request = small.scheduler.add([7], params, small.speculation)
    assert len(made) == 2
    assert request.lane.sampler._matcher is made[-1]
    small.scheduler.abort(request)
    small.generate([[7]], [params])
    assert len(made) == 4
    with pytest.raises(InvalidOption, match="the grammar cannot be used"):  # also of one that nobody checked
        small.scheduler.add([7], SamplingParams(grammar=Grammar("regex", "(")), small.speculation)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "string", "format": "zzz"}, "Unknown format: zzz"),
        ({"properties": {"bob": {"contains": {}}}}, 'Unimplemented keys: ["contains"]'),
        ({"oneOf": [{"type": "object"}, {"type": "object"}]}, "oneOf constraints are not supported: use anyOf"),
        ({"allOf": [{"type": "object", "required": ["zed"], "additionalProperties": False}]},
         "Unsatisfiable schema: required property 'zed' is unsatisfiable"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_schema_is_told_without_internals(real, schema, reason):
    said = f"the grammar cannot be used: {reason}"
    with pytest.raises(InvalidOption) as caught:
        real.check([7], SamplingParams(grammar=Grammar("json_schema", json.dumps(schema))))
    assert str(caught.value) == said
    with pytest.raises(InvalidOption) as caught:
        check_schema(schema, "response_format", "the schema")
    assert str(caught.value) == f"the schema: {said}"


def sized(size: int) -> Mapping[str, Any]:
    """A schema of that many bytes, written without spaces."""
    schema: dict[str, Any] = {"description": "", "type": "boolean"}
    left = size - len(json.dumps(schema, separators=(",", ":")))
    return schema | {"description": "é" * (left // 2) + "x" * (left % 2)}


def test_the_limit_is_of_the_users_own_schema(real):
    for size in (MAX_SOURCE, MAX_SOURCE + 1):
        schema = sized(size)
        wrapped = "start: form\nform: %json " + grammars.schema_text(schema)
        told = [Grammar("json_schema", json.dumps(schema, indent=1)), Grammar("lark", wrapped)]
        for grammar in told:
            params = SamplingParams(max_tokens=1, grammar=grammar)
            if size == MAX_SOURCE:
                real.check([7], params)
            else:
                with pytest.raises(InvalidOption, match=rf"{size} bytes, more than {MAX_SOURCE} \(128 KiB\)"):
                    real.check([7], params)
    check_schema(sized(MAX_SOURCE), "tools")
    with pytest.raises(InvalidOption, match=f"{MAX_SOURCE + 1} bytes"):
        check_schema(sized(MAX_SOURCE + 1), "tools")


@pytest.mark.parametrize(
    ("grammar", "bias", "why", "param", "said"),
    [
        (
            True,
            (),
            "too many states",
            "response_format",
            "the grammar became too complex on the answer's way (too many",
        ),
        (True, ((5, -100.0),), None, "response_format", "no token is left that the grammar and logit_bias allow: "),
        (True, (), None, "response_format", "no token is left that the grammar allows: let the schema"),
        (False, ((5, -100.0),), None, "logit_bias", "no token is left that logit_bias allows: forbid fewer"),
    ],
)
def test_a_dead_end_names_what_was_sent_alone(grammar, bias, why, param, said):
    params = SamplingParams(grammar=Grammar("json_object") if grammar else None, logit_bias=bias)
    lane = SimpleNamespace(sampler=SimpleNamespace(grammar_error=why))
    error = _no_answer(SimpleNamespace(params=params, lane=lane))  # type: ignore[arg-type]
    assert isinstance(error, InvalidOption)
    assert str(error).startswith(said)
    assert (error.param, error.code) == (param, "grammar_dead_end")


def test_the_neighbours_are_not_held_up(real):
    """Meeting the limits costs some hundredths of a second at a time."""
    real.__dict__.pop("_grammars", None)
    compiler = real._grammars
    matcher = compiler.matcher(by_pattern(PATTERNS["vowels"]))
    slowest, tokens = 0.0, real.text.encode('"once upon a time in a village')
    for token in tokens:
        started = time.perf_counter()
        matcher.masks([7, *tokens], [-1, *range(len(tokens))])
        matcher.commit([token])
        slowest = max(slowest, time.perf_counter() - started)
    assert slowest < 1.5  # seconds; 0.1 on an idle core
