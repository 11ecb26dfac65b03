"""What a seed draws, and whom it depends on: SGLang's own sampler, and what the tests' servers mend of it."""

import warnings
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

VOCABULARY = 64
GREEDY, FREE, FEW = {"top_ks": 1}, {}, {"top_ks": 5, "top_ps": 0.75}


@pytest.fixture(scope="module", autouse=True)
def _import_sglang() -> None:
    """Once, with its warnings, which are errors here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_module("ddtree.sglang.worker")


@cache
def stand_in() -> Any:
    """What the tests' servers load. Not by its name: SGLang would take it for a plug-in of this process too."""
    spec = spec_from_file_location("stand_in", Path(__file__).parent / "plugin" / "ddtree_cpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of(asked: dict[str, float]) -> Any:
    """As SGLang's scheduler makes it for a batch of one request."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.sampling.sampling_params import TOP_K_ALL

    top_k, top_p, min_p = int(asked.get("top_ks", TOP_K_ALL)), asked.get("top_ps", 1.0), asked.get("min_ps", 0.0)
    return SamplingBatchInfo(
        temperatures=torch.ones(1, 1),
        top_ks=torch.tensor([top_k], dtype=torch.int32),
        top_ps=torch.tensor([top_p]),
        min_ps=torch.tensor([min_p]),
        is_all_greedy=top_k <= 1,
        is_any_greedy=top_k <= 1,
        need_top_k_sampling=top_k != TOP_K_ALL,
        need_top_p_sampling=top_p != 1.0,
        need_min_p_sampling=min_p > 0,
        vocab_size=VOCABULARY,
        penalizer_orchestrator=SimpleNamespace(merge=lambda other: None, filter=lambda kept: None),
        sampling_seed=torch.tensor([7]),
        device="cpu",
    )


def behind(first: dict[str, float], then: dict[str, float], leaves: bool) -> Any:
    """Of a request that came into the batch of another, which has ended and leaves before the next round."""
    info, original = of(first), type(of(then)).filter_batch
    info.merge_batch(of(then))
    filtered: Callable[..., None] = partial(stand_in().leave, original) if leaves else original
    filtered(info, [1], torch.tensor([1]))
    return info


def flags(info: Any) -> dict[str, bool]:
    names = (name for name in vars(info) if name.startswith(("is_a", "need_")))
    return {name: getattr(info, name) for name in names}


PAIRS = [(first, then) for first in (GREEDY, FREE, FEW, {"min_ps": 0.1}) for then in (GREEDY, FREE, FEW)]


@pytest.mark.parametrize(("first", "then"), PAIRS)
def test_who_has_left_asks_for_nothing(first: dict[str, float], then: dict[str, float]) -> None:
    found = flags(behind(first, then, leaves=True))
    assert found == flags(of(then))
    assert len(found) == 5


def test_stock_draws_by_what_others_had_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a seed alone does not say which tokens come. Whoever filters itself is drawn alike in any company."""
    positions = torch.arange(10, 26)
    draw = partial(drawn, monkeypatch, positions)
    assert draw(behind(GREEDY, FREE, leaves=True)) == draw(of(FREE)) != draw(behind(GREEDY, FREE, leaves=False))
    assert draw(behind(GREEDY, FREE, leaves=False)) == draw(of({"top_ks": VOCABULARY}))
    assert draw(behind(GREEDY, FEW, leaves=False)) == draw(of(FEW))


def drawn(monkeypatch: pytest.MonkeyPatch, positions: torch.Tensor, info: Any) -> list[int]:
    """By the plug-in and SGLang's sampler, for one request at these places."""
    from sglang.srt.layers import sampler

    from ddtree.sglang.choose import choose

    execution = SimpleNamespace(
        kernel=SimpleNamespace(sampling_backend="pytorch"),
        deterministic=SimpleNamespace(enable_deterministic_inference=True, rl_on_policy_target=None),
        features=SimpleNamespace(sampling_mask_max_tokens=0),
    )
    monkeypatch.setattr(torch._dynamo.config, "disable", True)
    monkeypatch.setattr(sampler, "get_exec", lambda: execution)
    monkeypatch.setattr(sampler, "murmur_hash32", partial(stand_in().murmur, None))
    logits = torch.randn(len(positions), VOCABULARY, generator=torch.Generator().manual_seed(1))
    group = SimpleNamespace(world_size=1, device_group=None)
    monkeypatch.setattr(sampler, "get_tp_group", lambda: group, raising=False)  # 0.5.17
    monkeypatch.setattr(sampler, "get_parallel", lambda: SimpleNamespace(tp_group=group))  # 0.5.23
    monkeypatch.setattr(sampler, "is_dp_attention_enabled", lambda: False)
    return choose(logits, info, positions[None], sampler.Sampler(), group)[0].tolist()
