"""SGLang's benchmarks without servers: distribution tests, answers in company, the end of a run, AWQ's format."""

import itertools
import random
import socket
import threading
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return import_module


def drawing(mode: str, tokens: list[int], seed: int) -> Any:
    """A server whose sampled tokens are drawn from these, and whose greedy ones are a count from its prompt on."""
    draw, alone = random.Random(seed), threading.Lock()  # whoever asks first, the answers are the same set

    def generate(ids: list[int], count: int, **params: Any) -> Any:
        with alone:
            said = [draw.choice(tokens) for _ in range(count)] if params else [ids[0] + i for i in range(count)]
        return {"output_ids": said, "meta_info": {}}

    return SimpleNamespace(mode=mode, name=mode, generate=generate, problem=None, pairwise=lambda: None)


def test_a_distribution_is_held_to_plain_ones(script: Any) -> None:
    checks = script("sglang_checks")
    asked = checks.Asked([[1], [2], [3]], [], 64, [1])
    plain = checks.sampled(drawing("plain", [1, 2, 3], 0), asked)
    assert plain["ok"]
    assert len(plain["p"]) == len(checks.SAMPLED)
    asked.plain["sampled"] = plain
    assert checks.sampled(drawing("tree", [1, 2, 3], 1), asked)["ok"]
    other = checks.sampled(drawing("tree", [1, 2, 3, 3], 2), asked)
    assert not other["ok"]
    assert max(other["p"]) < 0.005
    asked.plain.clear()
    assert checks.sampled(drawing("tree", [1, 2, 3], 3), asked)["p"] == [None] * len(checks.SAMPLED)


def test_answers_in_company(script: Any) -> None:
    loads = script("sglang_loads")
    told: dict[str, Any] = {}
    run = SimpleNamespace(
        prompts=[[10], [20], [30]], options=SimpleNamespace(max_tokens=4), report={"servers": {"tree": told}}
    )
    run.note, run.say = (lambda name, **found: told.update(found)), (lambda *words: None)
    server = drawing("tree", [], 0)
    loads.answers(run, server, 4)
    told["ids"][1] = [0, 0, 0, 0]
    for level in (2, 8):
        loads.company(run, level, server)
    assert told["company"]["8"] == {"ids": [[n, n + 1, n + 2, n + 3] for n in (10, 20, 30)], "same_as_alone": 2}
    assert set(told["company"]) == {"2", "8"}


@pytest.mark.parametrize("over", [False, True])
def test_an_answer_that_the_end_cuts_is_no_failure(over: bool, script: Any, tmp_path: Path) -> None:
    servers = script("sglang_servers")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        end = time.monotonic() + (0.3 if over else 60)
        settings = servers.Settings("", "", tmp_path, [], answer_s=0.3, end=end)
        server = servers.Server("plain", silent.getsockname()[1], None, tmp_path / "log", settings)
        with pytest.raises(servers.Ended if over else TimeoutError):
            server.generate([1], 1)


def test_four_bits_are_packed_as_awq_packs_them(script: Any) -> None:
    awq = script("sglang_awq")
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(0))
    found = awq.quantise(weight, 64)
    assert [tuple(found[name].shape) for name in ("qweight", "qzeros", "scales")] == [(128, 6), (2, 6), (2, 48)]

    def unpacked(packed: torch.Tensor) -> torch.Tensor:
        """By the places of AutoAWQ's kernels: output 8c + n lies in nibble 0, 4, 1, 5, 2, 6, 3 or 7."""
        nibbles = [(packed.long() >> (4 * place)) & 15 for place in (0, 4, 1, 5, 2, 6, 3, 7)]
        return torch.stack(nibbles, -1).flatten(1)

    scales = found["scales"].float().repeat_interleave(64, 0)
    again = (unpacked(found["qweight"]) - unpacked(found["qzeros"]).repeat_interleave(64, 0)) * scales
    assert (again.t() - weight).abs().max() < 0.8 * scales.max()
    with pytest.raises(ValueError, match="48 x 100 has no groups of 64"):
        awq.quantise(weight[:, :100], 64)


def test_a_checkpoint_becomes_awq(script: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    awq = script("sglang_awq")
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    layers = itertools.product(range(2), awq.LAYERS)
    tensors = {f"model.layers.{n}.mlp.{name}.weight": torch.randn(16, 64) for n, name in layers}
    tensors |= {"model.embed_tokens.weight": torch.randn(32, 64), "model.norm.weight": torch.ones(64)}
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text('{"hidden_size": 64}')
    (source / "tokenizer.json").write_text("{}")
    assert awq.convert(source, out, 64) == 2 * len(awq.LAYERS)
    written = load_file(out / "model.safetensors")
    assert sorted({name.rpartition(".")[2] for name in written}) == ["qweight", "qzeros", "scales", "weight"]
    assert torch.equal(written["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"].half())
    assert '"quant_method": "awq"' in (out / "config.json").read_text()
    assert (out / "tokenizer.json").exists()
