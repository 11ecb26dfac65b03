"""What ends a round inside SGLang's graphs equals what ends it outside; padding and disarmed rounds keep nothing."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_rooms import BLOCK, LENGTHS, RUNNING, SIZE, VOCABULARY, Head, make_room, recorded, staged

from ddtree import kernels
from ddtree.errors import InvalidOption
from ddtree.sglang import rows as lay
from ddtree.sglang.options import Options
from ddtree.sglang.room import Room
from ddtree.sglang.tails import VARIABLE, Growth, Keeping, grow, wanted

FEATURES = 5


def own_logits(room: Room) -> torch.Tensor:
    """Of a target that follows the drafter's best at every row of every request, and so accepts a path."""
    logits = torch.zeros(SIZE, room.width, VOCABULARY)
    state = room.state
    for b in range(SIZE):
        logits[b, :, 7] = 1.0
        for row in reversed(range(1, room.width)):
            if state.parents[b, row] >= 0:
                logits[b, state.parents[b, row], state.tokens[b, row]] = 2.0 - 0.01 * row
    return logits.view(-1, VOCABULARY).to(state.tokens.device)


class Worker:
    """Remembers what was moved."""

    _fused_kv_helper = SimpleNamespace(workspace=torch.ones(3), name="no tensor")

    def __init__(self, room: Room) -> None:
        self.room = room
        self.moved: list[Any] = []

    def graph_room(self) -> Room:
        return self.room

    def move(self, kept: lay.Kept, block: lay.Block, hidden: torch.Tensor) -> None:
        self.moved.append((kept.from_slots.clone(), kept.to_slots.clone(), hidden[kept.features.view(-1)], block))


@pytest.mark.parametrize(
    ("backend", "fits", "laid"), [("triton", 3, {3}), ("triton", 2, set()), ("flashinfer", 3, set())]
)
def test_growth(backend: str, fits: int, laid: set[int], device: torch.device) -> None:
    room, other = make_room(device, backend=backend, fits=fits), make_room(device)
    head = Head(device)
    for one in (room, other):
        staged(one, 0)
    growth = Growth(head, room)
    hidden = torch.zeros(SIZE * BLOCK, 4)
    growth(hidden, torch.zeros(SIZE * BLOCK))
    assert head.seen == [hidden]
    assert growth.laid.keys() == laid
    buffer = room.mask.backend.verify_mask.buffer
    assert growth.has_laid(SIZE, buffer) == bool(laid)
    assert not growth.has_laid(SIZE - 1, buffer)
    assert not growth.has_laid(SIZE, buffer.clone())
    kernels.build(head.log_q, head.tokens, other.plan, other.state, other.width)
    assert torch.equal(room.state.tokens[:SIZE], other.state.tokens[:SIZE])
    assert torch.equal(room.state.ancestors[:SIZE], other.state.ancestors[:SIZE])
    now, apart = room.view(SIZE), other.view(SIZE)
    mask = torch.full_like(other.mask.backend.verify_mask.buffer, 9)
    lay.lay(apart.rows, torch.tensor(LENGTHS, device=device), mask, apart.links, prefix=False)
    same = [torch.equal(a, b) for a, b in zip(vars(now.links).values(), vars(apart.links).values(), strict=True)]
    same.append(torch.equal(room.mask.backend.verify_mask.buffer, mask))
    assert all(same) if laid else not any(same)


def test_deterministic_inference_reads_the_cached_tokens_of_a_graphs_mask(device: torch.device) -> None:
    room = make_room(device, deterministic=True)
    buffer = room.mask.backend.verify_mask.buffer  # whose every byte is 9 before
    for more in (0, 3):  # the second round's lines lie elsewhere
        staged(room, 0, more)
        Growth(Head(device), room)(torch.zeros(SIZE * BLOCK, 4))
        lengths, start = room.block.lengths[:SIZE].tolist(), 0
        for length in lengths:
            lines = buffer[start : start + room.width * (length + room.width)].view(room.width, -1)
            assert (lines[:, :length] == 1).all()
            assert lines[:, length:].max() == 1
            start += lines.numel()
        buffer.fill_(0)
    written, carried = room.mask.take(torch.tensor(lengths), sum(lengths))
    assert written.data_ptr() == carried.data_ptr() == buffer.data_ptr()


@pytest.mark.parametrize("mode", ["tree", "shadow-linear"])
def test_keeping(mode: str, device: torch.device) -> None:
    room = make_room(device, mode)
    staged(room, RUNNING)
    grow(Head(device).read(SIZE), None, room)
    logits, hidden = own_logits(room), torch.randn(SIZE * room.width, FEATURES, device=device)
    worker = Worker(room)
    keeping = Keeping(worker, mode != "tree", {SIZE: lay.Kept.allocate(SIZE, BLOCK, device)})
    keeping.keep(room, logits, hidden, torch.tensor([*LENGTHS[:RUNNING], 1], device=device), SIZE)
    kept = keeping.read(SIZE, RUNNING)

    now, own = room.view(RUNNING), logits.argmax(-1).view(SIZE, room.width)[:RUNNING]
    shadow = mode != "tree"
    accepted = kernels.accept(now.rows, own, BLOCK - 1, now.member if shadow else None)
    tree = kernels.accept(now.rows, own, BLOCK - 1, now.tree).count
    assert int(tree.min()) > 1
    assert torch.equal(kept.counts, (accepted.count + 1).int())
    assert torch.equal(kept.tree_counts, ((tree if shadow else accepted.count) + 1).int())
    assert torch.equal(kept.lengths, torch.tensor(LENGTHS[:RUNNING], device=device) + accepted.count + 1)
    tokens = kept.tokens.view(RUNNING, BLOCK)
    for b, n in enumerate(kept.counts.tolist()):
        assert tokens[b, :n].tolist() == accepted.tokens[b, :n].tolist()
        assert kept.bonus[b] == accepted.tokens[b, n - 1]
    ((sources, targets, features, block),) = worker.moved
    for b, n in enumerate(kept.counts.tolist()):
        assert targets[b].tolist() == now.block.row_slots[b, :n].tolist() + [0] * (BLOCK - n)
        assert sources[b, :n].tolist() == now.block.row_slots[b, accepted.path[b, :n]].tolist()
        seen = hidden.view(SIZE, room.width, -1)[b, accepted.path[b, :n]]
        assert torch.equal(features.view(SIZE, BLOCK, -1)[b, :n], seen)
    assert not sources[RUNNING:].any()
    assert not targets[RUNNING:].any()
    assert len(block.positions) == SIZE


@pytest.mark.parametrize(
    ("mode", "shadowed", "ends"), [("tree", False, True), ("tree", True, False), ("shadow-linear", True, True)]
)
def test_a_shadowed_request_in_a_server_of_trees(mode: str, shadowed: bool, ends: bool, device: torch.device) -> None:
    """It may ask for it where block and budget fit the rows, and commits the chain's path: outside the graph."""
    room = make_room(device, mode)
    asked = {"ddtree_mode": "shadow-linear", "ddtree_budget": 3} if shadowed else {}
    plan = Options(mode, 15).plan(asked, BLOCK)
    assert room.tell([plan], room.width) == shadowed
    assert Keeping(Worker(room), mode != "tree").ends(shadowed) == ends


def test_a_round_that_is_not_the_graphs_keeps_nothing_there(device: torch.device) -> None:
    room = make_room(device)
    staged(room, 0)
    grow(Head(device).read(SIZE), None, room)
    worker = Worker(room)
    keeping = Keeping(worker, False, {SIZE: lay.Kept.allocate(SIZE, BLOCK, device)})
    hidden = torch.zeros(SIZE * room.width, 1, device=device)
    keeping.keep(room, own_logits(room), hidden, torch.tensor(LENGTHS, device=device), SIZE)
    ((sources, targets, _, _),) = worker.moved
    assert not sources.any()
    assert not targets.any()
    assert keeping.kept[SIZE].counts.tolist() == [0] * SIZE


def test_a_capture_between_rounds_moves_nothing(device: torch.device) -> None:
    """SGLang captures anew after an update of weights: the slots of the last round are still there."""
    room = make_room(device)
    staged(room, RUNNING)
    grow(Head(device).read(SIZE), None, room)
    worker = Worker(room)
    keeping = Keeping(worker, False)
    hidden = torch.zeros(SIZE * room.width, 1, device=device)
    out = SimpleNamespace(next_token_logits=own_logits(room), hidden_states=hidden)
    forward = SimpleNamespace(batch_size=SIZE, seq_lens=torch.ones(SIZE, dtype=torch.int64, device=device))
    keeping.capture(None, out, forward, SIZE * room.width)
    first = keeping.kept[SIZE]
    keeping.capture(None, out, forward, SIZE * room.width)
    assert keeping.kept[SIZE] is first  # the graph's own
    assert not any(part.any() for moved in worker.moved for part in moved[:2])
    assert [one.tolist() for one in keeping.held[0]] == [[1.0] * 3]


@pytest.mark.parametrize("mode", ["tree", "shadow-linear"])
def test_a_graph_follows_what_is_staged(mode: str, device: torch.device) -> None:
    """Two rounds of one graph, each beside the same round without it."""
    room, head, shadows = make_room(device, mode), Head(device), mode != "tree"
    kept = {SIZE: lay.Kept.allocate(SIZE, BLOCK, device)}
    growth, keeping = Growth(head, room), Keeping(SimpleNamespace(move=lambda *_: None), shadows, kept)
    logits = torch.zeros(SIZE * room.width, VOCABULARY, device=device)
    hidden, lengths = torch.zeros(SIZE * room.width, 1, device=device), room.view(SIZE).block.lengths

    def step() -> None:
        growth.grow(SIZE)
        keeping.keep(room, logits, hidden, lengths, SIZE)

    replay, said = recorded(step, device), []
    for seed in (4, 5):
        other, apart = Head(device, seed), make_room(device, mode)
        head.log_q.copy_(other.log_q)
        head.tokens.copy_(other.tokens)
        for one in (room, apart):
            staged(one, RUNNING, seed)
            one.mask.backend.verify_mask.buffer.fill_(9)
        Growth(other, apart).grow(SIZE)
        logits.copy_(own_logits(apart))
        replay()
        mine = keeping.read(SIZE, RUNNING)
        eager = Keeping(SimpleNamespace(move=lambda *_: None), shadows, {SIZE: lay.Kept.allocate(SIZE, BLOCK, device)})
        eager.keep(apart, logits, hidden, apart.view(SIZE).block.lengths, SIZE)
        same = zip(vars(mine).values(), vars(eager.read(SIZE, RUNNING)).values(), strict=True)
        assert all(torch.equal(a, b) for a, b in list(same)[1:])
        assert torch.equal(room.mask.backend.verify_mask.buffer, apart.mask.backend.verify_mask.buffer)
        said.append(mine)
    assert not torch.equal(said[0].tokens, said[1].tokens)  # and the first is still there
    assert int(said[0].counts.min()) > 1


def test_the_variable() -> None:
    assert wanted({})
    assert wanted({VARIABLE: "1"})
    assert not wanted({VARIABLE: "0"})
    with pytest.raises(InvalidOption, match=f"{VARIABLE} must be 1 or 0, not 'off'"):
        wanted({VARIABLE: "off"})
