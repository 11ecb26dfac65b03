"""What lives from round to round: plans that are written once, and masks that fit."""

from dataclasses import astuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddtree.kernels import PlanRow
from ddtree.sglang.adapters import ADAPTERS
from ddtree.sglang.options import Options
from ddtree.sglang.room import MaskRoom, Room

BLOCK, CONTEXT, WIDTH = 8, 100, 16
SHADOW = PlanRow(tree=True, chain=True, budget=3, ranks=8, depth=BLOCK - 1)


def room(mode: str = "tree", backend: Any = None) -> Room:
    options = Options(mode, 15)
    runner = SimpleNamespace(
        server_args=SimpleNamespace(
            get_attention_backends=lambda: ("triton", "triton"),
            speculative_attention_mode="prefill",
            enable_deterministic_inference=False,
        ),
        model_config=SimpleNamespace(context_len=CONTEXT),
        attn_backend=backend,
    )
    usual, width = options.plan(None, BLOCK), options.rows(BLOCK)
    shape = {"width": width, "depth": BLOCK - 1, "usual": usual}
    worker = SimpleNamespace(model_runner=runner, device="cpu", sglang=ADAPTERS["0.5.17"], **shape)
    return Room(worker, 3)


@pytest.mark.parametrize("mode", ["tree", "shadow-linear"])
def test_usual_plans_are_there_from_the_start(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = room(mode)
    usual = made.planned[0]
    monkeypatch.setattr("ddtree.kernels.Plan.write", lambda *_: pytest.fail("written again"))
    for size in (1, 3, 2):
        assert made.tell([usual] * size, made.state.tokens.shape[1]) == (mode == "shadow-linear")
    assert (made.plan.settings == made.plan.settings[0]).all()
    assert made.shadows.tolist() == [mode == "shadow-linear"] * 16


def test_a_plan_of_its_own_is_written_and_taken_back() -> None:
    made = room()
    usual, before = made.planned[0], made.plan.settings.clone()
    assert made.tell([usual, SHADOW], WIDTH)
    assert made.plan.settings[1].tolist() == list(astuple(SHADOW))
    assert made.shadows.tolist()[:3] == [False, True, False]
    assert not made.tell([usual], WIDTH)  # the second request left
    assert not made.tell([usual, usual], WIDTH)
    assert torch.equal(made.plan.settings, before)
    assert not made.shadows.any()


def test_a_mask_goes_into_the_graphs_own_buffer_where_it_fits() -> None:
    buffer = torch.zeros(500, dtype=torch.uint8)
    backend = SimpleNamespace(verify_mask=SimpleNamespace(buffer=buffer, fits=lambda size: size <= 2))
    masks = MaskRoom(backend, CONTEXT, WIDTH, prefix=False)
    written, carried = masks.take(torch.tensor([5, 6]), 11)
    assert written.data_ptr() == carried.data_ptr() == buffer.data_ptr()
    assert carried.numel() == 1
    written, carried = masks.take(torch.tensor([5, 6, 7]), 18)
    need = WIDTH * (18 + 3 * WIDTH)
    assert written.numel() >= need == carried.numel()
    assert written.data_ptr() != buffer.data_ptr()


def test_a_mask_of_the_prefix_too_is_a_buffer_of_ours() -> None:
    backend = SimpleNamespace(verify_mask=SimpleNamespace(buffer=torch.zeros(9), fits=lambda size: True))
    masks = MaskRoom(backend, CONTEXT, WIDTH, prefix=True, packs=True)
    written, carried = masks.take(torch.tensor([5]), 5)
    assert carried.dtype == torch.bool
    assert carried.numel() == WIDTH * (5 + WIDTH)
    again, _ = masks.take(torch.tensor([6]), 6)
    assert again.data_ptr() == written.data_ptr()  # grown with room to spare
