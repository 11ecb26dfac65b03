"""At temperature 1 the engine's joint distribution is the target's, whatever the drafter says.

The target has 4 tokens and logits that depend on the whole answer so far; the drafter is wrong on purpose, and its trees
branch. The answer's first token, which prefill chooses, is certain, so the 4 tokens behind it (256 possible sequences)
all go through draft, build, verify, accept and commit. As a control, acceptance with probability min(1, p / q) runs on
the same trees and must be told apart from the target by the same test.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats
from scripted import CPU, drafter_config, scripted_engine, token_cache, write
from torch import Tensor

from ddtree.config import SamplingParams, Speculation
from ddtree.engine import Generation
from ddtree.layers import KVCache
from ddtree.target import TargetSpec
from ddtree.tree import DraftTree, RoundState, Rows, best_first, top_k, unpack

VOCAB, LENGTH, DEPTHS = 4, 4, 4
PROMPT = [2, 3, 1]
FIRST = 2  # the certain first token of every answer
TREE = Speculation(mode="tree", tree_budget=7, tree_top_k=3)
DRAWS, BATCH = 50_000, 1_000
LIMIT = 1e-3  # p-value of the chi-square test


def tables() -> tuple[Tensor, Tensor]:
    """Target logits [5, 1024, V] and drafter logits [5, 1024, D, V] by length and code of the answer so far.

    The code is the sum of token * 4^place. Answers of 5 tokens and more, which only rows past the end see, share length 0.
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
    tokens = data.data[0, :, 0, :span, 0].long() - 1
    assert bool((tokens.ge(0) | ~seen).all()), "a slot that was never written is read"
    assert tokens[:, : len(PROMPT)].tolist() == [PROMPT] * len(position), "the prompt was overwritten"
    return (tokens * seen * place_values(slots - len(PROMPT))).sum(1)


class TableTarget:
    """`scripted.ScriptedTarget` with the script as a table, so that a thousand sequences cost a few tensor operations."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.spec = TargetSpec(VOCAB, 1, 1, 512, (), torch.float64, CPU)
        self.rows: Rows | None = None
        self.top: Tensor | None = None  # [B, D]: the chain of the drafter's last proposal
        self.off_chain = 0  # accepted rows that are not the drafter's top-1 token of their depth

    def tap(self, layers: tuple[int, ...]) -> None:
        self.feature_layers = layers

    def allocate(self, batch: int, slots: int) -> KVCache:
        return token_cache(batch, slots)

    def prefill(self, cache: KVCache, ids: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        write(cache, ids, position)
        logits = torch.full((1, VOCAB), -100.0, dtype=torch.float64)
        logits[0, FIRST] = 0.0
        return ids.unsqueeze(-1).double(), logits

    def verify(self, cache: KVCache, rows: Rows, position: Tensor) -> tuple[Tensor, Tensor]:
        n = rows.tokens.shape[1]
        write(cache, rows.tokens, position)
        slots = position.unsqueeze(1) + torch.arange(n)
        tokens = cache.data[0, :, 0, :, 0].gather(1, slots).long() - 1
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
        raise NotImplementedError

    head = embed


class TableDrafter:
    """Proposes from the table, by the history that its own context holds."""

    def __init__(self, target: TableTarget) -> None:
        self.target = target
        self.config = drafter_config(DEPTHS + 1)

    def allocate(self, batch: int, slots: int) -> KVCache:
        return token_cache(batch, slots)

    def append(self, cache: KVCache, features: Tensor, position: Tensor) -> None:
        write(cache, features[..., 0].long(), position)

    def propose(self, cache: KVCache, root: Tensor, position: Tensor, depths: int) -> Tensor:
        place = position - len(PROMPT)
        code = committed(cache, position) + root * place_values(place)
        logits = DRAFTER[(place + 1).clamp(max=LENGTH + 1) % (LENGTH + 1), code][:, :depths]
        self.target.top = logits.argmax(-1)
        return logits


@dataclass
class Draws:
    sequences: list[tuple[int, ...]]  # the tokens behind the first
    rounds: int
    accepted: float  # mean accepted nodes per round
    off_chain: int


def draw(speculation: Speculation, draws: int) -> Draws:
    """Answers of seeds 0 .. draws - 1 at temperature 1, through Engine.generate."""
    target = TableTarget()
    engine = scripted_engine(target, TableDrafter(target))  # type: ignore[arg-type]
    answers: list[Generation] = []
    for start in range(0, draws, BATCH):
        params = [
            SamplingParams(max_tokens=LENGTH + 1, temperature=1.0, seed=seed)
            for seed in range(start, min(start + BATCH, draws))
        ]
        answers += engine.generate([PROMPT] * len(params), params, speculation)
    assert all(a.token_ids[0] == FIRST and len(a.token_ids) == LENGTH + 1 for a in answers)
    rounds = sum(a.rounds for a in answers)
    tokens = sum(a.rounds * a.acceptance_length for a in answers if a.acceptance_length)
    return Draws([tuple(a.token_ids[1:]) for a in answers], rounds, tokens / rounds - 1, target.off_chain)
