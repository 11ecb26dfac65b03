"""A drafter's pairwise head inside SGLang: the tokens are plain SGLang's, whatever it says; a good one saves rounds."""

import json
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from servers import PROMPTS, SAMPLED, TOKENS, Server, serve
from tiny import BLOCK, HIDDEN, VOCABULARY, make_drafter, make_target

from ddtree.drafter import PairwiseHead, fingerprint

BUDGET, TOP_K, FEW = 7, 4, {"ddtree_budget": 4}
THRICE = PROMPTS[:2]  # what is asked in three ways
HELPS, LIES = "helps", "lies"  # a head that knows the answers, and one of random numbers


@dataclass
class Said:
    """What a server said."""

    alone: list[Any]
    chained: list[Any]  # by a chain, as the request asks for
    few: list[Any]  # by a tree of fewer nodes
    branched: list[Any]  # by a tree, whose path is committed
    sampled: Any
    told: Any  # its /server_info, of the plug-in

    def tokens(self) -> list[list[int]]:
        """Of everything that plain decoding says too."""
        return [list(answer["output_ids"]) for answer in (*self.alone, self.sampled)]


def ask(server: Server, speculates: bool = True) -> Said:
    alone = [server.generate(ids) for ids in PROMPTS]
    sampled, told = server.generate(PROMPTS[1], **SAMPLED), None
    chained, few, branched = [], [], []
    if speculates:
        chained = [server.generate(ids, custom_params={"ddtree_mode": "linear"}) for ids in THRICE]
        few = [server.generate(ids, custom_params=FEW) for ids in THRICE]
        branched = [server.generate(ids, custom_params={"ddtree_mode": "tree"}) for ids in THRICE]
        told = server.info()["internal_states"][0]["ddtree"]
    return Said(alone, chained, few, branched, sampled, told)


def rounds(answers: list[Any]) -> list[int]:
    return [answer["meta_info"]["spec_verify_ct"] for answer in answers]


def ids(answers: list[Any]) -> list[list[int]]:
    return [list(answer["output_ids"]) for answer in answers]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairwise")
    make_target(folder / "target")
    for name in (HELPS, LIES):
        make_drafter(folder / name)
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> Said:
    """Its answers are the drafter's script, and one of the heads knows which token follows which in them."""
    with serve(folder, "plain", []) as server:
        said = ask(server, speculates=False)
    asked = [*PROMPTS, PROMPTS[1]]
    script = [ids + answer for ids, answer in zip(asked, said.tokens(), strict=True)]
    (folder / "script.json").write_text(json.dumps(script))
    known = sorted({token for line in script for token in line})
    place = {token: i for i, token in enumerate(known)}
    follows = torch.zeros(len(known), len(known))
    for line in script:
        for before, behind in pairwise(line):
            follows[place[behind], place[before]] = 6.0
    write(folder / HELPS, torch.tensor(known), torch.eye(len(known)), follows, None)
    torch.manual_seed(3)
    draw = [torch.randn(VOCABULARY, 6) for _ in range(2)]
    write(folder / LIES, torch.arange(VOCABULARY), 2 * draw[0], draw[1], torch.randn(6, HIDDEN))
    return said


def write(drafter: Path, known: torch.Tensor, before: torch.Tensor, behind: torch.Tensor, gate: Any) -> None:
    mark = fingerprint(load_file(drafter / "model.safetensors")["norm.weight"])
    rest = torch.zeros(before.shape[1])
    PairwiseHead.of(known, VOCABULARY, (before, behind), rest, gate, mark).write(drafter / PairwiseHead.FILE)


def serving(folder: Path, name: str, drafter: str, *more: str, **how: Any) -> Any:
    arguments = ["--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(folder / drafter)]
    arguments += ["--speculative-num-draft-tokens", str(BLOCK), "--speculative-ddtree-budget", str(BUDGET)]
    arguments += ["--speculative-ddtree-top-k", str(TOP_K)]
    return serve(folder, name, [*arguments, *more], **how)


@pytest.fixture(scope="module")
def off(folder: Path, plain: Said) -> Said:
    with serving(folder, "off", HELPS, "--speculative-ddtree-pairwise", "off") as server:
        return ask(server)


@pytest.fixture(scope="module")
def helped(folder: Path, plain: Said) -> Said:
    """By default, and with rounds that end as graphs end them."""
    with serving(folder, "helped", HELPS, graphs=True) as server:
        return ask(server)


SHADOWED = ["--speculative-ddtree-pairwise", "on", "--speculative-ddtree-mode", "shadow-linear"]


@pytest.fixture(scope="module")
def lied(folder: Path, plain: Said) -> Said:
    with serving(folder, "lied", LIES, *SHADOWED) as server:
        return ask(server)


@pytest.fixture(scope="module")
def shared(folder: Path, plain: Said) -> Said:
    """The same by two processes that share the model, with rounds that end as graphs end them."""
    with serving(folder, "shared", LIES, *SHADOWED, graphs=True, ranks=2) as server:
        return ask(server)


def test_no_token_depends_on_the_head(plain: Said, off: Said, helped: Said, lied: Said, shared: Said) -> None:
    assert all(len(tokens) == TOKENS for tokens in plain.tokens())
    for said in (off, helped, lied, shared):
        assert said.tokens() == plain.tokens()
        assert ids(said.chained) == ids(said.few) == ids(said.branched) == ids(plain.alone)[: len(THRICE)]


def test_two_ranks_grow_the_trees_of_one(folder: Path, lied: Said, shared: Said) -> None:
    """Candidates are gathered, and so is what the head's gate makes: each rank proposes what one alone would."""
    capped = [[answer["meta_info"]["spec_cap_length"] for answer in said.alone] for said in (lied, shared)]
    assert capped[0] == capped[1]
    for asked in ("alone", "chained", "few", "branched"):
        assert rounds(getattr(shared, asked)) == rounds(getattr(lied, asked)), asked
    assert rounds(shared.branched) != rounds(shared.chained)
    one, two = ([*(folder / f"{name}.chains").read_text().splitlines()] for name in ("lied", "shared"))
    assert Counter(two) == Counter(one + one)


def test_a_head_that_knows_saves_rounds(off: Said, helped: Said) -> None:
    assert sum(rounds(helped.alone)) < 0.9 * sum(rounds(off.alone))
    assert sum(rounds(helped.few)) < 0.9 * sum(rounds(off.few))
    assert all(ours <= theirs for ours, theirs in zip(rounds(helped.alone), rounds(off.alone), strict=True))


def test_a_head_that_lies_costs_rounds(off: Said, lied: Said) -> None:
    told = [answer["meta_info"]["spec_cap_length"] for answer in lied.alone]  # what the tree would have committed
    kept = [answer["meta_info"]["spec_accept_length"] for answer in off.alone]
    assert sum(told) < 0.9 * sum(kept)


def test_chains_are_stock(off: Said, helped: Said, lied: Said) -> None:
    """They take as many rounds with a head as without, whether a request asks for one or a tree is shadowed."""
    chained = rounds(off.chained)
    assert rounds(helped.chained) == rounds(lied.chained) == rounds(lied.alone)[: len(THRICE)] == chained
    assert chained != rounds(off.alone)[: len(THRICE)]


def test_the_server_says_what_it_does(folder: Path, off: Said, helped: Said, lied: Said) -> None:
    usual = {"mode": "tree", "budget": BUDGET, "top_k": TOP_K}
    assert off.told == usual | {"pairwise": "off"}
    assert helped.told == usual | {"pairwise": "on"}
    assert lied.told == usual | {"pairwise": "on", "mode": "shadow-linear"}
    assert f"trees go by the pairwise head in {folder / HELPS}" in (folder / "helped.log").read_text()
    assert "DDTREE: no pairwise head, as --speculative-ddtree-pairwise" in (folder / "off.log").read_text()
