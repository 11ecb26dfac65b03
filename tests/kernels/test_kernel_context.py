"""Texts on the device and the rows laid with them, against SequenceContext and the host's builders, round by round."""

from collections.abc import Sequence
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.config import Speculation
from ddtree.engine.context import DeviceTexts, SequenceContext
from ddtree.engine.modes import MODES, Layout, lay_out
from ddtree.kernels import PairedProposal, Plan, PlanRow, lines_of
from ddtree.kernels.context import Said, TextStore, build_with
from ddtree.tree import Nodes, Pair, Proposal, RoundState, TextIndex
from ddtree.tree.matches import LEVELS, Confidence

# The interpreter computes with numpy, which warns where a GPU gives an infinity or NaN in silence.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CAPACITY = 96
GARBAGE = -77


def store_of(texts: Sequence[Sequence[int]], device: torch.device, capacity: int = CAPACITY) -> TextStore:
    """Each text in a slot of its own, over garbage, behind one slot that nobody has."""
    store = TextStore.allocate(len(texts) + 1, capacity, device)
    store.text.fill_(GARBAGE)
    store.tables.fill_(50_000)
    store.confidence.fill_(float("nan"))
    for slot, text in enumerate(texts, start=1):
        store.write(slot, text, Confidence())
    return store


def check_texts(store: TextStore, indices: Sequence[TextIndex]) -> None:
    for slot, index in enumerate(indices, start=1):
        assert store.lengths[slot] == len(index)
        assert store.text[slot, : len(index)].tolist() == index._text.tolist()
        assert tuple(store.matches[slot].tolist()) == index.match
        for order, table in enumerate(index._tables):
            assert torch.equal(store.tables[slot, order].cpu(), torch.frombuffer(table, dtype=torch.int32))
        found = torch.tensor(store.read_confidence(slot).state, dtype=torch.float64)
        torch.testing.assert_close(
            found, torch.tensor(index.confidence.state, dtype=torch.float64), rtol=1e-12, atol=1e-12
        )


def commit(store: TextStore, tokens: Sequence[Sequence[int]], kinds: Sequence[int], columns: int) -> None:
    """Tokens of every sequence, of which nothing was said."""
    device = store.text.device
    plan, state = Plan.allocate(len(tokens), device), RoundState.allocate(len(tokens), 2, columns - 1, device)
    plan.write([PlanRow(context=kind) for kind in kinds], 2)
    state.committed.fill_(GARBAGE)
    for index, own in enumerate(tokens):
        state.committed[index, : len(own)] = torch.tensor(own)
        state.n_committed[index] = len(own)
    slots = torch.arange(1, len(tokens) + 1, device=device)
    store.note(plan, slots, state, Said.allocate(len(tokens), 2, device))


@settings(deadline=None, max_examples=12)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=60), min_size=1, max_size=3),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), max_size=3),
)
def test_a_text_grows_as_the_index_does(prompts: list[list[int]], more: list[list[int]]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    store, indices = store_of(prompts, device), [TextIndex(prompt, CAPACITY) for prompt in prompts]
    check_texts(store, indices)
    for tokens in more:
        own = [tokens[: len(tokens) - index] for index in range(len(prompts))]
        commit(store, own, [1] * len(prompts), 10)
        for index, taken in zip(indices, own, strict=True):
            index.append(taken)
        check_texts(store, indices)


@pytest.mark.parametrize("vocab", [2, 40, 49_152])
@pytest.mark.parametrize("size", [1, 5, 256, 257, 700])
def test_prompts_of_odd_sizes_and_full_slots(size: int, vocab: int, device: torch.device) -> None:
    rng = Random(size)
    text = [rng.randrange(vocab) for _ in range(size)]
    text[-3:] = text[:3]  # a match at the very beginning
    store, index = store_of([text], device, size + 4), TextIndex(text, size + 4)
    check_texts(store, [index])
    commit(store, [[5, 6, 5, 6]], [2], 4)  # to the slot's last place, with a match at the very end
    index.append([5, 6, 5, 6])
    check_texts(store, [index])
    before = store.text.clone()
    commit(store, [[7]], [2], 4)
    assert torch.equal(store.text, before), "nothing is written behind a slot's end"


def test_long_matches_end_at_the_longest_and_long_texts_at_their_beginning(device: torch.device) -> None:
    for text in ([4] * 90, [*range(40), *range(40)], [*range(31), 9, *range(31)], [3, 4, 3, 4]):
        check_texts(store_of([text], device), [TextIndex(text, CAPACITY)])


def test_only_sequences_that_ask_are_touched(device: torch.device) -> None:
    store = store_of([[1, 2, 1], [1, 2, 1]], device)
    commit(store, [[2, 1], [2, 1]], [0, 1], 4)
    check_texts(store, [TextIndex([1, 2, 1], CAPACITY), TextIndex([1, 2, 1, 2, 1], CAPACITY)])


def test_a_text_that_is_too_long_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="97 tokens does not fit the 96"):
        store_of([[1] * 97], device)


MODES_OF = ["tree", "linear", "shadow-linear"]


class Rounds:
    """A batch of sequences whose rounds both sides lay; every round commits a path of its rows, chosen at random."""

    def __init__(self, lanes, prompts, depth: int, ranks: int, device: torch.device, paired: bool = False) -> None:
        """paired: rounds have pair scores, and chains look at as many candidates as trees."""
        self.paired = paired
        self.lanes, self.depth, self.ranks, self.device = lanes, depth, ranks, device
        self.hosts = [SequenceContext.of(s, p, CAPACITY) for s, p in zip(lanes, prompts, strict=True)]
        for host in self.hosts:
            if host:
                host.commit([1])
        self.texts = DeviceTexts(len(lanes) + 1, CAPACITY, device)
        self.store = self.texts.store
        for tensor, value in ((self.store.text, GARBAGE), (self.store.tables, 50_000)):
            tensor.fill_(value)
        self.slots = list(range(len(lanes), 0, -1))
        asked = [SequenceContext.of(s, p, CAPACITY) for s, p in zip(lanes, prompts, strict=True)]
        for context in asked:
            if context:
                context.commit([1])
        self.texts.bring(asked, self.slots)
        self.rows = [self._plan(s) for s in lanes]
        self.width = max(row.rows for row in self.rows)
        self.plan = Plan.allocate(len(lanes), device)
        self.plan.write(self.rows, self.width)
        self.said = Said.allocate(len(lanes), self.width, device)

    def _plan(self, s: Speculation) -> PlanRow:
        mode = MODES[s.mode]
        return PlanRow(
            tree=mode.tree, chain=mode.chain, budget=s.tree_budget if mode.tree else 0,
            spine=s.tree_spine if mode.tree else 0,
            ranks=min(s.tree_top_k, self.ranks) if mode.tree or self.paired else 1,
            depth=self.depth, context={"off": 0, "branch": 1, "mix": 2}[s.tree_context],
        )  # fmt: skip

    def round(
        self, log_q: torch.Tensor, candidates: torch.Tensor, rng: Random, pair: torch.Tensor | None = None
    ) -> list[Layout]:
        batch, n = len(self.lanes), self.width
        state = RoundState.allocate(batch, n + 3, self.depth, self.device)
        for name in ("tokens", "parents", "depths", "ancestors"):
            getattr(state, name).fill_(GARBAGE)
        slots = torch.tensor(self.slots, device=self.device)
        self.said.shares.fill_(float("nan"))
        proposal = Proposal(candidates.to(self.device), log_q.to(self.device))
        if pair is not None:
            for index, row in enumerate(self.rows):
                pair[index, ..., row.ranks :] = float("-inf")  # as the kernel of pair scores leaves them
            lines = lines_of(proposal.log_q, pair.to(self.device))
            proposal = PairedProposal(**vars(proposal) | {"pair": pair.to(self.device)}, lines=lines)
        build_with(self.store, slots, proposal, self.plan, state, self.said)
        layouts, shown = [], []
        for index, (lane, row) in enumerate(zip(self.lanes, self.rows, strict=True)):
            tokens = [line[: row.ranks] for line in candidates[index].tolist()]
            scores = [line[: row.ranks] for line in log_q[index].tolist()]
            host = self.hosts[index]
            known = None if pair is None else Pair.of(pair[index, :, : row.ranks, : row.ranks])
            guesses = host.guesses(tokens, scores, known) if host else None
            layouts.append(lay_out(MODES[lane.mode], lane, scores, guesses, known))
            shown.append(candidates[index].tolist())
        filler = Nodes([-1] + [0] * (n - 1), [0] + [1] * (n - 1), [0] * n)
        wanted = RoundState.allocate(batch + 1, n, self.depth)
        wanted.lay([*(layout.nodes for layout in layouts), filler], [*shown, [[0]]])
        words = -(-n // 64)
        assert torch.equal(state.parents[:, :n].cpu(), wanted.parents[:-1])
        assert torch.equal(state.tokens[:, 1:n].cpu(), wanted.tokens[:-1, 1:])
        assert torch.equal(state.depths[:, :n].cpu(), wanted.depths[:-1])
        assert torch.equal(state.ancestors[:, :n, :words].cpu(), wanted.ancestors[:-1])
        assert (state.parents[:, n:] == GARBAGE).all()
        for index, (lane, layout) in enumerate(zip(self.lanes, layouts, strict=True)):
            assert state.tree[index, :n].nonzero().flatten().tolist() == list(range(layout.tree_size))
            shadows = MODES[lane.mode].shadows
            assert state.member[index, :n].nonzero().flatten().tolist() == (
                sorted(layout.chain) if shadows else list(range(n))
            )
        self._commit(state, layouts, rng)
        return layouts

    def _commit(self, state: RoundState, layouts: Sequence[Layout], rng: Random) -> None:
        """Some row's path and a bonus; nothing of a sequence that is done."""
        state.committed.fill_(GARBAGE)
        state.path.fill_(-1)
        for index, layout in enumerate(layouts):
            if rng.random() < 0.2:
                continue  # as one that is done
            row = rng.choice(layout.chain if MODES[self.lanes[index].mode].shadows else range(len(layout.nodes)))
            path = []
            while row >= 0:
                path.append(row)
                row = layout.nodes.parents[row]
            path.reverse()
            tokens = [int(state.tokens[index, row]) for row in path[1:]] + [rng.randrange(4)]
            kept = min(len(tokens), rng.randrange(1, 20))
            state.path[index, : len(path)] = torch.tensor(path)
            state.committed[index, : len(tokens)] = torch.tensor(tokens)
            state.n_committed[index] = kept
            if self.hosts[index]:
                self.hosts[index].commit(tokens[:kept])
        self.store.note(self.plan, torch.tensor(self.slots, device=self.device), state, self.said)
        for index, (host, slot) in enumerate(zip(self.hosts, self.slots, strict=True)):
            if host:
                assert host._index is not None
                assert self.store.lengths[slot] == len(host._index), index
                assert tuple(self.store.matches[slot].tolist()) == host._index.match
                found = torch.tensor(self.store.read_confidence(slot).state, dtype=torch.float64)
                wanted = torch.tensor(host._index.confidence.state, dtype=torch.float64)
                torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def draw(batch: int, depth: int, ranks: int, rng: Random, *, ties: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores, best first, and as many different tokens of a small vocabulary."""
    generator = torch.Generator().manual_seed(rng.randrange(10**6))
    scores = -torch.rand(batch, depth, ranks, generator=generator) * 3
    scores = scores.round() / 2 if ties else scores
    order = torch.rand(batch, depth, ranks + 2, generator=generator).argsort(-1)
    return scores.sort(-1, descending=True).values, order[..., :ranks]


# In the interpreter a round takes a second.
LONG = [] if torch.cuda.is_available() else [pytest.mark.full]


@pytest.mark.parametrize("ties", [False, pytest.param(True, marks=LONG)], ids=["", "ties"])
@pytest.mark.parametrize("context", [pytest.param("branch", marks=LONG), "mix"])
@pytest.mark.parametrize(
    ("mode", "budget", "top_k", "spine", "depth"),
    [("tree", 15, 4, 0, 7), ("tree", 33, 3, 4, 9), ("linear", 5, 2, 0, 6), ("shadow-linear", 9, 3, 2, 5)],
)
def test_rounds(mode, budget, top_k, spine, depth, context, ties, device: torch.device) -> None:
    rng = Random(budget + depth)
    lanes = [Speculation(mode, budget, top_k, spine, context)] * 2
    rounds = Rounds(lanes, [[rng.randrange(4) for _ in range(n)] for n in (1, 30)], depth, top_k, device)
    foreign = 0
    for _ in range(8 if mode == "linear" else 4):  # a chain seldom turns to a guess that is none of its candidates
        layouts = rounds.round(*draw(2, depth, top_k, rng, ties=ties), rng)
        foreign += sum(len(layout.nodes.foreign) for layout in layouts)
    assert foreign > 0


@pytest.mark.parametrize("seed", [0, 5, *(pytest.param(seed, marks=LONG) for seed in range(1, 5))])
def test_every_mode_and_context_in_one_batch(seed: int, device: torch.device) -> None:
    rng = Random(seed)
    contexts = ["off", "branch", "mix"]
    lanes = [
        Speculation(mode, rng.randrange(1, 14), rng.randrange(1, 5), rng.randrange(3), rng.choice(contexts))
        for mode in MODES_OF
    ] + [Speculation("tree", 12, 4, 0, "mix")]
    prompts = [[rng.randrange(3) for _ in range(rng.randrange(1, 50))] for _ in lanes]
    rounds = Rounds(lanes, prompts, 6, 4, device)
    for _ in range(2):
        log_q, candidates = draw(4, 6, 4, rng, ties=seed % 2 == 0)
        if seed > 3:
            log_q[rng.randrange(4), rng.randrange(6), rng.randrange(4) :] = float("-inf")
            log_q[rng.randrange(4), rng.randrange(6), rng.randrange(1, 4) :] = float("nan")
        rounds.round(log_q, candidates, rng)


def draw_pair(batch: int, depth: int, ranks: int, rng: Random, kind: str) -> torch.Tensor:
    """Pair scores in any order: distinct, of a few values, or with missing ones too."""
    generator = torch.Generator().manual_seed(rng.randrange(10**6))
    pair = -torch.rand(batch, depth - 1, ranks, ranks, generator=generator) * 3
    if kind != "spread":
        pair = pair.round() / 2
    if kind == "holes":
        missing = torch.rand(pair.shape, generator=generator)
        pair[missing < 0.3] = float("-inf")
        pair[missing < 0.1] = float("nan")
    return pair


@pytest.mark.parametrize("kind", ["spread", pytest.param("ties", marks=LONG), "holes"])
@pytest.mark.parametrize("context", [pytest.param("branch", marks=LONG), "mix"])
@pytest.mark.parametrize(
    ("mode", "budget", "top_k", "spine", "depth"),
    [("tree", 15, 4, 0, 7), ("tree", 33, 3, 4, 9), ("linear", 5, 3, 0, 6), ("shadow-linear", 9, 3, 2, 5)],
)
def test_rounds_by_pair_scores(mode, budget, top_k, spine, depth, context, kind, device: torch.device) -> None:
    """The second sequence looks at fewer candidates, the third has no text."""
    rng = Random(budget + depth)
    lanes = [
        Speculation(mode, budget, k, spine, c) for k, c in ((top_k, context), (top_k - 1, context), (top_k, "off"))
    ]
    prompts = [[rng.randrange(4) for _ in range(n)] for n in (1, 30, 3)]
    rounds = Rounds(lanes, prompts, depth, top_k, device, paired=True)
    foreign = 0
    for _ in range(6 if mode == "linear" else 3):
        pair = draw_pair(3, depth, top_k, rng, kind)
        layouts = rounds.round(*draw(3, depth, top_k, rng, ties=kind == "ties"), rng, pair)
        foreign += sum(len(layout.nodes.foreign) for layout in layouts)
    assert foreign > 0


def test_learning_goes_with_the_sequence_to_the_host_and_back(device: torch.device) -> None:
    contexts = [SequenceContext("mix", [1, 2, 3, 1, 2, 3], CAPACITY), None]
    contexts[0].commit([1])
    texts = DeviceTexts(3, CAPACITY, device)
    texts.bring(contexts, [1, 0])
    learned = Confidence()
    for _ in range(5):
        learned.learn(4, False)
    texts.store.write(1, [1, 2, 3, 1, 2, 3, 1], learned)
    texts.bring(contexts, [1, 0])  # it is there already
    assert texts.store.read_confidence(1).state == learned.state
    texts.give_back(contexts, [1, 0])
    contexts[0].guesses([[5]], [[-1.0]])
    assert contexts[0]._index.confidence.state == learned.state
    contexts[0].commit([2])
    texts.bring(contexts, [2, 0])
    assert texts.store.lengths[2] == 8
    assert texts.store.read_confidence(2)(4) != learned(4)


def test_memory_is_as_it_is_planned(device: torch.device) -> None:
    store = TextStore.allocate(3, 1000, device)
    assert TextStore.bytes(3, 1000) == store.text.nbytes + store.tables.nbytes


def test_levels_hold_what_the_kernels_have_room_for() -> None:
    assert max(LEVELS) < 16
    assert Confidence.of(Confidence().state)(9) == Confidence()(9)
