"""Every mode gives plain SGLang's own tokens in float32, whatever is asked, with a drafter that is often right."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from servers import CONTEXT, LONG, PENALISED, PENALTIES, PROMPTS, REGEX, TOKENS, Answers, ask, serve
from tiny import BLOCK, make_drafter, make_target

from ddtree.sglang.stages import STAGES

BUDGET = 15
CHUNK = 32  # of a prefill; plain SGLang takes every prompt at once
GRAPHS = " by graphs"  # its rounds end as captured graphs end them, wherever the argmax is what is asked for
SERVERS = ["linear", "shadow-linear", "tree" + GRAPHS]
REQUESTS = {
    "linear": {"ddtree_mode": "linear"},
    "small": {"ddtree_budget": 3},
    "shadowed": {"ddtree_mode": "shadow-linear", "ddtree_budget": 3},
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
    asked = [*PROMPTS, LONG, PROMPTS[1], PROMPTS[1], PROMPTS[1], PROMPTS[0], *PROMPTS]
    said = [*answers.alone, answers.limit, *answers.sampled, answers.biased, *answers.penalised]
    script = [ids + answer["output_ids"] for ids, answer in zip(asked, said, strict=True)]
    (folder / "script.json").write_text(json.dumps(script))
    return answers


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def mode(server: str) -> str:
    return server.removesuffix(GRAPHS)


@pytest.fixture(scope="module")
def answers(folder: Path, plain: Answers, server: str, mode: str) -> Answers:
    arguments = ["--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(folder / "drafter")]
    arguments += ["--speculative-num-draft-tokens", str(BLOCK), "--speculative-ddtree-mode", mode]
    arguments += ["--speculative-ddtree-budget", str(BUDGET), "--chunked-prefill-size", str(CHUNK)]
    with serve(folder, server, arguments, server.endswith(GRAPHS)) as running:
        found = ask(running, REQUESTS)
    (folder / f"{server}.json").write_text(json.dumps(asdict(found)))
    return found


@pytest.fixture
def linear(folder: Path, answers: Answers) -> Answers:
    """What the linear server answered; it comes first."""
    path = folder / "linear.json"
    if not path.exists():
        pytest.skip("nothing to compare with: the linear server was not asked")
    return Answers(**json.loads(path.read_text()))


def rounds(answers: Answers) -> list[int]:
    """Verify rounds of each of the prompts."""
    return [answer["meta_info"]["spec_verify_ct"] for answer in answers.alone]


def ids(answer: Any) -> list[int]:
    """The tokens of an answer."""
    assert "output_ids" in answer, answer
    return list(answer["output_ids"])


def test_greedy(plain: Answers, answers: Answers) -> None:
    assert [ids(a) for a in answers.alone] == [ids(a) for a in plain.alone]
    assert all(len(ids(a)) == TOKENS for a in answers.alone)
    assert all(a["meta_info"]["spec_accept_length"] > 1.5 for a in answers.alone)


def test_several_at_once(plain: Answers, answers: Answers) -> None:
    assert [ids(a) for a in answers.together] == [ids(a) for a in plain.alone]


def test_prefix_is_reused(plain: Answers, answers: Answers) -> None:
    assert ids(answers.continued) == ids(plain.alone[0])[TOKENS // 2 :]
    assert answers.continued["meta_info"]["cached_tokens"] > len(PROMPTS[0])


def test_up_to_the_context_limit(plain: Answers, answers: Answers) -> None:
    assert ids(answers.limit) == ids(plain.limit)
    assert answers.limit["meta_info"]["finish_reason"]["type"] == "length"
    assert len(LONG) + len(ids(answers.limit)) >= CONTEXT - 2


def test_prefill_in_chunks(folder: Path, answers: Answers, server: str) -> None:
    """The long prompt of the test above; its drafter's context comes in pieces too."""
    pieces = re.findall(r"Prefill batch.*#new-token: (\d+)", (folder / f"{server}.log").read_text())
    assert [int(piece) for piece in pieces].count(CHUNK) >= len(LONG) // CHUNK
    assert answers.limit["meta_info"]["spec_accept_length"] > 1.5


def test_stops_in_the_middle_of_a_path(plain: Answers, answers: Answers) -> None:
    assert ids(answers.stopped) == ids(plain.stopped) == ids(plain.alone[0])[: TOKENS // 2 + 1]
    assert answers.stopped["meta_info"]["finish_reason"] == plain.stopped["meta_info"]["finish_reason"]


def test_sampled(plain: Answers, answers: Answers, mode: str) -> None:
    if mode == "linear":
        pytest.skip("stock DFLASH samples on a GPU alone, and is greedy here")
    assert [ids(a) for a in answers.sampled] == [ids(a) for a in plain.sampled]
    assert len({tuple(ids(a)) for a in answers.sampled} | {tuple(ids(plain.alone[1]))}) > 2


def test_regex(plain: Answers, answers: Answers) -> None:
    assert ids(answers.regex) == ids(plain.regex)
    assert answers.regex["text"] == plain.regex["text"]
    assert re.fullmatch(REGEX, answers.regex["text"])


def test_bias(plain: Answers, answers: Answers) -> None:
    assert ids(answers.biased) == ids(plain.biased) != ids(plain.alone[0])


def test_penalties(plain: Answers, answers: Answers, mode: str) -> None:
    """Every committed token counts, and every token of a row's own path."""
    if mode == "linear":
        pytest.skip("stock DFLASH leaves penalties out")
    wanted = [ids(a) for a in plain.penalised]
    assert [ids(a) for a in answers.penalised] == wanted
    assert [ids(a) for a in answers.penalised_together] == wanted
    assert [ids(a) for a in answers.unpenalised] == [ids(a) for a in plain.unpenalised]
    told = [ids(a) != one for a, one in zip(plain.unpenalised, wanted, strict=True)]
    assert told == [bool(penalties) for penalties in PENALTIES]
    assert all(len(set(one)) < PENALISED for one in wanted)  # tokens are said again, and counted again
    assert sum(a["meta_info"]["spec_accept_length"] for a in answers.penalised) > 1.5 * len(wanted)


def test_least_length(plain: Answers, answers: Answers, mode: str) -> None:
    if mode == "linear":
        pytest.skip("stock DFLASH leaves penalties out")
    assert ids(plain.least)[-1] == 0
    assert ids(answers.least) == ids(plain.least)
    assert len(ids(plain.least)) == 5


def test_abort(plain: Answers, answers: Answers) -> None:
    assert answers.aborted["meta_info"]["finish_reason"]["type"] == "abort"
    assert ids(answers.after) == ids(plain.alone[0])


def test_acceptance(answers: Answers, linear: Answers, mode: str) -> None:
    chain = sum(rounds(linear))
    if mode == "tree":
        assert sum(rounds(answers)) < chain
    else:  # shadow-linear commits what DFLASH commits
        assert rounds(answers) == rounds(linear)
    told = [answer["meta_info"].get("spec_cap_length") for answer in answers.alone]
    if mode == "shadow-linear":
        accepted = [answer["meta_info"]["spec_accept_length"] for answer in answers.alone]
        assert all(tree >= kept - 0.5 for tree, kept in zip(told, accepted, strict=True))
        assert sum(told) > 1.1 * sum(accepted)
    else:
        assert told == [None] * len(PROMPTS)


def test_metrics(answers: Answers, mode: str) -> None:
    found = {name: float(value) for name, labels, value in counters(answers.metrics) if f'mode="{mode}"' in labels}
    counted, accepted = found.pop("ddtree_mode_rounds"), found.pop("ddtree_mode_accepted_tokens")
    assert counted > sum(rounds(answers))
    assert accepted > 0.2 * counted
    shadows = found.pop("ddtree_shadow_accepted_tokens", 0.0)
    assert not found
    assert bool(shadows) == (mode != "linear")  # one request asked the server of trees for it
    assert mode != "shadow-linear" or shadows > accepted
    stages = {labels: float(value) for name, labels, value in counters(answers.metrics) if "stage_seconds" in name}
    assert len(stages) == (0 if mode == "linear" else len(STAGES))
    assert all(seconds > 0 for seconds in stages.values())


def counters(metrics: str) -> list[tuple[str, str, str]]:
    """The plug-in's counters: name, labels, value."""
    return re.findall(r"^(ddtree_\w+)_total\{([^}]*)\} (\S+)$", metrics, re.MULTILINE)


def test_the_drafter_sees_what_it_sees_in_stock(folder: Path, linear: Answers, server: str) -> None:
    """Its own proposals depend on every feature in its cache, so one row at a wrong place would show."""

    def chains(name: str) -> dict[str, list[int]]:
        lines = [json.loads(line) for line in (folder / f"{name}.chains").read_text().splitlines()]
        return {json.dumps(line["key"]): line["chain"] for line in lines}

    ours, stock = chains(server), chains("linear")
    common = ours.keys() & stock.keys()
    assert len(common) > 20
    assert {key: ours[key] for key in common} == {key: stock[key] for key in common}


def test_requests_narrow_what_the_server_does(plain: Answers, answers: Answers, linear: Answers, mode: str) -> None:
    assert ids(answers.requests["linear"]) == ids(plain.alone[0])
    assert answers.requests["linear"]["meta_info"]["spec_verify_ct"] == rounds(linear)[0]
    if mode != "linear":
        assert ids(answers.requests["small"]) == ids(plain.alone[0])
        assert ids(answers.requests["shadowed"]) == ids(plain.alone[0])
        assert answers.requests["shadowed"]["meta_info"]["spec_verify_ct"] == rounds(linear)[0], "it commits the chain"
        assert "from 1 to 15, not 16" in json.dumps(answers.requests["large"])
        assert "'bush' is unknown" in json.dumps(answers.requests["unknown"])
    else:
        assert all(
            "cannot ask for trees" in json.dumps(answers.requests[name])
            for name in ("small", "shadowed", "large", "unknown")
        )
