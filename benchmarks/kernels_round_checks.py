"""The checks of kernels_round.py: each kernel against its reference, on random inputs."""

import argparse
import traceback
from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor

from ddtree.config import SamplingParams
from ddtree.drafter import PairwiseHead
from ddtree.engine.rows import HostRows
from ddtree.engine.sampling import RowSampler, greedy
from ddtree.kernels import (
    PairFactors,
    Plan,
    PlanRow,
    accept,
    advance,
    build,
    choose,
    lines_of,
    pair,
    propose,
    settle,
)
from ddtree.kernels.choose import ChooseTiles
from ddtree.kernels.select import SelectTiles, select
from ddtree.tree import Nodes, Pair, Proposal, RoundState, best_first, chain, cut, largest, top_k, union
from ddtree.tree import accept as accept_by_torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Check = tuple[str, Callable[[], None]]


def same(found: Tensor, wanted: Tensor, what: str) -> None:
    """Raises AssertionError with how many differ, and the first."""
    if found.shape != wanted.shape:
        raise AssertionError(f"{what}: shape {tuple(found.shape)}, wanted {tuple(wanted.shape)}")
    differ = (found != wanted) & ~(found.isnan() & wanted.isnan())
    if differ.any():
        at = differ.nonzero()[0].tolist()
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {differ.numel()} differ, first at {at}: {found[tuple(at)].item()},"
            f" wanted {wanted[tuple(at)].item()}"
        )


def near(found: Tensor, wanted: Tensor, what: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=4e-6, equal_nan=True, msg=lambda text: f"{what}: {text}")


def draw_logits(rows: int, columns: int, kind: str, dtype: torch.dtype, device: str) -> Tensor:
    """Rows in a buffer whose padding is NaN."""
    buffer = torch.full((rows, columns + 16), torch.nan, device=device)
    logits = buffer[:, :columns]
    logits.copy_(torch.randint(-6, 7, logits.shape) if kind == "ties" else 3 * torch.randn(rows, columns))
    if kind == "odd":
        logits[0, columns // 2] = torch.nan
        logits[1] = -torch.inf
        logits[2, 3:] = -torch.inf
        logits[3, -1] = torch.inf
    return buffer.to(dtype)[:, :columns]


def check_select(columns: int, k: int, kind: str, dtype: torch.dtype, tiles: SelectTiles, device: str) -> None:
    logits = draw_logits(15, columns, kind, dtype, device)
    found = select(logits, k, tiles)
    values, ids = largest(logits, min(k, columns))
    same(found.ids, ids, "ids")
    same(found.values, values.float(), "values")
    near(found.norm, logits.float().logsumexp(-1), "norm")
    wanted, ours = top_k(logits.unsqueeze(0), k), propose(logits.unsqueeze(0), k)
    same(ours.tokens, wanted.tokens, "tokens of the proposal")
    near(ours.log_q, wanted.log_q, "log_q of the proposal")


def draw_scores(batch: int, depth: int, ranks: int, kind: str) -> Tensor:
    """[B, D, K] log-probabilities on the CPU, best first: with ties, with missing ranks, or distinct."""
    scores = -4 * torch.rand(batch, depth, ranks)
    scores = (scores.round() / 2 if kind == "ties" else scores).sort(-1, descending=True).values
    if kind == "missing":
        scores[:, depth // 2 :, 2:] = -torch.inf
        scores[0, depth // 2] = torch.nan
    return scores


def draw_pair(batch: int, depth: int, ranks: int, kind: str) -> Tensor:
    """[B, D - 1, K, K] pair scores on the CPU, in any order: with ties, with missing ones, or distinct."""
    scores = -4 * torch.rand(batch, depth - 1, ranks, ranks)
    scores = scores.round() / 2 if kind == "ties" else scores
    if kind == "missing":
        scores[torch.rand(scores.shape) < 0.4] = -torch.inf
        scores[torch.rand(scores.shape) < 0.1] = torch.nan
    return scores


def draw_head(vocab: int, hidden: int, rank: int, dtype: torch.dtype, device: str) -> tuple[PairwiseHead, PairFactors]:
    """A random gated head of every second token, and the same as the kernels read it."""
    ids = torch.arange(0, vocab, 2, device=device)
    before, behind, gate = (
        (torch.randn(rows, columns, device=device) / 4).bfloat16().float()
        for rows, columns in ((len(ids), rank), (len(ids), rank), (rank, hidden))
    )
    head = PairwiseHead.of(ids, vocab, (before, behind), torch.randn(rank, device=device), gate / 8, "mark")
    return head, head.factors(dtype)


def check_pair(batch: int, depth: int, ranks: int, hidden: int, dtype: torch.dtype, device: str) -> None:
    """Scores against the head's own, which are rounded otherwise; their order exactly."""
    head, factors = draw_head(1003, hidden, 64, dtype, device)
    states = torch.randn(batch, depth, hidden, device=device).to(dtype)
    tokens = torch.rand(batch, depth, 1003, device=device).argsort(-1)[..., :ranks]
    log_q = draw_scores(batch, depth, ranks, "normal").to(device) - 2.5
    plan = Plan.allocate(batch, device)
    plan.write([PlanRow(ranks=max(ranks - index % 2, 1), depth=depth) for index in range(batch)], 1)
    found = pair(factors, states, Proposal(tokens, log_q), plan)
    assert found.pair is not None
    log_q[1::2, :, max(ranks - 1, 1) :] = -torch.inf
    atol = 2e-5 if hidden < 1000 else 2e-4  # of the gate's long sums
    torch.testing.assert_close(found.pair, head.pair(states, tokens, log_q), rtol=1e-5, atol=atol)
    wanted = lines_of(log_q, found.pair)
    for name in ("edges", "places"):
        same(getattr(found.lines, name)[:, 1:], getattr(wanted, name)[:, 1:], name)
        same(getattr(found.lines, name)[:, 0, 0], getattr(wanted, name)[:, 0, 0], f"{name} of the first depth")


def lay_by_host(
    log_q: Tensor, candidates: Tensor, row: PlanRow, width: int, scores: Tensor | None = None
) -> RoundState:
    """All sequences by the same plan, as the engine lays them; the last sequence is a filler of `width` rows.

    scores: [B, D - 1, K, K] pair scores.
    """
    batch = len(log_q)
    state = RoundState.allocate(batch + 1, width, 63)
    state.member.fill_(True)
    nodes = []
    for index, marginals in enumerate(log_q[:, : row.depth, : row.ranks].tolist()):
        known = None
        if scores is not None:
            known = Pair.of(scores[index, : max(row.depth - 1, 0), : row.ranks, : row.ranks])
        tree = best_first(marginals, row.budget, row.spine, pair=known) if row.tree else Nodes.root()
        laid, rows = tree, [0]
        if row.chain:
            line = chain(row.depth, known)
            laid, rows = union(tree, line) if row.tree else (line, [0])
        state.tree[index, : len(tree)] = True
        if row.tree and row.chain:
            state.member[index] = False
            state.member[index, rows] = True
        nodes.append(laid)
    nodes.append(Nodes([-1] + [0] * (width - 1), [0] + [1] * (width - 1), [0] * width))
    state.lay(nodes, [*candidates.tolist(), [[0]]])
    return state


def check_build(
    batch: int, depth: int, ranks: int, row: PlanRow, width: int, kind: str, device: str, paired: bool = False
) -> None:
    log_q = draw_scores(batch, depth, ranks, kind)
    scores = draw_pair(batch, depth, ranks, kind) if paired else None
    candidates = torch.randint(0, 150_000, log_q.shape)
    plan = Plan.allocate(batch, device)
    plan.write([row] * batch, width)
    state = RoundState.allocate(batch, width + 1, depth, device)
    for name in ("tokens", "parents", "depths", "ancestors"):
        getattr(state, name).fill_(-77)
    state.tokens[:, 0] = 0
    lines = None
    if scores is not None:
        scores[..., row.ranks :] = -torch.inf
        lines = lines_of(log_q.to(device), scores.to(device))
    build(log_q.to(device), candidates.to(device), plan, state, width, lines)
    wanted, words = lay_by_host(log_q, candidates, row, width, scores), -(-width // 64)
    for name in ("parents", "depths", "tokens", "member", "tree"):
        same(getattr(state, name)[:, :width].cpu(), getattr(wanted, name)[:-1], name)
    same(state.ancestors[:, :width, :words].cpu(), wanted.ancestors[:-1], "ancestors")
    same(state.parents[:, width].cpu(), torch.full((batch,), -77), "the column behind")


def check_choose(
    columns: int, rows: int, temperature: float, dtype: torch.dtype, tiles: ChooseTiles, device: str
) -> None:
    """Batch 2 against each sequence's sampler, in a NaN-poisoned buffer."""
    logits = draw_logits(2 * rows, columns, "odd" if rows > 4 else "normal", dtype, device)
    logits = logits.unflatten(0, (2, rows))
    depths = torch.randint(0, 6, (2, rows), device=device)
    seeds, positions = [-(1 << 62) + 17, 1234], [0, (1 << 33) + 5]
    on = {"device": device}
    scale = torch.tensor([temperature] * 2, dtype=torch.float64, **on)
    own = choose(logits, torch.tensor(seeds, **on), torch.tensor(positions, **on), depths, scale, tiles)
    if temperature == 0:
        same(own, greedy(logits), "own")
        return
    for index in range(2):
        sampler = RowSampler(SamplingParams(temperature=temperature), seeds[index], [1], columns, torch.device(device))
        parts = HostRows([0] * rows, [-1] + [0] * (rows - 1), depths[index].tolist())
        same(own[index], sampler.choose(logits[index], parts, positions[index]), f"own of sequence {index}")
    one = choose(
        logits[1:, 2:3].clone(), torch.tensor(seeds[1:], **on), torch.tensor(positions[1:], **on), depths[1:, 2:3],
        scale[1:], tiles,
    )  # fmt: skip
    same(one[0], own[1, 2:3], "a row alone")


def draw_answers(batch: int, width: int, depth: int, device: str) -> tuple[RoundState, Tensor, Tensor]:
    """A state of random trees, answers that agree with half of the rows, and end tokens."""
    row = PlanRow(tree=True, budget=width - 1, ranks=8, depth=depth)
    state = RoundState.allocate(batch, width, depth, device)
    plan = Plan.allocate(batch, device)
    plan.write([row] * batch, width)
    scores = draw_scores(batch, depth, 8, "ties").to(device)
    candidates = torch.rand(batch, depth, 40, device=device).argsort(-1)[..., :8].contiguous()
    build(scores, candidates, plan, state, width)
    own = torch.randint(-1, 40, (batch, width), device=device)
    for step in range(width - 1, 0, -1):  # the lowest rows have the last word
        parent = state.parents[:, step].clamp(min=0)
        agree = (torch.rand(batch, device=device) < 0.6) & (state.parents[:, step] >= 0)
        token = torch.where(agree, state.tokens[:, step], own.gather(1, parent.unsqueeze(1)).squeeze(1))
        own.scatter_(1, parent.unsqueeze(1), token.unsqueeze(1))
    state.position.random_(0, 1 << 40)
    state.remaining.random_(1, 9)
    state.done.copy_(torch.rand(batch) < 0.2)
    state.member.copy_(torch.rand(batch, width) < 0.95)
    state.member[:, 0] = True
    for step in range(1, width):  # closed under parents
        above = state.member.gather(1, state.parents[:, step : step + 1].clamp(min=0)).squeeze(1)
        state.member[:, step] &= above
    return state, own, torch.randint(-2, 40, (batch, 2), device=device)


def commit_by_torch(state: RoundState, own: Tensor, ends: Tensor) -> None:
    """The engine's commit, without the caches."""
    accepted = accept_by_torch(state.rows, own, state.path.shape[1] - 1, state.member[:, : state.width])
    kept, ended = cut(accepted.tokens, accepted.count + 1, state.remaining, ends)
    kept = kept.masked_fill(state.done, 0)
    state.path.copy_(accepted.path.masked_fill(state.done.unsqueeze(1), -1))
    state.n_accepted.copy_(accepted.count)
    state.committed.copy_(accepted.tokens)
    state.n_committed.copy_(kept)
    bonus = accepted.tokens.gather(1, accepted.count.unsqueeze(1)).squeeze(1)
    state.tokens[:, 0] = torch.where(state.done, state.tokens[:, 0], bonus)
    state.position += (accepted.count + 1).masked_fill(state.done, 0)
    state.remaining -= kept
    state.done |= ended | (state.remaining <= 0)


def check_accept(batch: int, width: int, depth: int, device: str) -> None:
    state, own, ends = draw_answers(batch, width, depth, device)
    member = state.member[:, :width]
    for taken in (None, member):
        wanted = accept_by_torch(state.rows, own, depth, taken)
        found = accept(state.rows, own, depth, taken)
        for name in ("path", "count", "tokens"):
            same(getattr(found, name), getattr(wanted, name), name)
    theirs = RoundState(**{k: v.clone() if isinstance(v, Tensor) else v for k, v in vars(state).items()})
    commit_by_torch(theirs, own, ends)
    ended = torch.zeros(batch, dtype=torch.bool, device=device)
    settle(state, own, ends, ended)
    advance(state, ended)
    for name, value in vars(theirs).items():
        if isinstance(value, Tensor):
            same(getattr(state, name), value, f"settle and advance: {name}")


def all_checks(options: argparse.Namespace, device: str) -> Iterator[Check]:
    """Every check by name."""
    yield from _select_checks(options, device)
    plans = {
        "tree": PlanRow(tree=True, budget=63, ranks=16, depth=15),
        "tree 15": PlanRow(tree=True, budget=15, ranks=8, depth=15, spine=4),
        "both": PlanRow(tree=True, chain=True, budget=48, ranks=8, depth=15),
        "chain": PlanRow(chain=True, ranks=8, depth=15),
        "root": PlanRow(),
    }
    batches = (1, 2 if device == "cpu" else 32)
    for (name, row), kind, batch in product(plans.items(), ("normal", "ties", "missing"), batches):
        args = (batch, 15, 16, row, max(row.rows, 16), kind, device)
        yield f"build {name} {kind} B={batch}", lambda a=args: check_build(*a)
        yield f"build by pairs {name} {kind} B={batch}", lambda a=args: check_build(*a, paired=True)
    hidden = (64,) if device == "cpu" else (576, 4096)
    for dtype, columns, ranks, batch in product(DTYPES, hidden, (5, 16, 32), batches):
        args = (batch, 9, ranks, columns, dtype, device)
        yield f"pair {dtype} H={columns} K={ranks} B={batch}", lambda a=args: check_pair(*a)
    deep = PlanRow(tree=True, chain=True, budget=150, ranks=32, depth=63)
    yield "build 214 rows of depth 63", lambda: check_build(3, 63, 32, deep, 214, "ties", device)
    temperatures = (0.0, 1e-300, 1e-3, 0.7, 1.0, 1.5, 1e300)
    for v, dtype, t, n in product(_vocabularies(options, device), DTYPES, temperatures, (3, 16)):
        args = (v, n, t, dtype, ChooseTiles(), device)
        yield f"choose V={v} {dtype} T={t} N={n}", lambda a=args: check_choose(*a)
    sizes = [(1, 16, 15), (8, 64, 15), (3, 130, 40), (2, 1, 1), (32, 64, 15)]
    for (batch, width, depth), turn in product(sizes[:4] if device == "cpu" else sizes, range(3)):
        args = (batch, width, depth, device)
        yield f"accept B={batch} N={width} D={depth} #{turn}", lambda a=args: check_accept(*a)


def _vocabularies(options: argparse.Namespace, device: str) -> tuple[int, ...]:
    return (1003,) if device == "cpu" else (1003, 49152, options.vocab)


def _select_checks(options: argparse.Namespace, device: str) -> Iterator[Check]:
    """Every rank count in bfloat16; one in the other dtypes and of the sorting kernel, which take long to compile."""
    cases = [(dtype, 16, False) for dtype in DTYPES] + [(torch.bfloat16, k, False) for k in (1, 5, 32)]
    if device == "cuda":
        cases += [(torch.bfloat16, 16, True), (torch.float32, 32, True)]
    for v, (dtype, k, bitonic), kind in product(_vocabularies(options, device), cases, ("normal", "ties", "odd")):
        args = (v, k, kind, dtype, SelectTiles(bitonic=bitonic), device)
        yield f"select V={v} {dtype} {kind} k={k} bitonic={bitonic}", lambda a=args: check_select(*a)


def run_checks(options: argparse.Namespace, device: str) -> dict[str, str]:
    """Name -> "ok" or what went wrong; failures are printed as they come."""
    results = {}
    for number, (name, check) in enumerate(all_checks(options, device)):
        torch.manual_seed(number)
        try:
            check()
            if device == "cuda":
                torch.cuda.synchronize()
            results[name] = "ok"
        except Exception as error:  # also the compiler's
            results[name] = f"{type(error).__name__}: {error}"[:600]
            print(f"FAIL {name}: {results[name]}", flush=True)
            if not isinstance(error, AssertionError):
                traceback.print_exc(limit=-3)
    good = sum(result == "ok" for result in results.values())
    print(f"checks: {good} of {len(results)} ok", flush=True)
    return results
