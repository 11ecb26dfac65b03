"""A target and its drafter whose linear layers SGLang quantises as it loads them: trees give plain SGLang's tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from servers import PROMPTS, Server, serve
from tiny import BLOCK, DRAFT_LAYERS, TARGET_LAYERS, make_drafter, make_target

PRODUCTS = 4  # of a layer: qkv, o, gate and up, down


def ask(server: Server) -> list[Any]:
    return [server.generate(ids) for ids in PROMPTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantised")
    make_target(folder / "target")
    make_drafter(folder / "drafter")
    (folder / "script.json").write_text("[]")
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Any]:
    with serve(folder, "plain", ["--quantization", "fp8"]) as server:
        answers = ask(server)
    script = [ids + answer["output_ids"] for ids, answer in zip(PROMPTS, answers, strict=True)]
    (folder / "script.json").write_text(json.dumps(script))
    return answers


def test_a_tree(folder: Path, plain: list[Any]) -> None:
    arguments = ["--quantization", "fp8", "--speculative-draft-model-path", str(folder / "drafter")]
    arguments += ["--speculative-algorithm", "DDTREE", "--speculative-num-draft-tokens", str(BLOCK)]
    with serve(folder, "tree", [*arguments, "--speculative-ddtree-budget", "15"]) as server:
        answers = ask(server)
    assert [answer["output_ids"] for answer in answers] == [answer["output_ids"] for answer in plain]
    assert all(answer["meta_info"]["spec_accept_length"] > 1.5 for answer in answers)
    quantised = {name: (folder / f"{name}.log").read_text().count("FP8:") for name in ("plain", "tree")}
    assert quantised == {"plain": PRODUCTS * TARGET_LAYERS, "tree": PRODUCTS * (TARGET_LAYERS + DRAFT_LAYERS)}
