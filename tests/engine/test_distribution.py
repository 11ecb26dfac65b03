"""At temperature 1 the engine's joint distribution is the target's, whatever the drafter says.

The target has 4 tokens and logits that depend on the whole answer so far; the drafter is wrong on purpose, and its
trees branch. The answer's first token, which prefill chooses, is certain, so the 4 tokens behind it (256 possible
sequences) all go through draft, build, verify, accept and commit. As a control, acceptance with probability
min(1, p / q) runs on the same trees and must be told apart from the target by the same test.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from ddtree.config import SamplingParams, Speculation
from ddtree.engine import Generation, sampling
from ddtree.layers import KVCache
from ddtree.target import TargetSpec
from ddtree.tree import RoundState, Rows, best_first, top_k, unpack
from scripted import CPU, drafter_config, scripted_engine, token_cache, write

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, LENGTH, DEPTHS = 4, 4, 4
PROMPT = [2, 3, 1]
FIRST = 2  # the certain first token of every answer
TREE = Speculation(mode="tree", tree_budget=7, tree_top_k=3, tree_context="off")
DRAWS, BATCH = 50_000, 200
LIMIT = 1e-3  # p-value of the chi-square test


def tables() -> tuple[Tensor, Tensor]:
    """Target logits [5, 1024, V] and drafter logits [5, 1024, D, V] by length and code of the answer so far.

    The code is the sum of token * 4^place. Answers of 5 tokens and more, which only rows past the end see, are in 0.
    """
    rng = np.random.default_rng(20260415)
    codes = VOCAB ** (LENGTH + 1)
    target = rng.uniform(-0.7, 0.7, (LENGTH + 1, codes, VOCAB))
    # A drafter that knows some of it: half the truth, the rest noise that is as large.
    drafter = 0.5 * target[:, :, None, :] + rng.uniform(-1.0, 1.0, (LENGTH + 1, codes, DEPTHS, VOCAB))
    return torch.tensor(target), torch.tensor(drafter)


TARGET, DRAFTER = tables()


def place_values(places: Tensor) -> Tensor:
    """4^place for the places of an answer's first 5 tokens; 0 for the prompt and for what comes later."""
    inside = (places >= 0) & (places <= LENGTH)
    return torch.where(inside, VOCAB ** places.clamp(0, LENGTH), 0)


def committed(data: KVCache, position: Tensor) -> Tensor:
    """The code of each sequence's answer, read from slots 0 .. position - 1. Returns: [B] int64."""
    span = int(position.max())
    slots = torch.arange(span)
    seen = slots < position.unsqueeze(1)
    tokens = data.data[0, list(data.slots), 0, :span, 0].long() - 1
    assert bool((tokens.ge(0) | ~seen).all()), "a slot that was never written is read"
    assert tokens[:, : len(PROMPT)].tolist() == [PROMPT] * len(position), "the prompt was overwritten"
    return (tokens * seen * place_values(slots - len(PROMPT))).sum(1)


class TableTarget:
    """`scripted.ScriptedTarget` with the script as a table: a thousand sequences cost a few tensor operations."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.spec = TargetSpec(VOCAB, 1, 1, 512, (), torch.float64, CPU)
        self.rows: Rows | None = None
        self.top: Tensor | None = None  # [B, D]: the chain of the drafter's last proposal
        self.off_chain = 0  # accepted rows that are not the drafter's top-1 token of their depth

    def tap(self, layers: tuple[int, ...]) -> None:
        self.feature_layers = layers

    def allocate(self, slots: int, length: int) -> KVCache:
        return token_cache(slots, length)

    def prefill(self, cache: KVCache, ids: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        write(cache, list(ids), position.tolist())
        logits = torch.full((1, VOCAB), -100.0, dtype=torch.float64)
        logits[0, FIRST] = 0.0
        return ids.unsqueeze(-1).double(), logits

    def verify(self, cache: KVCache, rows: Rows, position: Tensor) -> tuple[Tensor, Tensor]:
        n = rows.tokens.shape[1]
        write(cache, list(rows.tokens), position.tolist())
        slots = position.unsqueeze(1) + torch.arange(n)
        tokens = cache.data[0, list(cache.slots), 0, :, 0].gather(1, slots).long() - 1
        places = position.unsqueeze(1) + rows.depths - len(PROMPT)  # [B, N]
        above = (unpack(rows.ancestors, n) * (tokens * place_values(places)).unsqueeze(1)).sum(-1)
        code = committed(cache, position).unsqueeze(1) + above
        self.rows = rows
        return TARGET[(places + 1).clamp(max=LENGTH + 1) % (LENGTH + 1), code], rows.tokens.unsqueeze(-1).double()

    def commit(self, cache: KVCache, path: Tensor, position: Tensor) -> None:
        if self.rows is not None and self.top is not None:
            tokens = self.rows.tokens.gather(1, path.clamp(min=0))[:, 1:]
            self.off_chain += int(((tokens != self.top[:, : tokens.shape[1]]) & (path[:, 1:] >= 0)).sum())
        cache.commit(path, position)

    def embed(self, ids: Tensor) -> Tensor:
        raise NotImplementedError  # the scripted drafter borrows neither embedding nor head

    head = embed


class TableDrafter:
    """Proposes from the table, by the history that its own context holds."""

    def __init__(self, target: TableTarget) -> None:
        self.target = target
        self.config, self.vocabulary, self.pairwise = drafter_config(DEPTHS + 1), None, None

    def allocate(self, slots: int, length: int) -> KVCache:
        return token_cache(slots, length)

    def append(self, cache: KVCache, features: Tensor, position: Tensor, counts: Sequence[int] | None = None) -> None:
        write(cache, list(features[..., 0].long()), position.tolist())

    def propose(self, cache: KVCache, root: Tensor, position: Tensor, depths: int) -> Tensor:
        place = position - len(PROMPT)
        code = committed(cache, position) + root * place_values(place)
        logits = DRAFTER[(place + 1).clamp(max=LENGTH + 1) % (LENGTH + 1), code][:, :depths]
        self.target.top = logits.argmax(-1)
        return logits


@dataclass
class Drawn:
    """Answers of one mode, and what shows that it speculated."""

    answers: list[Generation]
    rounds: int
    off_chain: int

    @property
    def sequences(self) -> list[tuple[int, ...]]:
        """The tokens behind the first."""
        return [tuple(a.token_ids[1:]) for a in self.answers]

    @property
    def accepted(self) -> float:
        """Nodes per round, before cuts."""
        return sum(a.rounds * (a.acceptance_length or 1.0) for a in self.answers) / self.rounds - 1


def draw(speculation: Speculation, seeds: Sequence[int], batch: int = BATCH) -> Drawn:
    """One answer a seed at temperature 1, through Engine.generate."""
    target = TableTarget()
    config = {"max_running_requests": batch, "prefix_caching": False}
    engine = scripted_engine(target, TableDrafter(target), config=config)  # type: ignore[arg-type]
    answers: list[Generation] = []
    for start in range(0, len(seeds), batch):
        params = [SamplingParams(max_tokens=LENGTH + 1, temperature=1.0, seed=s) for s in seeds[start : start + batch]]
        answers += engine.generate([PROMPT] * len(params), params, speculation)
    assert all(a.token_ids[0] == FIRST and len(a.token_ids) == LENGTH + 1 for a in answers)
    return Drawn(answers, sum(a.rounds for a in answers), target.off_chain)


def probabilities(answer: tuple[int, ...]) -> np.ndarray:
    """What the target gives the token behind an answer of 1 to 4 tokens. Returns: [V] float64."""
    code = sum(token * VOCAB**place for place, token in enumerate(answer))
    return torch.softmax(TARGET[len(answer), code], -1).numpy()


def p_value(sequences: Sequence[tuple[int, ...]]) -> float:
    """Chi-square test of the 256 joint sequences against the target."""
    cells = list(product(range(VOCAB), repeat=LENGTH))
    joint = [np.prod([probabilities((FIRST, *cell[:i]))[cell[i]] for i in range(LENGTH)]) for cell in cells]
    counts = Counter(sequences)
    expected = np.array(joint) / np.sum(joint) * len(sequences)
    assert expected.min() >= 5
    return float(stats.chisquare([counts[cell] for cell in cells], expected).pvalue)


def noise_table(seeds: int, positions: int) -> list[list[Tensor]]:
    """`sampling.gumbel` of seeds 0 .. seeds - 1 in one go, since a call for 4 tokens costs as much as one for 4,000."""
    mask = np.uint64(0xFFFFFFFF)

    def mix(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D) & mask
        x = (x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B) & mask
        return x ^ (x >> np.uint64(16))

    seed, position, token = (np.arange(n, dtype=np.uint64) for n in (seeds, positions, VOCAB))
    one = mix(mix(mix(seed ^ np.uint64(0x9E3779B9)))[:, None] ^ position)[..., None]
    two = mix(mix(mix(seed + np.uint64(0x85EBCA6B) & mask))[:, None] + position & mask)[..., None]
    bits = mix(mix(token ^ one) + two & mask)
    v = torch.from_numpy((bits.astype(np.float64) + 0.5) * 2.0**-32).float().clamp_(max=1.0 - 2.0**-24)
    table = -torch.log(-torch.log1p(-v))
    return [list(rows) for rows in table]


@pytest.fixture
def quick_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler's noise of seeds 0 .. DRAWS - 1 from a table; a spot check says that it is gumbel's own."""
    positions = len(PROMPT) + LENGTH + 1 + DEPTHS + 1
    table = noise_table(DRAWS, positions)
    for seed in (*range(0, DRAWS, 997), DRAWS - 1):
        for position in range(positions):
            assert torch.equal(table[seed][position], sampling.gumbel(seed, position, VOCAB))
    monkeypatch.setattr(sampling, "gumbel", lambda seed, position, vocab, device: table[seed][position])


def assert_speculated(drawn: Drawn) -> None:
    """Rounds ran, saved some, and kept nodes that the drafter's top-1 chain does not have."""
    assert 0 < drawn.rounds < LENGTH * len(drawn.answers)
    assert drawn.accepted > 0
    assert drawn.off_chain > 0


def test_tree_answers_follow_the_targets_joint_distribution(quick_noise: None) -> None:
    drawn = draw(TREE, range(DRAWS))
    found = p_value(drawn.sequences)
    print(f"p {found:.3g}, {drawn.rounds} rounds, {drawn.accepted:.2f} accepted, {drawn.off_chain} off the chain")
    assert_speculated(drawn)
    assert drawn.off_chain > DRAWS // 10
    assert found > LIMIT


@dataclass(frozen=True)
class Draft:
    """The tree that the engine verifies behind one answer, with the drafter's marginals q."""

    children: dict[tuple[int, ...], list[int]]  # path -> its children's tokens, most probable first
    q: np.ndarray  # [D, V]


@cache
def draft(answer: tuple[int, ...]) -> Draft:
    code = sum(token * VOCAB**place for place, token in enumerate(answer))
    logits = DRAFTER[len(answer) % (LENGTH + 1), code]  # [D, V]
    proposal = top_k(logits.unsqueeze(0), TREE.tree_top_k)
    nodes = best_first(proposal.log_q[0].tolist(), TREE.tree_budget)
    state = RoundState.allocate(1, len(nodes), DEPTHS)
    state.lay([nodes], proposal.tokens.tolist())
    children: dict[tuple[int, ...], list[int]] = {}
    for path in state.draft_tree(0).paths()[1:]:
        children.setdefault(path[:-1], []).append(path[-1])
    return Draft(children, torch.softmax(logits, -1).numpy())


Acceptor = Callable[[list[int], np.ndarray, np.ndarray, random.Random], int]


def own_token(candidates: list[int], p: np.ndarray, q: np.ndarray, rng: random.Random) -> int:
    """The project's rule: the target's own sample, whatever the candidates are."""
    return rng.choices(range(VOCAB), p)[0]


def min_1_p_over_q(candidates: list[int], p: np.ndarray, q: np.ndarray, rng: random.Random) -> int:
    """Speculative sampling's rule, candidate by candidate, with the residual max(p - q, 0) behind each refusal.

    It is exact where candidates are samples of q. The top ranks of a tree are not, so it favours them.
    """
    for token in candidates:
        if rng.random() < min(1.0, p[token] / q[token]):
            return token
        residual = np.maximum(p - q, 0.0)
        p = residual / residual.sum()
    return rng.choices(range(VOCAB), p)[0]


def walk(accept: Acceptor, draws: int) -> list[tuple[int, ...]]:
    """Answers of rounds on the engine's trees, with an acceptor of the test's own."""
    rng, answers = random.Random(7), []
    target = cache(probabilities)
    for _ in range(draws):
        answer: tuple[int, ...] = (FIRST,)
        while len(answer) <= LENGTH:
            tree, path = draft(answer), ()
            while len(answer) + len(path) <= LENGTH:
                candidates = tree.children.get(path, [])
                q = tree.q[min(len(path), DEPTHS - 1)]
                token = accept(candidates, target(answer + path), q, rng)
                path = (*path, token)
                if token not in candidates:
                    break
            answer += path
        answers.append(answer[1:])
    return answers


def test_min_1_p_over_q_fails_on_the_same_trees() -> None:
    """The control: the test above can tell a biased acceptor, and it is the acceptor that it tells."""
    fair, biased = p_value(walk(own_token, DRAWS)), p_value(walk(min_1_p_over_q, DRAWS))
    print(f"p {fair:.3g} with the target's own tokens, {biased:.3g} with min(1, p / q)")
    assert fair > LIMIT
    assert biased < LIMIT


def test_the_trees_branch_and_the_drafter_is_off() -> None:
    tree = draft((FIRST,))
    assert len(tree.children[()]) > 1
    assert max(map(len, tree.children)) > 0  # not the root alone has children
    far = [np.abs(draft((FIRST, token)).q[0] - probabilities((FIRST, token))).sum() / 2 for token in range(VOCAB)]
    assert np.mean(far) > 0.1


SEEDS = [*range(150), -1, -(2**63), 2**63 - 1, *(s << 32 for s in range(1, 50))]
MODES = [
    Speculation(mode="linear", tree_context="off"),
    Speculation(mode="shadow-linear", tree_budget=7, tree_top_k=3, tree_context="off"),
    TREE,
    Speculation(mode="tree", tree_budget=1, tree_top_k=1, tree_context="off"),
    Speculation(mode="tree", tree_budget=3, tree_top_k=4, tree_context="off"),
    Speculation(mode="tree", tree_budget=60, tree_top_k=4, tree_spine=4, tree_context="off"),
    Speculation(mode="tree", tree_budget=7, tree_top_k=3, tree_context="mix"),
]


@pytest.fixture(scope="module")
def ar() -> Drawn:
    """Answers without speculation."""
    drawn = draw(Speculation(mode="ar"), SEEDS)
    assert drawn.rounds == LENGTH * len(SEEDS)
    return drawn


@pytest.mark.parametrize(
    "speculation", MODES, ids=lambda s: f"{s.mode}-{s.tree_budget}-{s.tree_top_k}-{s.tree_spine}-{s.tree_context}"
)
def test_every_mode_draws_the_same_tokens_as_ar(ar: Drawn, speculation: Speculation) -> None:
    drawn = draw(speculation, SEEDS)
    assert drawn.sequences == ar.sequences
    assert 0 < drawn.rounds < ar.rounds
    assert (drawn.off_chain > 0) == (speculation.mode == "tree" and speculation.tree_budget > 1)
    shadows = [a.shadow for a in drawn.answers if a.shadow is not None]
    assert len(shadows) == (len(SEEDS) if speculation.mode == "shadow-linear" else 0)
    assert all(s.agree for s in shadows)


def test_the_batch_changes_nothing(ar: Drawn) -> None:
    """Alone, in uneven batches and in reverse, a seed gives the same answer."""
    assert draw(TREE, SEEDS[:20], batch=1).sequences == ar.sequences[:20]
    assert draw(TREE, SEEDS, batch=37).sequences == ar.sequences
    assert draw(TREE, SEEDS[::-1]).sequences == ar.sequences[::-1]
