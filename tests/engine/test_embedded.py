"""The real model: not one token changes, and plain greedy decoding is what transformers generates."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ddtree.bench.parity import compare_modes, regrets
from ddtree.config import MODES, EngineConfig, SamplingParams, Speculation
from ddtree.engine import Engine, ops
from ddtree.engine.modes import lay_out

TOKENS = 128
QUICK = 64  # where four prompts stand for twenty
NEAR_TIE = 1e-4
SPECULATIONS = [Speculation(mode=mode) for mode in MODES]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(EngineConfig(dtype="float32", prefix_caching=False))


def prompts(engine: Engine, count: int) -> list[list[int]]:
    """The first `count` prompts of the bench's suite, which takes the categories in turn."""
    lines = (files("ddtree.bench") / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    assert len(lines) == count
    return [engine.text.chat([{"role": "user", "content": json.loads(line)["prompt"]}]) for line in lines]


def check(engine: Engine, count: int, temperature: float, tokens: int = TOKENS) -> dict:
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=1)
    report = compare_modes(engine, prompts(engine, count), params, SPECULATIONS)
    for run in report["runs"]:
        ties = [d for d in run["differences"] if abs(d["margin"]) < NEAR_TIE]
        assert run["equal"] + len(ties) == count, run
        if run["mode"] == "ar":
            assert run["acceptance_length"] == 1.0
        else:
            assert run["acceptance_length"] > 1.3, "speculation happened"
        if run["mode"] == "shadow-linear":
            assert run["shadow_agree"] is True
    return report


def check_against_transformers(engine: Engine, folder, report: dict, count: int, tokens: int = TOKENS) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for ids, answer in zip(prompts(engine, count), report["answers"], strict=True):
        out = oracle.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        if (generated := out[0, len(ids) :].tolist()) != answer:
            place = next(i for i, (a, b) in enumerate(zip(generated, answer, strict=False)) if a != b)
            assert regrets(engine, ids, generated[: place + 1])[-1] < NEAR_TIE, "differs at more than a near-tie"


def test_four_prompts_greedy_equal_plain_decoding_and_transformers(engine, embedded_model):
    check_against_transformers(engine, embedded_model, check(engine, 4, 0.0, QUICK), 4, QUICK)


def test_four_prompts_sampled_equal_plain_decoding(engine):
    check(engine, 4, 0.8, QUICK)


def test_two_threads_in_a_process_of_its_own(embedded_model):
    """A user has more than one; here all have one each where several processes of tests share the cores (conftest)."""
    code = "import test_embedded as t; assert t.torch.get_num_threads() == 2; "
    code += "t.check(t.Engine.load(t.EngineConfig(dtype='float32', prefix_caching=False)), 2, 0.8, 24)"
    here, environment = Path(__file__).parent, os.environ | {"OMP_NUM_THREADS": "2"}
    path = os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_the_text_says_is_accepted_and_changes_no_token(engine, temperature, monkeypatch):
    laid, foreign = [], dict.fromkeys(("linear", "shadow-linear", "tree"), 0)
    honest = ops.HostOps.accept

    def accept(self, batch, own):
        tree = honest(self, batch, own)
        lanes, paths = batch.lanes, batch.state.path.tolist()
        if lanes[0].mode.drafts:
            for lane, path, layout in zip(lanes, paths, laid[-len(lanes) :], strict=True):
                foreign[lane.mode.name] += sum(row in layout.nodes.foreign for row in path)
        return tree

    monkeypatch.setattr(ops, "lay_out", lambda *args: laid.append(lay_out(*args)) or laid[-1])
    monkeypatch.setattr(ops.HostOps, "accept", accept)
    speculations = [
        Speculation("linear", tree_context="branch"),
        Speculation("linear", tree_context="mix"),
        Speculation("shadow-linear", 9, tree_context="mix"),
        Speculation("tree", 9, tree_context="branch"),
        Speculation("tree", 16, tree_context="mix"),
    ]
    chosen = [prompts(engine, 7)[index] for index in (0, 6)]  # code and extraction
    params = SamplingParams(max_tokens=64, temperature=temperature, seed=1)
    plain = engine.generate(chosen, params=[params, replace(params, seed=2)], speculation=Speculation("ar"))
    for speculation in speculations:
        together = engine.generate(chosen, [params, replace(params, seed=2)], speculation)
        assert [g.token_ids for g in together] == [g.token_ids for g in plain]
        assert all(g.shadow is None or g.shadow.agree for g in together)
    alone = engine.generate(chosen[1:], [replace(params, seed=2)], speculations[-1])[0]
    assert (alone.token_ids, alone.rounds) == (together[1].token_ids, together[1].rounds)
    assert all(count > 3 for count in foreign.values()), foreign


@pytest.mark.full
def test_twenty_prompts_greedy_equal_plain_decoding_and_transformers(engine, embedded_model):
    check_against_transformers(engine, embedded_model, check(engine, 20, 0.0), 20)


@pytest.mark.full
def test_twenty_prompts_sampled_equal_plain_decoding(engine):
    check(engine, 20, 0.8)


def test_seeds_matter_and_repeat(engine):
    (ids,) = prompts(engine, 1)
    runs = [
        engine.generate([ids], [SamplingParams(max_tokens=24, temperature=0.9, seed=seed)])[0].token_ids
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_a_prompt_longer_than_a_chunk_reaches_the_drafter(engine):
    """mlx-vlm#2096: only the last chunk did. Acceptance on a long repetitive text is what it is on a short one."""
    line = "The quick brown fox jumps over the lazy dog. "
    lengths = {}
    for times in (10, 60):
        ids = engine.text.encode(line * times)
        lengths[times] = engine.generate([ids], [SamplingParams(max_tokens=40)])[0].acceptance_length
    assert len(engine.text.encode(line * 60)) > 2 * 256
    assert lengths[60] > 0.6 * lengths[10] > 0.6


def test_output_does_not_depend_on_the_drafter(engine, monkeypatch):
    """Also not on one that talks nonsense (z-lab/dflash#172)."""
    (ids,) = prompts(engine, 1)
    params = SamplingParams(max_tokens=32)
    alone = Speculation("tree", tree_context="off")  # the text would help even then
    honest = engine.generate([ids], [params], alone)[0]
    score = engine.drafter.score
    monkeypatch.setattr(engine.drafter, "score", lambda *args: -score(*args))
    nonsense = engine.generate([ids], [params], alone)[0]
    assert nonsense.token_ids == honest.token_ids
    assert nonsense.acceptance_length < 1.1 < honest.acceptance_length
