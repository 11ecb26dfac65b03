"""Every mode gives plain SGLang's own tokens in float32, whatever is asked, with a drafter that is often right."""

import json
from pathlib import Path
from typing import Any

import pytest
from servers import CONTEXT, LONG, PROMPTS, REGEX, TOKENS, Answers, ask, serve
from tiny import BLOCK, make_drafter, make_target

BUDGET = 15
REQUESTS = {
    "linear": {"ddtree_mode": "linear"},
    "small": {"ddtree_budget": 3},
    "unknown": {"ddtree_mode": "bush"},
    "large": {"ddtree_budget": BUDGET + 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, and what plain SGLang answers: the script of the drafter."""
    folder = tmp_path_factory.mktemp("sglang")
    make_target(folder / "target")
    make_drafter(folder / "drafter")
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> Answers:
    with serve(folder, "plain", []) as server:
        answers = ask(server, {})
    asked = [*PROMPTS, LONG, PROMPTS[1], PROMPTS[1], PROMPTS[1], PROMPTS[0]]
    said = [*answers.alone, answers.limit, *answers.sampled, answers.biased]
    script = [ids + answer["output_ids"] for ids, answer in zip(asked, said, strict=True)]
    (folder / "script.json").write_text(json.dumps(script))
    return answers


@pytest.fixture(scope="module", params=["linear", "shadow-linear", "tree"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def answers(folder: Path, plain: Answers, mode: str) -> Answers:
    arguments = ["--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(folder / "drafter")]
    arguments += ["--speculative-num-draft-tokens", str(BLOCK), "--speculative-ddtree-mode", mode]
    with serve(folder, mode, [*arguments, "--speculative-ddtree-budget", str(BUDGET)]) as server:
        return ask(server, REQUESTS)


def ids(answer: Any) -> list[int]:
    """The tokens of an answer."""
    assert "output_ids" in answer, answer
    return list(answer["output_ids"])


def test_greedy(plain: Answers, answers: Answers) -> None:
    assert [ids(a) for a in answers.alone] == [ids(a) for a in plain.alone]
    assert all(len(ids(a)) == TOKENS for a in answers.alone)
    assert all(a["meta_info"]["spec_accept_length"] > 1.2 for a in answers.alone)


def test_several_at_once(plain: Answers, answers: Answers) -> None:
    assert [ids(a) for a in answers.together] == [ids(a) for a in plain.alone]


def test_prefix_is_reused(plain: Answers, answers: Answers) -> None:
    assert ids(answers.continued) == ids(plain.alone[0])[TOKENS // 2 :]
    assert answers.continued["meta_info"]["cached_tokens"] > len(PROMPTS[0])


def test_up_to_the_context_limit(plain: Answers, answers: Answers) -> None:
    assert ids(answers.limit) == ids(plain.limit)
    assert answers.limit["meta_info"]["finish_reason"]["type"] == "length"
    assert len(LONG) + len(ids(answers.limit)) >= CONTEXT - 2


def test_sampled(plain: Answers, answers: Answers, mode: str) -> None:
    if mode == "linear":
        pytest.skip("stock DFLASH samples on a GPU alone, and is greedy here")
    assert [ids(a) for a in answers.sampled] == [ids(a) for a in plain.sampled]
    assert len({tuple(ids(a)) for a in answers.sampled} | {tuple(ids(plain.alone[1]))}) > 2


def test_regex(plain: Answers, answers: Answers) -> None:
    assert ids(answers.regex) == ids(plain.regex)
    assert answers.regex["text"] == plain.regex["text"]
    assert __import__("re").match(REGEX, answers.regex["text"])


def test_bias(plain: Answers, answers: Answers) -> None:
    assert ids(answers.biased) == ids(plain.biased) != ids(plain.alone[0])


def test_abort(plain: Answers, answers: Answers) -> None:
    assert answers.aborted["meta_info"]["finish_reason"]["type"] == "abort"
    assert ids(answers.after) == ids(plain.alone[0])
