"""The whole engine on small random models, on every device here: the same tokens in every mode and on each device."""

from pathlib import Path

import pytest
import torch

from ddtree.config import MODES, EngineConfig, SamplingParams, Speculation
from ddtree.drafter import DFlashDrafter
from ddtree.engine import Engine
from ddtree.engine.device import choose_device, choose_dtype, deliver, standing_on
from ddtree.engine.runner import DeviceRunner
from ddtree.errors import InvalidOption
from ddtree.target import LlamaTarget
from dflash_reference import BASE, change, random_tensors, save_checkpoint
from llama_oracle import random_llama
from scripted import CharText

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
OPTIONS = {"tree_budget": 63, "tree_top_k": 16}
PROMPTS = [[5, 9, 33, 2], [17] * 300, [1]]
PARAMS = [
    SamplingParams(max_tokens=24, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.9, seed=4, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0.5, seed=5, ignore_eos=True),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, drafter = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    model = random_llama(vocab_size=61, hidden_size=32, num_hidden_layers=6, max_position_embeddings=512)
    model.save_pretrained(target)
    raw = change(
        BASE,
        {
            "intermediate_size": 48,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 40,
        },
    )
    return target, save_checkpoint(drafter, raw, random_tensors(raw))


def load(folders: tuple[Path, Path], device: str, dtype: torch.dtype, mode: str, rounded: bool = False) -> Engine:
    where = torch.device(device)
    target = LlamaTarget.load(folders[0], dtype, where)
    sizes = (target.spec.vocab_size, target.spec.hidden_size, target.spec.num_layers)
    head = target.draft_head(rounded=rounded)
    drafter = DFlashDrafter.load(folders[1], target.embed, head, sizes, dtype, where, rounded)
    config = EngineConfig(speculation=Speculation(mode=mode, **OPTIONS))
    return Engine(target, drafter, CharText([]), config)  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="numerics that do not depend on a row's company need a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rounded", [False, True])
def test_half_precision_on_a_gpu_gives_the_same_tokens_everywhere(folders, dtype, rounded) -> None:
    """Alone, in a batch, in every mode, whatever makes the drafts."""
    expected = None
    for mode in MODES:
        engine = load(folders, "cuda", dtype, mode, rounded)
        alone = [engine.generate([p], [s])[0] for p, s in zip(PROMPTS, PARAMS, strict=True)]
        batch = engine.generate(PROMPTS, PARAMS)
        expected = expected or [g.token_ids for g in alone]
        assert [g.token_ids for g in alone] == expected, mode
        assert [g.token_ids for g in batch] == expected, mode
        if mode == "tree":
            assert max(g.acceptance_length for g in alone) > 1.2


def test_every_mode_and_device_gives_the_same_tokens(folders) -> None:
    answers = {}
    for device in DEVICES:
        for mode in MODES:
            engine = load(folders, device, torch.float32, mode)
            alone = [engine.generate([p], [s])[0] for p, s in zip(PROMPTS, PARAMS, strict=True)]
            batch = engine.generate(PROMPTS, PARAMS)
            assert [g.token_ids for g in batch] == [g.token_ids for g in alone], (device, mode)
            answers[device, mode] = [g.token_ids for g in alone]
            if mode == "tree":
                assert max(g.acceptance_length for g in alone) > 1.2
            if mode == "shadow-linear":
                assert all(g.shadow.agree for g in alone)
    assert all(answer == answers["cpu", "ar"] for answer in answers.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_in_every_mode(folders, device, dtype) -> None:
    for mode in MODES:
        generation = load(folders, device, dtype, mode).generate(PROMPTS, PARAMS)
        assert [len(g.token_ids) for g in generation] == [24, 30, 12]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a GPU")
@pytest.mark.parametrize("mode", MODES)
def test_after_the_warm_up_no_request_waits_for_a_capture(folders, mode, monkeypatch) -> None:
    expected = load(folders, "cpu", torch.float32, mode).generate(PROMPTS, PARAMS)
    engine = load(folders, "cuda", torch.float32, mode)
    engine.warm_up()
    monkeypatch.setattr(DeviceRunner, "_capture", lambda *args: pytest.fail("a round was captured"))
    found = engine.generate(PROMPTS, PARAMS)
    assert [g.token_ids for g in found] == [g.token_ids for g in expected]
    assert engine.scheduler._runner._made.all(), "rounds ran on the device"  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["gpu", "mps", "cuda:99", "cuda:99999", "cpu:x", "cpu:7", ""])
def test_devices_that_are_not_here_are_refused_by_name(name) -> None:
    with pytest.raises(InvalidOption, match="device"):
        choose_device(name)


def test_auto_picks_a_dtype_that_the_processor_computes_in() -> None:
    for name in DEVICES:
        assert choose_dtype("auto", torch.device(name)) in (torch.bfloat16, torch.float32)
    assert choose_dtype("float16", torch.device("cpu")) is torch.float16


def test_kernels_are_launched_on_the_chosen_gpu() -> None:
    """The device of a tensor does not choose: torch's current one does, in each thread anew."""
    assert isinstance(standing_on(torch.device("cuda:1")), torch.cuda.device)
    with standing_on(torch.device("cpu")):
        pass


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_delivered_arrives_whatever_is_delivered_behind_it(device: str) -> None:
    """Of several deliveries to one place each is read by what is launched behind it, and the host waits for none."""
    there, found = torch.zeros(300, dtype=torch.int64, device=device), []
    if device == "cuda":
        deliver(there, torch.zeros(300, dtype=torch.int64))
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        event = torch.cuda.Event()
    for number in range(5):
        deliver(there, torch.full((300,), number))
        found.append(there.clone())
    if device == "cuda":
        event.record()
        assert not event.query(), "the host has waited"
    assert [(one == number).all().item() for number, one in enumerate(found)] == [True] * 5
