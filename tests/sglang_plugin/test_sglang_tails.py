"""What ends a round inside SGLang's graphs equals what ends it outside; padding and disarmed rounds keep nothing."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddtree import kernels
from ddtree.errors import InvalidOption
from ddtree.sglang import rows as lay
from ddtree.sglang.options import Options
from ddtree.sglang.room import Room
from ddtree.sglang.tails import VARIABLE, Growth, Keeping, wanted

BLOCK, VOCABULARY, CONTEXT, RUNNING, SIZE = 8, 50, 60, 2, 3
LENGTHS, FEATURES = [7, 30, 0], 5


class Head:
    """Candidates that are there already."""

    block = BLOCK

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.log_q = (-torch.rand(SIZE, BLOCK - 1, 4, generator=generator) * 3).sort(-1, descending=True).values
        self.tokens = torch.rand(SIZE, BLOCK - 1, VOCABULARY, generator=generator).topk(4).indices
        self.seen: list[torch.Tensor] = []

    def __call__(self, hidden: torch.Tensor) -> None:
        self.seen.append(hidden)

    def read(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.log_q[:size], self.tokens[:size]


def make_room(mode: str = "tree", budget: int = 15, backend: str = "triton", fits: int = SIZE) -> Room:
    options = Options(mode, budget)
    width = options.rows(BLOCK)
    buffer = torch.full((SIZE * width * (CONTEXT + width),), 9, dtype=torch.uint8)
    runner = SimpleNamespace(
        server_args=SimpleNamespace(
            get_attention_backends=lambda: (backend, backend), speculative_attention_mode="prefill"
        ),
        model_config=SimpleNamespace(context_len=CONTEXT),
        attn_backend=SimpleNamespace(verify_mask=SimpleNamespace(buffer=buffer, fits=lambda size: size <= fits)),
    )
    usual = options.plan(None, BLOCK)
    return Room(SimpleNamespace(model_runner=runner, device="cpu", width=width, depth=BLOCK - 1, usual=usual), SIZE)


def staged(room: Room, committed: int) -> None:
    """A round of two requests in a graph of three; the third has what an earlier round left."""
    table, pool = torch.randperm(3 * 100).view(3, 100) + 1, torch.tensor([2, 0, 1])
    for size in (SIZE, RUNNING):
        lengths, bonus = torch.tensor(LENGTHS[:size]), torch.tensor([3, 4, 5][:size])
        block = room.view(size).block
        lay.stage(bonus, lengths, pool[:size], table, room.state, block, 1, room.commits, committed)


def own_logits(room: Room) -> torch.Tensor:
    """Of a target that follows the drafter's best at every row of every request, and so accepts a path."""
    logits = torch.zeros(SIZE, room.width, VOCABULARY)
    state = room.state
    for b in range(SIZE):
        logits[b, :, 7] = 1.0
        for row in reversed(range(1, room.width)):
            if state.parents[b, row] >= 0:
                logits[b, state.parents[b, row], state.tokens[b, row]] = 2.0 - 0.01 * row
    return logits.view(-1, VOCABULARY)


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
def test_growth(backend: str, fits: int, laid: set[int]) -> None:
    room, other = make_room(backend=backend, fits=fits), make_room()
    head = Head()
    for one in (room, other):
        torch.manual_seed(5)
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
    kernels.build(*head.read(SIZE), other.plan, other.state, other.width)
    assert torch.equal(room.state.tokens[:SIZE], other.state.tokens[:SIZE])
    assert torch.equal(room.state.ancestors[:SIZE], other.state.ancestors[:SIZE])
    now, apart = room.view(SIZE), other.view(SIZE)
    mask = torch.full_like(other.mask.backend.verify_mask.buffer, 9)
    lay.lay(apart.rows, torch.tensor(LENGTHS), mask, apart.links, prefix=False)
    same = [torch.equal(a, b) for a, b in zip(vars(now.links).values(), vars(apart.links).values(), strict=True)]
    same.append(torch.equal(room.mask.backend.verify_mask.buffer, mask))
    assert all(same) if laid else not any(same)


@pytest.mark.parametrize("mode", ["tree", "shadow-linear"])
def test_keeping(mode: str) -> None:
    room = make_room(mode)
    staged(room, RUNNING)
    kernels.build(*Head().read(SIZE), room.plan, room.state, room.width)
    logits, hidden = own_logits(room), torch.randn(SIZE * room.width, FEATURES)
    worker = Worker(room)
    keeping = Keeping(worker, mode != "tree", {SIZE: lay.Kept.allocate(SIZE, BLOCK, "cpu")})
    keeping.keep(room, logits, hidden, torch.tensor([*LENGTHS[:RUNNING], 1]), SIZE)
    kept = keeping.read(SIZE, RUNNING)

    now, own = room.view(RUNNING), logits.argmax(-1).view(SIZE, room.width)[:RUNNING]
    shadow = mode != "tree"
    accepted = kernels.accept(now.rows, own, BLOCK - 1, now.member if shadow else None)
    tree = kernels.accept(now.rows, own, BLOCK - 1, now.tree).count
    assert int(tree.min()) > 1
    assert torch.equal(kept.counts, (accepted.count + 1).int())
    assert torch.equal(kept.tree_counts, ((tree if shadow else accepted.count) + 1).int())
    assert torch.equal(kept.lengths, torch.tensor(LENGTHS[:RUNNING]) + accepted.count + 1)
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


def test_a_round_that_is_not_the_graphs_keeps_nothing_there() -> None:
    room = make_room()
    staged(room, 0)
    kernels.build(*Head().read(SIZE), room.plan, room.state, room.width)
    worker = Worker(room)
    keeping = Keeping(worker, False, {SIZE: lay.Kept.allocate(SIZE, BLOCK, "cpu")})
    keeping.keep(room, own_logits(room), torch.zeros(SIZE * room.width, 1), torch.tensor(LENGTHS), SIZE)
    ((sources, targets, _, _),) = worker.moved
    assert not sources.any()
    assert not targets.any()
    assert keeping.kept[SIZE].counts.tolist() == [0] * SIZE


def test_a_capture_between_rounds_moves_nothing() -> None:
    """SGLang captures anew after an update of weights: the slots of the last round are still there."""
    room = make_room()
    staged(room, RUNNING)
    kernels.build(*Head().read(SIZE), room.plan, room.state, room.width)
    worker = Worker(room)
    keeping = Keeping(worker, False)
    out = SimpleNamespace(next_token_logits=own_logits(room), hidden_states=torch.zeros(SIZE * room.width, 1))
    forward = SimpleNamespace(batch_size=SIZE, seq_lens=torch.ones(SIZE, dtype=torch.int64))
    keeping.capture(None, out, forward, SIZE * room.width)
    first = keeping.kept[SIZE]
    keeping.capture(None, out, forward, SIZE * room.width)
    assert keeping.kept[SIZE] is first  # the graph's own
    assert not any(part.any() for moved in worker.moved for part in moved[:2])
    assert [one.tolist() for one in keeping.held[0]] == [[1.0] * 3]


def test_the_variable() -> None:
    assert wanted({})
    assert wanted({VARIABLE: "1"})
    assert not wanted({VARIABLE: "0"})
    with pytest.raises(InvalidOption, match=f"{VARIABLE} must be 1 or 0, not 'off'"):
        wanted({VARIABLE: "off"})
