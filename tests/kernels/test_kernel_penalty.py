"""Penalties and biases by kernels, against what engine.history does to the same rows: the same bits."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from graph_engines import LONG, only_long

from ddtree.config import SamplingParams
from ddtree.engine.history import DeviceHistories, History
from ddtree.engine.rows import HostRows
from ddtree.engine.sampling import RowSampler
from ddtree.kernels import Allowed, Changed, HistoryStore, Kept, Penalties, backend, choose, penalize
from ddtree.kernels.choose import ChooseTiles
from ddtree.tree import RoundState

# The interpreter works out both sides of tl.where, and numpy warns of the side that is not taken.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
GARBAGE = 0x7FFFFFF3  # a word of every token that nobody wrote: biased, seen and counted
PLAIN = SamplingParams()
FREQUENCY = SamplingParams(frequency_penalty=0.7)
PRESENCE = SamplingParams(presence_penalty=-0.3)
REPETITION = SamplingParams(repetition_penalty=1.3)
BIASED = SamplingParams(logit_bias=((0, 3.3), (2, -100.0), (5, 0.1)))
ALL = SamplingParams(
    repetition_penalty=0.7, frequency_penalty=-1.1, presence_penalty=0.9, logit_bias=((1, 0.1), (3, -7.7), (6, 1e-9))
)
MIXED = [PLAIN, FREQUENCY, PRESENCE, ALL, PLAIN, BIASED, REPETITION]


@dataclass
class Sequences:
    """A batch of sequences with rows of random trees, on both sides."""

    histories: list[History]
    rows: list[HostRows]
    state: RoundState
    slots: torch.Tensor
    penalties: Penalties
    store: HistoryStore
    depth: int

    def changed(self, logits: torch.Tensor, block: int = 32) -> Changed:
        """Three programs a row, of several segments where there are so many."""
        programs = 3 * len(self.rows) * self.state.width
        rows = self.state.rows
        return penalize(logits, rows, self.depth, self.slots, self.penalties, self.store, block, programs)


def tree(rng: random.Random, size: int, depth: int, vocab: int) -> HostRows:
    """A chain as deep as there may be, or a tree whose siblings differ; few tokens, so that paths repeat theirs."""
    tokens, parents, depths = [rng.randrange(vocab)], [-1], [0]
    used: set[tuple[int, int]] = set()
    for _ in range(10 * size):
        parent, token = rng.randrange(max(0, len(tokens) - 3), len(tokens)), rng.randrange(min(vocab, 8))
        if len(tokens) < size and depths[parent] < depth and (parent, token) not in used:
            used.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return HostRows(tokens, parents, depths)


def lay(state: RoundState, trees: Sequence[HostRows], width: int) -> None:
    """Rows as build leaves them; padding behind them has tokens of earlier rounds and sees itself alone."""
    state.width = width
    state.lay_roots()
    state.tokens.fill_(3)
    for index, rows in enumerate(trees):
        size = len(rows)
        visible = [[False] * size for _ in range(size)]
        for row, parent in enumerate(rows.parents):
            visible[row] = [parent >= 0 and seen for seen in visible[parent]]
            visible[row][row] = True
        words = state.ancestors.shape[2]
        bits = [[sum(seen[j] << j - 64 * w for j in range(64 * w, min(size, 64 * w + 64))) for w in range(words)]
                for seen in visible]  # fmt: skip
        signed = [[word - (1 << 64) if word >> 63 else word for word in row] for row in bits]
        state.ancestors[index, :size] = torch.tensor(signed, device=state.ancestors.device)
        for there, values in ((state.tokens, rows.tokens), (state.parents, rows.parents), (state.depths, rows.depths)):
            there[index, :size] = torch.tensor(values, device=there.device)


def sequences(
    params: Sequence[SamplingParams], vocab: int, device: torch.device, width: int = 9, depth: int = 5, seed: int = 0
) -> Sequences:
    """Every slot of the store was somebody else's before."""
    rng, batch = random.Random(seed), len(params)
    store = DeviceHistories(batch + 2, vocab, device)
    store.store.words.fill_(GARBAGE)
    store.store.biases.fill_(torch.nan)
    histories, slots = [], list(range(batch + 1, 1, -1))
    for one in params:
        history = History(one, [rng.randrange(vocab) for _ in range(6)], device)
        history.commit([rng.randrange(min(vocab, 8)) for _ in range(9)])
        histories.append(history)
    store.bring(histories, slots)
    penalties = Penalties.allocate(batch, device)
    penalties.write([history.penalties for history in histories])
    trees = [tree(rng, rng.randrange(1, width + 1), depth, vocab) for _ in params]
    state = RoundState.allocate(batch, width + 3, max(depth, 1), device)  # more rows than there are
    lay(state, trees, width)
    return Sequences(histories, trees, state, torch.tensor(slots, device=device), penalties, store.store, depth)


def logits_of(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows apart from each other, with what a model that is broken gives, too."""
    batch, rows, vocab = shape
    found = 6 * torch.randn(batch, rows + 1, vocab + 5, generator=torch.Generator().manual_seed(vocab))
    found = found.to(dtype)
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf, 0.0, -0.0, torch.finfo(dtype).max)):
        found[0, 1 + row % rows, row % vocab] = value
    return found.to(device)[:, :rows, :vocab]


def check(made: Sequences, logits: torch.Tensor) -> int:
    """Returns: how many logits were changed."""
    raw, differ = logits.clone(), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddtree.kernels.penalty.torch.empty", poisoned(torch.empty))
        found = made.changed(logits)
    assert torch.equal(logits.nan_to_num(7.7), raw.nan_to_num(7.7)), "raw logits stay as they are"
    assert found.active.tolist() == [history.active for history in made.histories]
    for index, (history, rows) in enumerate(zip(made.histories, made.rows, strict=True)):
        if not history.active:
            assert found.scores[index].isnan().all(), "nothing is written for others"
            continue
        used = logits[index, : len(rows)]
        expected = used.float().clone()
        history.apply_(expected, used, rows)
        torch.testing.assert_close(found.scores[index, : len(rows)], expected, rtol=0, atol=0, equal_nan=True)
        differ += int((expected != used.float()).sum())
    return differ


def poisoned(empty):
    def make(*args, **options):
        made = empty(*args, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    return make


@pytest.mark.parametrize("vocab", [7, 101, pytest.param(64, marks=LONG), pytest.param(1003, marks=LONG)])
def test_equals_the_histories(vocab: int, device: torch.device) -> None:
    """Of sequences with penalties, biases, both and neither, in one batch; odd sizes, several segments."""
    made = sequences(MIXED, vocab, device, seed=vocab)
    assert check(made, logits_of((len(MIXED), 9, vocab), device)) > 0
    assert max(count for rows in made.rows for path in rows.paths() for count in path.values()) > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, *(pytest.param(t, marks=LONG) for t in (torch.half, torch.double))])
def test_other_dtypes_are_worked_out_in_float64(dtype: torch.dtype, device: torch.device) -> None:
    made = sequences([ALL, PLAIN, FREQUENCY, BIASED], 203, device, seed=3)
    check(made, logits_of((4, 9, 203), device, dtype))


@pytest.mark.parametrize(("width", "depth"), [
    (1, 0), pytest.param(1, 4, marks=LONG), pytest.param(64, 15, marks=LONG), pytest.param(65, 9, marks=LONG),
    pytest.param(130, 7, marks=LONG),
])  # fmt: skip
def test_every_shape_of_rows(width: int, depth: int, device: torch.device) -> None:
    """Plain decoding, a word of ancestors, and more than one."""
    made = sequences([ALL, REPETITION], 43, device, width, depth, seed=width)
    assert check(made, logits_of((2, width, 43), device)) > 0


def test_nothing_overflows(device: torch.device) -> None:
    params = [replace(ALL, repetition_penalty=penalty, frequency_penalty=-2.0) for penalty in (1e6, 1e-30)]
    made = sequences(params, 40, device)
    logits = 1e38 * logits_of((2, 9, 40), device).nan_to_num(0.5).clamp(-3, 3)
    check(made, logits)
    found = made.changed(logits).scores
    assert all(bool(found[index, : len(rows)].isfinite().all()) for index, rows in enumerate(made.rows))


def commit(made: Sequences, tokens: Sequence[Sequence[int]], kept: Sequence[int]) -> None:
    columns = made.state.committed.shape[1]
    table = [[*row, *[6] * (columns - len(row))] for row in tokens]  # a token that is not kept, behind them
    made.state.committed.copy_(torch.tensor(table))
    made.state.n_committed.copy_(torch.tensor(kept))
    made.store.count(made.penalties, made.slots, made.state)


def test_committed_tokens_count(device: torch.device) -> None:
    """As often as they are there, up to the cut, in the histories of those who count, and in no other slot."""
    made = sequences([FREQUENCY, PLAIN, ALL, BIASED, REPETITION], 50, device, depth=6)
    before = made.store.words.clone()
    for tokens, kept in [
        ([[4, 4, 49, 4, 9]] * 5, [5, 5, 3, 5, 0]),
        ([[4], [4], [0, 0, 0, 0, 0, 0, 0], [2], [-1]], [1, 1, 7, 1, 1]),
        ([[11, 4, 11, 4]] * 5, [4, 4, 2, 4, 4]),
    ]:
        commit(made, tokens, kept)
        for history, row, count in zip(made.histories, tokens, kept, strict=True):
            history.commit([token for token in row[:count] if token >= 0])
    fresh = HistoryStore.allocate(len(before), 50, device)
    for index, slot in enumerate(made.slots.tolist()):
        history = made.histories[index]
        if history.active:
            history.send(fresh, slot)
            if history.counting:
                assert made.store.words[slot].tolist() == fresh.words[slot].tolist()
            assert not torch.equal(made.store.words[slot], before[slot])
        else:
            assert torch.equal(made.store.words[slot], before[slot])
    assert torch.equal(made.store.words[:2], before[:2]), "nobody's slots"
    check(made, logits_of((5, 9, 50), device))


def test_a_slot_s_next_sequence_has_its_own_history(device: torch.device) -> None:
    """Nothing of the one before is left, and one that was there is not sent again."""
    store = DeviceHistories(2, 30, device)
    store.store.biases.fill_(torch.nan)
    one, other = History(ALL, [1, 2], device), History(replace(ALL, logit_bias=((8, 1.0),)), [5], device)
    one.commit([3, 3, 4])
    store.bring([one], [1])
    assert store.store.words[1].count_nonzero() == 5  # 1 2 3 4 6
    store.store.words[1, 9] = 77  # what the device counted meanwhile
    store.bring([one], [1])
    assert store.store.words[1, 9] == 77
    store.bring([other], [1])
    assert store.store.words[1].nonzero().flatten().tolist() == [5, 8]
    one.commit([7])
    store.bring([one], [1])
    expected = HistoryStore.allocate(2, 30, device)
    one.send(expected, 1)
    assert torch.equal(store.store.words, expected.words)
    store.store.words[1, 9] = 77
    store.forget([1])  # rounds that the host counts come between
    store.bring([one], [1])
    assert torch.equal(store.store.words, expected.words)


@only_long
@pytest.mark.parametrize("vocab", [61, 1003])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.7}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_tokens_are_chosen_by_changed_logits(filters: dict[str, float], vocab: int, device: torch.device) -> None:
    """Under filters and masks as well, beside sequences that change nothing; as the host's samplers choose."""
    heat = [0.9, 0.0, 0.7, 1.4, 1.0, 0.0, 1.1]
    asked = [replace(one, temperature=t, **(filters if t else {})) for one, t in zip(MIXED, heat, strict=True)]  # type: ignore[arg-type]
    made, logits = sequences(asked, vocab, device, seed=2), logits_of((len(asked), 9, vocab), device).nan_to_num(0.5)
    logits = logits.clamp(-9, 9) / 3
    on, batch = {"device": device}, len(asked)
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (batch, 9, 40), generator=torch.Generator().manual_seed(1))
    masks = Allowed(words.int().to(device), torch.tensor([i % 2 == 0 for i in range(batch)], **on))
    kept = Kept.allocate(batch, device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "KINDS", set())  # torch's operations, also on a GPU
        samplers = [RowSampler(one, 7 * i - 3, [1], vocab, device) for i, one in enumerate(asked)]
        kept.write([sampler.kept for sampler in samplers])
        temperatures = torch.tensor([sampler.heat for sampler in samplers], dtype=torch.float64, device=device)
        expected, plain = [], []
        for i, rows in enumerate(made.rows):
            used = logits[i, : len(rows)].clone()
            plain.append(sampler_of(asked[i], i, vocab, device).choose(used, rows, 11 * i).tolist())
            scores = used.clone()
            made.histories[i].apply_(scores, used, rows)
            if i % 2 == 0:
                bits = words[i, : len(rows)].unsqueeze(-1) >> torch.arange(32) & 1
                scores[bits.flatten(1)[:, :vocab].to(device) == 0] = -torch.inf
            expected.append(sampler_of(asked[i], i, vocab, device).choose(scores, rows, 11 * i).tolist())
    seeds = torch.tensor([7 * i - 3 for i in range(batch)], **on)
    positions, depths = torch.tensor([11 * i for i in range(batch)], **on), made.state.rows.depths
    own = choose(
        logits, seeds, positions, depths, temperatures, ChooseTiles(block=256), masks, kept, made.changed(logits)
    )
    found = [own[i, : len(rows)].tolist() for i, rows in enumerate(made.rows)]
    assert found == expected
    assert found[1::2] != plain[1::2], "penalties changed nothing"


def sampler_of(params: SamplingParams, index: int, vocab: int, device: torch.device) -> RowSampler:
    """Without penalties of its own."""
    params = replace(params, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0, logit_bias=())
    return RowSampler(params, 7 * index - 3, [1], vocab, device)


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    made = sequences([ALL, PLAIN], 20, device)
    with pytest.raises(ValueError, match="histories of 20 tokens: the logits have 21"):
        made.changed(torch.zeros(2, 9, 21, device=device))
    with pytest.raises(ValueError, match="contiguous"):
        made.changed(torch.zeros(2, 20, 9, device=device).transpose(1, 2))
