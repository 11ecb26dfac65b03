"""The pairwise head inside SGLang: where it is found, what is refused, and the rows that it makes."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from sglang_rooms import BLOCK, HIDDEN, SIZE, VOCABULARY, Head, make_room, recorded, staged
from test_sglang_head import Ranks

from ddtree import kernels
from ddtree.drafter import PairwiseHead, fingerprint
from ddtree.errors import DrafterMismatch, InvalidOption
from ddtree.sglang import hooks
from ddtree.sglang.head import Drafted
from ddtree.sglang.options import Options, variable
from ddtree.sglang.pairwise import Pairs, load
from ddtree.sglang.tails import Growth, grow
from ddtree.tree import Nodes, Pair, best_first, chain, union

NORM, DEPTHS = torch.linspace(0.5, 1.5, HIDDEN), BLOCK - 1

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where the interpreter computes infinities


def make_head(gated: bool = True, vocabulary: int = VOCABULARY, hidden: int = HIDDEN) -> PairwiseHead:
    """A random one that has a say, of most tokens."""
    generator = torch.Generator().manual_seed(8)
    ids, rank = torch.arange(0, vocabulary - 3), 6
    draw = [torch.randn(shape, generator=generator) for shape in ((len(ids), rank), (len(ids), rank), (rank,))]
    gate = torch.randn(rank, hidden, generator=generator) * 0.3 if gated else None
    return PairwiseHead.of(ids, vocabulary, (draw[0], draw[1]), draw[2], gate, fingerprint(NORM))


def make_pairs(device: torch.device, gated: bool = True, dtype: torch.dtype = torch.float32) -> Pairs:
    return Pairs(make_head(gated), torch.zeros(1, HIDDEN, dtype=dtype, device=device), Ranks(1))


def path_to(room: Any, b: int, row: int) -> tuple[int, ...]:
    """The tokens of a request from its root to a row; () for padding."""
    found: list[int] = []
    while row > 0 and room.state.parents[b, row] >= 0:
        found.insert(0, int(room.state.tokens[b, row]))
        row = int(room.state.parents[b, row])
    return tuple(found)


def paths(room: Any, b: int, rows: torch.Tensor | None = None) -> set[tuple[int, ...]]:
    """The paths of a request's rows, or of those of the mask `rows` [B, N] alone."""
    return {path_to(room, b, row) for row in range(room.width) if rows is None or rows[b, row]}


def by_host(drafted: Drafted, b: int, plan: kernels.PlanRow, scores: torch.Tensor) -> tuple[Nodes, Nodes]:
    """A request's tree by pair scores, and its chain by none."""
    log_q = drafted.log_q[b].tolist()
    tree = best_first(log_q, plan.budget, pair=Pair.of(scores[b].cpu())) if plan.tree else Nodes.root()
    return tree, chain(plan.depth) if plan.chain else Nodes.root()


def paths_of(nodes: Nodes, tokens: list[list[int]]) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for parent, depth, rank in zip(nodes.parents, nodes.depths, nodes.ranks, strict=True):
        found.append(() if parent < 0 else (*found[parent], tokens[depth - 1][rank]))
    return set(found)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("mode", ["tree", "shadow-linear"])
def test_trees_go_by_the_pairs_and_chains_do_not(mode: str, gated: bool, device: torch.device) -> None:
    """Requests of one batch: as the server has it, with fewer nodes, and a chain alone."""
    room, options = make_room(device, mode), Options(mode, 15)
    asked: list[dict[str, Any]] = [{}, {"ddtree_budget": 3}, {"ddtree_mode": "linear"}]
    plans = [options.plan(custom, BLOCK) for custom in asked]
    room.tell(plans, room.width)
    staged(room, 0)
    drafted, root = Head(device).read(SIZE), room.state.tokens[:SIZE, 0].clone()
    grow(drafted, make_pairs(device, gated), room)

    scores = make_head(gated).to(device).pair(drafted.states, drafted.tokens, drafted.log_q)
    assert torch.equal(room.state.tokens[:SIZE, 0], root)
    for b, plan in enumerate(plans):
        tree, line = by_host(drafted, b, plan, scores)
        tokens = drafted.tokens[b].tolist()
        assert paths(room, b, room.state.tree) == paths_of(tree, tokens)
        assert paths(room, b) == paths_of(union(tree, line)[0], tokens)
    plain = make_room(device, mode)
    plain.tell(plans, plain.width)
    staged(plain, 0)
    grow(drafted, None, plain)
    assert paths(plain, 0, plain.state.tree) != paths(room, 0, room.state.tree)  # the head has a say
    assert paths(plain, 2) == paths(room, 2)
    if mode == "shadow-linear":  # what may be committed is the very chain, in the rows that it has alone
        assert room.state.member[0].nonzero().flatten().tolist() == list(range(BLOCK))
        assert paths(plain, 0, plain.state.member) == paths(room, 0, room.state.member)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_lines_are_the_heads(dtype: torch.dtype, device: torch.device) -> None:
    room, drafted = make_room(device), Head(device, dtype=dtype).read(SIZE)
    lines = make_pairs(device, dtype=dtype).lines(drafted, room.plan)
    scores = make_head().to(device).pair(drafted.states.float(), drafted.tokens, drafted.log_q)
    wanted = kernels.lines_of(drafted.log_q, scores)
    torch.testing.assert_close(
        lines.edges[:, 1:], wanted.edges[:, 1:], atol=1e-4 if dtype.itemsize > 2 else 0.1, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_graph_with_pairs_follows_what_is_staged(dtype: torch.dtype, device: torch.device) -> None:
    """Two rounds of one graph, each beside the same round without it."""
    room, head, pairs, said = make_room(device), Head(device, dtype=dtype), make_pairs(device, dtype=dtype), []
    growth = Growth(head, room, pairs)
    replay = recorded(lambda: growth.grow(SIZE), device)
    for seed in (4, 5):
        other, apart = Head(device, seed, dtype), make_room(device)
        for name in ("log_q", "tokens", "states"):
            getattr(head, name).copy_(getattr(other, name))
        for one in (room, apart):
            staged(one, 0, seed)
        grow(other.read(SIZE), pairs, apart)
        replay()
        for name in ("tokens", "parents", "depths", "ancestors"):
            assert torch.equal(getattr(room.state, name)[:SIZE], getattr(apart.state, name)[:SIZE]), name
        assert growth.laid.keys() == {SIZE}
        said.append(room.state.tokens[:SIZE].clone())
    assert not torch.equal(said[0], said[1])


@pytest.mark.parametrize("gated", [True, False])
def test_every_rank_has_the_first_ones_lines(gated: bool, device: torch.device) -> None:
    """Though states differ in their last bits; without a gate no state is read, and nothing is sent."""
    group, drafted, room = Ranks(3), Head(device).read(SIZE), make_room(device)
    weight = torch.zeros(1, HIDDEN, device=device)
    ranks = [Pairs(make_head(gated), weight, group) for _ in range(3)]
    each = [
        Drafted(tokens=drafted.tokens, log_q=drafted.log_q, states=drafted.states + 0.5 * rank) for rank in range(3)
    ]
    for pairs, mine in zip(ranks, each, strict=True):
        group.sent.append([])
        group.told = -1
        pairs.lines(mine, room.plan)
    assert [len(sent) for sent in group.sent] == [int(gated)] * 3
    found = []
    for pairs, mine in zip(ranks, each, strict=True):
        group.told = 0
        found.append(pairs.lines(mine, room.plan))
    for lines in found[1:]:
        assert torch.equal(lines.places[:, 1:], found[0].places[:, 1:])
        assert torch.equal(lines.edges[:, 1:], found[0].edges[:, 1:])
    alone = make_pairs(device, gated).lines(each[0], room.plan)
    torch.testing.assert_close(found[0].edges[:, 1:], alone.edges[:, 1:], atol=1e-4, rtol=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"norm.weight": NORM}, tmp_path / "model.safetensors")
    return tmp_path


def drafter(name: Any, revision: str | None = None) -> Any:
    return SimpleNamespace(model_path=str(name), revision=revision, hidden_size=HIDDEN)


def test_a_folder_that_has_one(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_head().write(folder / PairwiseHead.FILE)
    for wanted in ("auto", "on"):
        with caplog.at_level(logging.INFO, "ddtree.sglang"):
            found = load(wanted, drafter(folder), VOCABULARY, None)
        assert found is not None
        assert found.rank == 6
        assert f"trees go by the pairwise head in {folder} ({VOCABULARY - 3} tokens, rank 6)" in caplog.text
    assert load("off", drafter(folder), VOCABULARY, None) is None


def test_a_folder_that_has_none(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ddtree.sglang"):
        assert load("auto", drafter(folder), VOCABULARY, None) is None
    assert f"no pairwise head, {folder} has no pairwise.st" in caplog.text
    with pytest.raises(InvalidOption, match=r"--speculative-ddtree-pairwise \(\$DDTREE_SGLANG_PAIRWISE\) on needs a p"):
        load("on", drafter(folder), VOCABULARY, None)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: make_head(vocabulary=VOCABULARY + 9), r"a vocabulary of 59 tokens, the target has 50"),
        (lambda: make_head(hidden=HIDDEN + 1), rf"hidden_size {HIDDEN + 1}, the drafter's is {HIDDEN}"),
        (lambda: PairwiseHead(**vars(make_head()) | {"drafter": "another"}), "another drafter's mark"),
    ],
)
def test_a_head_that_does_not_fit(made: Callable[[], PairwiseHead], message: str, folder: Path) -> None:
    made().write(folder / PairwiseHead.FILE)
    for wanted in ("auto", "on"):
        with pytest.raises(DrafterMismatch, match=f"the pairwise head does not fit: it has {message}"):
            load(wanted, drafter(folder), VOCABULARY, None)


def test_a_hub_id(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang fetches weights alone: the head is asked for, at the same revision and place."""
    asked: list[tuple[Any, ...]] = []

    def snapshot(name: str, *, revision: str, cache_dir: str, allow_patterns: list[str]) -> str:
        asked.append((name, revision, cache_dir, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert load("auto", drafter("some/drafter", "v2"), VOCABULARY, "/cache") is None
    assert asked == [("some/drafter", "v2", "/cache", ["pairwise.st"])]
    make_head().write(folder / PairwiseHead.FILE)
    assert load("on", drafter("some/drafter", "v2"), VOCABULARY, "/cache") is not None
    assert asked[-1] == ("some/drafter", "v2", "/cache", ["pairwise.st", "*.safetensors"])


def test_a_hub_that_cannot_say(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def snapshot(name: str, **rest: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert load("auto", drafter("some/drafter"), VOCABULARY, None) is None
    assert "whether some/drafter has a pairwise.st could not be found out (OSError: no network)" in caplog.text
    with pytest.raises(InvalidOption, match=r"on: whether some/drafter has .* no network\): name the drafter's folder"):
        load("on", drafter("some/drafter"), VOCABULARY, None)


@pytest.mark.parametrize(("worker", "told"), [({"pairs": object()}, "on"), ({"pairs": None}, "off"), ({}, "off")])
def test_the_servers_state(worker: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable("budget"), "9")
    state: dict[str, Any] = {"port": 1}
    result = SimpleNamespace(internal_state=state)
    scheduler = SimpleNamespace(spec_algorithm=SimpleNamespace(name="DDTREE"), draft_worker=SimpleNamespace(**worker))
    hooks.tell_state(result, scheduler, None)
    assert state == {"port": 1, "ddtree": {"mode": "tree", "budget": 9, "top_k": 8, "pairwise": told}}
    assert json.dumps(state)
    other: dict[str, Any] = {}
    hooks.tell_state(SimpleNamespace(internal_state=other), SimpleNamespace(spec_algorithm=None), None)
    assert other == {}
