"""Short pieces of prompts on the device, padded and as graphs, against the host's forwards of the same pieces."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ddtree.drafter import DFlashDrafter
from ddtree.engine import prompts as prompts_room
from ddtree.engine.prompts import PADDED, DevicePrompts, Prompts
from ddtree.engine.slots import SlotStore
from ddtree.kernels import backend
from ddtree.target import LlamaTarget
from dflash_reference import BASE, change, random_tensors, save_checkpoint
from llama_oracle import random_llama

LENGTH = 50
PIECES = [[5, 9, 2, 40, 7], [3], list(range(20, 36)), [8, 1], [60, 4, 4]]  # one after another, from position 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, drafter = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    model = random_llama(vocab_size=61, hidden_size=32, num_hidden_layers=3, head_dim=16, max_position_embeddings=64)
    model.save_pretrained(target)
    raw = change(BASE, {"num_hidden_layers": 1, "num_target_layers": 3, "dflash_config": {"target_layer_ids": [0, 2]}})
    return target, save_checkpoint(drafter, raw, random_tensors(raw))


def make(folders: tuple[Path, Path], device: torch.device, kernels: bool, monkeypatch) -> tuple[Prompts, SlotStore]:
    monkeypatch.setattr(backend, "KINDS", {device.type} if kernels else set())
    target = LlamaTarget.load(folders[0], torch.float32, device)
    sizes = (target.spec.vocab_size, target.spec.hidden_size, target.spec.num_layers)
    drafter = DFlashDrafter.load(folders[1], target.embed, target.head, sizes, torch.float32, device)
    target.tap(drafter.config.target_layer_ids)
    store = SlotStore(target, drafter, 2, LENGTH)
    if kernels:
        return DevicePrompts(target, drafter, store, device.type == "cuda"), store
    return Prompts(target, drafter, store), store


def caches(store: SlotStore, slot: int, count: int) -> tuple[Tensor, Tensor]:
    return tuple(cache.data[:, slot, :, :count].cpu() for cache in (store.cache, store.drafter_cache))


@torch.inference_mode()
def test_padded_pieces_leave_what_plain_ones_do(folders, device, monkeypatch) -> None:
    host, expected_store = make(folders, device, False, monkeypatch)
    expected, start = [], 0
    for piece in PIECES:
        expected.append(host.forward(1, piece, start).clone())
        start += len(piece)
    prompts, store = make(folders, device, True, monkeypatch)
    store.cache.data[:, :, :, 1:] = float("nan")  # what nobody wrote must not matter
    start = 0
    for piece, logits in zip(PIECES, expected, strict=True):
        torch.testing.assert_close(prompts.forward(1, piece, start), logits, rtol=1e-4, atol=1e-4)
        start += len(piece)
    assert sorted(prompts._made) == [16]
    for found, wanted in zip(caches(store, 1, start), caches(expected_store, 1, start), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert store.drafter_cache.data[:, 0].count_nonzero() == 0, "a neighbour's slot was written"
    if device.type == "cuda":
        assert prompts._made[16].graph is not None


@torch.inference_mode()
def test_without_room_for_padding_a_piece_is_launched_as_it_is(folders, device, monkeypatch) -> None:
    prompts, _ = make(folders, device, True, monkeypatch)
    beginning = list(range(40))
    logits = prompts.forward(0, beginning, 0).clone()  # 64 padded rows do not fit 50 positions
    prompts.forward(1, beginning, 0)
    assert not prompts._made
    tail = prompts.forward(0, [1, 2, 3], 40)  # nor 16 behind 40
    assert not prompts._made
    assert logits.shape == tail.shape == (1, 61)


@torch.inference_mode()
@pytest.mark.parametrize("size", [9, 16, 21, 32])
def test_longer_pieces_are_several_padded_ones(folders, device, monkeypatch, size: int) -> None:
    monkeypatch.setattr(prompts_room, "PADDED", (4, 8))
    monkeypatch.setattr(prompts_room, "SHORT", 32)
    piece = [(7 * i) % 61 for i in range(size)]
    host, expected_store = make(folders, device, False, monkeypatch)
    expected = host.forward(1, piece, 3).clone()
    prompts, store = make(folders, device, True, monkeypatch)
    torch.testing.assert_close(prompts.forward(1, piece, 3), expected, rtol=1e-4, atol=1e-4)
    assert 8 in prompts._made
    assert set(prompts._made) <= {4, 8}
    for found, wanted in zip(caches(store, 1, 3 + size), caches(expected_store, 1, 3 + size), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_every_kind_of_piece_is_warmed_up(folders, device, monkeypatch) -> None:
    prompts, store = make(folders, device, True, monkeypatch)
    store.length = 4096
    # Those of up to SHORT tokens go as padded ones: they would compile nothing for longer pieces.
    assert prompts.sizes(1024) == [*reversed(PADDED), 258, 272, 1024]
    assert prompts.sizes(256) == prompts.sizes(64) == [*reversed(PADDED)]
    store.length = 200  # where they do not, they are launched as they are
    assert prompts.sizes(1024) == [*reversed(PADDED), 130, 144]
    store.length = 50
    assert prompts.sizes(1024) == [32, 16]
