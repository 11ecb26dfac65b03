"""Grammars over draft trees: every row's mask is that of its own path, and valid answers can be completed."""

import json
import random
import threading
import time
from collections.abc import Sequence

import pytest
import torch
from jsonschema import validate
from llguidance import LLParserLimits

from ddtree.config import Grammar
from ddtree.engine import Text
from ddtree.engine.grammar import MAX_SOURCE, GrammarCompiler, GrammarMatcher, check_schema
from ddtree.errors import InvalidOption

VOCAB, ENDS = 49152, (2, 0)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "mood": {"enum": ["😀 glad", "trübe", "静か"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 150}, "maxItems": 4},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "mood", "ages", "home"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"street": {"type": "string", "maxLength": 30}}}},
}
SCHEMA = Grammar("json_schema", json.dumps(PERSON))
CALLS = Grammar(
    "lark",
    'start: think? ("<tool_call>" %json {"type": "object"} "</tool_call>")+\nthink[suffix="</think>"]: /(?s:.*)/\n',
)


@pytest.fixture(scope="module")
def text(embedded_model) -> Text:
    return Text(embedded_model)


@pytest.fixture(scope="module")
def compiler(text) -> GrammarCompiler:
    return GrammarCompiler(text, VOCAB, ENDS)


def allowed(matcher: GrammarMatcher) -> list[int]:
    return matcher.masks([7], [-1])[0].nonzero().flatten().tolist()


def follow(compiler: GrammarCompiler, grammar: Grammar, tokens: list[int]) -> GrammarMatcher:
    matcher = compiler.matcher(grammar)
    matcher.commit(tokens)
    assert matcher.error is None
    return matcher


@pytest.fixture(scope="module")
def closing(text) -> torch.Tensor:
    """Tokens that bring JSON to its end. [V] bool."""
    spelled = [text.token_bytes(t) for t in range(VOCAB)]
    return torch.tensor([bool(b) and (not b.strip(b'"}]') or b in b"</tool_call>") for b in spelled])


def walk(
    compiler: GrammarCompiler, grammar: Grammar, closing: torch.Tensor, seed: int, begin: Sequence[int] = ()
) -> list[int]:
    """A random answer by masks alone, in favour of short ones. Without its end token."""
    rng, matcher, ids = random.Random(seed), compiler.matcher(grammar), [*begin]
    matcher.commit(ids)
    for step in range(400):
        mask = matcher.masks([7], [-1])[0]
        assert mask.any(), "a grammar that goes on allows at least one token"
        ends = bool(mask[0])
        mask[list(ENDS)] = False
        if ends and (step > 30 or rng.random() < 0.3 or not mask.any()):
            return ids
        narrow = mask & closing
        if narrow.any() and rng.random() < (0.4 if step < 30 else 0.95):
            mask = narrow
        ids.append(rng.choice(mask.nonzero().flatten().tolist()))
        matcher.commit(ids[-1:])
    raise AssertionError("the answer did not end")


@pytest.mark.parametrize("seed", range(8))
def test_any_walk_along_the_masks_is_an_answer_of_the_schema(text, compiler, closing, seed):
    answer = text.decode(walk(compiler, SCHEMA, closing, seed))
    validate(json.loads(answer), PERSON)


@pytest.mark.parametrize("seed", range(3))
def test_any_walk_for_a_json_object_is_one(text, compiler, closing, seed):
    assert isinstance(json.loads(text.decode(walk(compiler, Grammar("json_object"), closing, seed))), dict)


def test_an_answer_with_characters_split_over_tokens_is_allowed_token_by_token(text, compiler):
    person = {"name": "Zoë 👩‍👩‍👧 日本", "mood": "😀 glad", "ages": [3, 150], "home": {"street": "Straße 5\n"}}
    for indent in (None, 4):
        ids = text.encode(json.dumps(person, ensure_ascii=False, indent=indent))
        assert any(not text.token_bytes(t).decode(errors="ignore") for t in ids)  # parts of characters
        matcher = compiler.matcher(SCHEMA)
        for place, token in enumerate(ids):
            assert token in allowed(matcher), place
            assert not set(ENDS) & set(allowed(matcher))
            assert not matcher.finished
            matcher.commit([token])
        assert matcher.finished
        assert set(allowed(matcher)) == set(ENDS)


def random_tree(text: Text, answer: list[int], seed: int) -> tuple[list[int], list[int]]:
    """Rows that follow an answer, leave it for legal, illegal and end tokens, and go on from there."""
    rng = random.Random(seed)
    tokens, parents, places = [7], [-1], [0]
    for _ in range(24):
        parent = rng.choice([len(tokens) - 1, rng.randrange(len(tokens))])
        place = places[parent]
        kind = rng.random()
        right = answer[place] if place < len(answer) else 2
        token = right if kind < 0.6 else rng.choice([rng.randrange(VOCAB), 2, 0, *text.encode('"x {}],: 12')])
        tokens.append(token)
        parents.append(parent)
        places.append(place + 1)
    return tokens, parents


@pytest.mark.parametrize("grammar", [SCHEMA, Grammar("json_object"), CALLS, Grammar("regex", "(ab|a)*[é-ü]{2,}")])
@pytest.mark.parametrize("seed", range(3))
def test_a_trees_masks_are_those_of_each_rows_path_alone(text, compiler, closing, grammar, seed):
    thought = text.encode("1 < 2 </thin </think>") if grammar is CALLS else []
    answer = walk(compiler, grammar, closing, seed + 100, thought)
    done = random.Random(seed).randrange(len(answer) + 1)
    matcher = follow(compiler, grammar, answer[:done])
    tokens, parents = random_tree(text, answer[done:], seed)
    masks = matcher.masks(tokens, parents)
    assert masks.dtype == torch.bool
    assert masks.shape == (len(tokens), VOCAB)
    for row in range(len(tokens)):
        path: list[int] = []
        at = row
        while at > 0:
            path.insert(0, tokens[at])
            at = parents[at]
        alone = follow(compiler, grammar, answer[:done])
        legal = True
        for token in path:  # what plain decoding does: ask, then commit
            legal = legal and bool(alone.masks([7], [-1])[0, token])
            alone.commit([token])
        expected = alone.masks([7], [-1])[0] if legal else torch.zeros(VOCAB, dtype=torch.bool)
        assert torch.equal(masks[row], expected), row
    again = matcher.masks(tokens, parents)  # asking changes nothing
    assert torch.equal(masks, again)
    matcher.commit(answer[done:])
    assert set(ENDS) <= set(allowed(matcher))


@pytest.mark.parametrize("seed", range(20))
def test_rounds_of_drafts_leave_no_trace(text, compiler, seed):
    """What earlier rounds drafted and dropped changes no later mask: plain decoding never saw it."""
    rng, grammar = random.Random(seed), Grammar("json_object")
    answer = text.encode('{"city": "Paris", "population": "11.11.11", "tags": ["Paris, France", {"a": [1]}]}')
    matcher, done = compiler.matcher(grammar), 0
    wrong = [token for part in ('", "}]:{[', " [", '",', "!", "\n", '["', '"]') for token in text.encode(part)]
    while done < len(answer):
        right = answer[done : done + rng.randrange(4)]
        drafts = [*right, *(rng.choice(wrong) for _ in range(rng.randrange(4)))]
        side = [rng.choice(wrong) for _ in range(3)]
        parents = [-1, *range(len(drafts)), 0, *range(len(drafts) + 1, len(drafts) + 3)]
        masks = matcher.masks([7, *drafts, *side], parents)
        plain = follow(compiler, grammar, answer[:done])
        for row, token in enumerate(answer[done : done + len(right) + 1]):
            assert torch.equal(masks[row], plain.masks([7], [-1])[0]), (done, row)
            plain.commit([token])
        kept = answer[done : done + rng.randrange(1, len(right) + 2)]
        matcher.commit(kept)
        done += len(kept)
    assert matcher.finished


def test_a_node_the_grammar_cannot_follow_is_cut_and_its_siblings_are_not(text, compiler):
    """vllm#53777, sglang#9187: the drafter's first guess at a key is wrong; the answer goes on by the others."""
    (brace,), wrong, right = text.encode('{"')[:1], text.encode('zz"')[0], text.encode("name")[0]
    start = follow(compiler, SCHEMA, text.encode('{"'))
    masks = start.masks([brace, wrong, right, wrong, 2], [-1, 0, 0, 1, 0])
    assert masks[0, right]
    assert not masks[0, wrong]
    assert not masks[1].any()
    assert not masks[3].any()  # below a cut node
    assert not masks[4].any()  # an end where the answer may not end
    assert masks[2].any()


def test_a_chain_of_a_thousand_rows_is_followed(text, compiler):
    ids = text.encode(json.dumps({"k": "lorem ipsum " * 600}))[:1000]
    masks = compiler.matcher(Grammar("json_object")).masks([7, *ids], [-1, *range(len(ids))])
    assert masks.any(dim=1).all()
    assert all(masks[row, token] for row, token in enumerate(ids))


def test_after_the_end_only_end_tokens_follow(text, compiler):
    matcher = follow(compiler, Grammar("regex", "ab"), [*text.encode("ab"), 2, 2])
    assert matcher.finished
    masks = matcher.masks([2, 0, 5, 2], [-1, 0, 0, 1])
    assert [set(row.nonzero().flatten().tolist()) for row in masks] == [{0, 2}, {0, 2}, set(), {0, 2}]


def test_an_end_token_inside_a_tree_ends_its_path(text, compiler):
    ab = text.encode("ab")
    matcher = compiler.matcher(Grammar("regex", "(ab)*"))
    masks = matcher.masks([7, 0, 2, *ab], [-1, 0, 1, 0, *range(3, 2 + len(ab))])
    assert masks[0, 0]
    assert set(masks[1].nonzero().flatten().tolist()) == set(masks[2].nonzero().flatten().tolist()) == {0, 2}
    assert masks[2 + len(ab), 2]


@pytest.mark.parametrize("vocab", [VOCAB + 64, VOCAB + 1, VOCAB - 1000])
def test_a_head_of_another_size_than_the_tokenizer(text, vocab):
    compiler = GrammarCompiler(text, vocab, (2, vocab - 1, vocab + 5))
    matcher = compiler.matcher(Grammar("json_object"))
    mask = matcher.masks([7], [-1])
    assert mask.shape == (1, vocab)
    assert not mask[:, VOCAB:].any()
    matcher.commit(text.encode("{}"))
    assert set(allowed(matcher)) == {2, vocab - 1}
    assert not matcher.masks([7, vocab - 1, VOCAB + 90_000], [-1, 0, 0])[2].any()


def test_a_model_without_an_end_token_takes_no_grammar(text):
    with pytest.raises(InvalidOption, match="end-of-sequence"):
        GrammarCompiler(text, VOCAB, ()).matcher(Grammar("json_object"))


def test_whitespace_comes_to_an_end(text, compiler):
    """A weak model under json_object may otherwise write line ends until its limit."""
    matcher = compiler.matcher(Grammar("json_object"))
    matcher.commit(text.encode("{"))
    (space,) = text.encode(" ")
    count = 0
    while matcher.masks([7], [-1])[0, space]:
        matcher.commit([space])
        count += 1
    assert count == 64
    assert matcher.error is None


UNSUPPORTED = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "not": {"properties": {"a": {"not": {}}}},
    "if": {"if": {}, "then": {}},
    "contains": {"contains": {}},
    "format": {"type": "string", "format": "colour"},
    "frob": {"type": "frob"},
    "look-around": {"type": "string", "pattern": "(?=x)y"},
    "oneOf": {"oneOf": [{"type": "object"}, {"type": "object"}]},
    "unsatisfiable": {"type": "object", "required": ["z"], "additionalProperties": False},
    "passwd": {"$ref": "file:///etc/passwd"},
    "example.org": {"$ref": "http://example.org/schema.json"},
    "x-guidance": {"x-guidance": {"lenient": True}, "contains": {}},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_cannot_be_enforced_is_refused_by_name(compiler, name):
    with pytest.raises(InvalidOption, match=f"(?i){name}") as caught:
        compiler.matcher(Grammar("json_schema", json.dumps(UNSUPPORTED[name])))
    assert (caught.value.param, caught.value.code) == ("response_format", "invalid_grammar")
    with pytest.raises(InvalidOption, match=rf"(?i)tools\[1\].*{name}") as caught:
        check_schema(UNSUPPORTED[name], "tools", "tools[1]")
    assert (caught.value.param, caught.value.code) == ("tools", "invalid_grammar")


BAD = [
    Grammar("json_schema", "[]"),
    Grammar("json_schema", "5"),
    Grammar("json_schema", "{"),
    Grammar("json_schema", "false"),
    Grammar("json_schema", '{"const": "\\ud800"}'),
    Grammar("json_schema", '{"minimum": NaN}'),
    Grammar("json_schema", "[" * 100_000),
    Grammar("json_schema", '{"$ref": "#"}'),
    Grammar("json_schema", '{"items":' * 2000 + "{}" + "}" * 2000),
    Grammar("json_schema", json.dumps({"enum": ["x" * MAX_SOURCE]})),
    Grammar("json_schema", json.dumps({"type": "integer", "multipleOf": 999999937})),
    Grammar("json_schema", json.dumps({"pattern": "(" * 5000 + "a" + ")" * 5000, "type": "string"})),
    Grammar("regex", "a("),
    Grammar("regex", "(?<=a)b"),
    Grammar("lark", "start: nowhere"),
    Grammar("lark", "%%%"),
]


@pytest.mark.parametrize("grammar", BAD, ids=lambda grammar: grammar.source[:20])
def test_bad_grammars_are_refused_with_a_short_message(compiler, grammar):
    with pytest.raises(InvalidOption) as caught:
        compiler.matcher(grammar)
    assert caught.value.code == "invalid_grammar"
    assert len(str(caught.value)) < 600


COSTLY = {
    "a{1000000}": {"type": "string", "pattern": "^a{1000000}$"},
    "nested": {"type": "string", "pattern": "^((a{1000}){1000}){1000}$"},
    "states": {"type": "string", "pattern": "^(a|b)*a(a|b){60}$"},
    "classes": {"type": "string", "pattern": r"^(\w{0,500}\W{0,500}){20}$"},
    "long": {"type": "string", "minLength": 4_000_000_000},
    "items": {"type": "array", "minItems": 1_000_000, "items": {"type": "array", "minItems": 1_000_000}},
    "branches": {"$ref": "#/$defs/0", "$defs": {
        str(n): {"properties": {"l": {"$ref": f"#/$defs/{n + 1}"}, "r": {"$ref": f"#/$defs/{n + 1}"}}}
        for n in range(40)
    } | {"40": {}}},
    "product": {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(4)]} for i in range(10)]},
    "properties": {"properties": {f"p{n}": {"type": "string"} for n in range(2000)}},
    "enum": {"enum": [f"value {n} of many" for n in range(4000)]},
}  # fmt: skip


@pytest.mark.parametrize("name", COSTLY)
def test_costly_schemas_neither_hang_nor_eat_the_memory(text, compiler, name):
    started = time.perf_counter()
    try:
        matcher = compiler.matcher(Grammar("json_schema", json.dumps(COSTLY[name])))
    except InvalidOption:
        matcher = None
    rng = random.Random(0)
    for _ in range(60):
        choices = [] if matcher is None else [t for t in allowed(matcher) if t not in ENDS]
        if not choices:
            break
        matcher.commit([rng.choice(choices)])
    assert time.perf_counter() - started < 20  # seconds; the slowest takes two on an idle core


HEAVY = {"type": "string", "pattern": "^(?:[a-z ]*[aeiou][a-z ]{50}){20}$"}


def test_a_grammar_that_grows_too_complex_fails_its_own_answer_alone(compiler):
    """No exception in the middle of a batch: no row has an answer any more, and `error` says why."""
    rng = random.Random(1)
    matcher = compiler.matcher(Grammar("json_schema", json.dumps(HEAVY)))
    for _ in range(50):
        choices = [t for t in allowed(matcher) if t not in ENDS]
        if not choices:
            break
        matcher.commit([rng.choice(choices)])
    assert matcher.error is not None
    assert "too many" in matcher.error
    assert not matcher.finished
    assert not matcher.masks([7, 8], [-1, 0]).any()
    other = compiler.matcher(Grammar("json_schema", json.dumps(HEAVY)))
    assert other.masks([7], [-1]).any()


def test_a_side_path_that_grows_too_complex_is_cut_and_the_answer_goes_on(text, compiler):
    grammar = Grammar("lark", 'start: "x" A | "y" /[a-z]*/\nA: /(\\w{0,500}\\W{0,500}){20}/')
    matcher = compiler.matcher(grammar)
    (x,), (y,), (a,) = text.encode("x"), text.encode("y"), text.encode("a")
    tokens, parents = [7, x, a, a, y, a], [-1, 0, 1, 2, 0, 4]
    masks = matcher.masks(tokens, parents)
    assert not masks[1:].any()  # this round's drafts, all of them
    assert {x, y} <= set(masks[0].nonzero().flatten().tolist())
    assert matcher.error is None
    matcher.commit([y, a])
    assert set(ENDS) <= set(allowed(matcher))


def test_a_token_that_is_not_allowed_is_an_error_and_not_forgotten(text, compiler):
    matcher = compiler.matcher(SCHEMA)
    matcher.commit(text.encode("no"))
    assert matcher.error is not None
    assert not matcher.masks([7], [-1]).any()


def test_compiled_grammars_are_kept_and_answers_do_not_share_their_place(text, compiler):
    one, other = compiler.matcher(SCHEMA), compiler.matcher(SCHEMA)
    one.commit(text.encode('{"name": "'))
    assert allowed(other) == allowed(compiler.matcher(SCHEMA)) != allowed(one)
    assert sum(len(kept.source) for kept in compiler._kept) <= 4 * MAX_SOURCE


def test_the_kept_ones_are_the_last_used(text):
    compiler = GrammarCompiler(text, VOCAB, ENDS)
    grammars = [Grammar("regex", f"a{{{n}}}") for n in range(1, 80)]
    for grammar in grammars:
        compiler.matcher(grammar)
        compiler.matcher(grammars[0])
    assert list(compiler._kept)[-1] == grammars[0]
    assert len(compiler._kept) == 64


def test_threads_may_compile_while_others_ask(text):
    compiler, failed = GrammarCompiler(text, VOCAB, ENDS), []

    def work(seed: int) -> None:
        try:
            for n in range(6):
                grammar = Grammar("regex", f"(a|b){{{n % 3 + 1},9}}")
                matcher = compiler.matcher(grammar)
                matcher.commit(text.encode("a"))
                assert matcher.masks([7], [-1]).any()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_an_answer_does_not_meet_a_limit_that_others_used_up(text, monkeypatch):
    """Matchers of one grammar share their lexer's states, which are limited: a served schema is used for weeks."""
    limits = LLParserLimits(max_lexer_states=600, verbose_errors=False)
    monkeypatch.setattr("ddtree.engine.grammar._LIMITS", limits)
    compiler = GrammarCompiler(text, VOCAB, ENDS)
    branches = "|".join(f"{digit}[a-z]{{0,100}}{digit}" for digit in range(10))
    grammar = Grammar("json_schema", json.dumps({"type": "string", "pattern": f"^({branches})$"}))
    compiled = []
    monkeypatch.setattr(compiler, "_compile", lambda g, real=compiler._compile: compiled.append(g) or real(g))
    for digit in range(10):
        matcher = compiler.matcher(grammar)
        for token in text.encode(f'"{digit}' + "q" * 90):
            assert matcher.masks([7], [-1])[0, token]
            matcher.commit([token])
        assert matcher.error is None
    assert 1 < len(compiled) < 10
