"""Texts on the device and rows laid with them (`tree_context`): first equality with the host, then times under a graph.

    python benchmarks/kernels_context.py --output benchmarks/results/kernels-context.json

Checked are texts of each of --lengths, random ones, ones that repeat themselves, and words of this project's own pages,
one and eight at once, over --rounds rounds each: tables, matches, rows and what was learned. Every check is tried,
whatever failed before. Timed are graphs of 24 calls, by CUDA events, in microseconds a call: `build`, as a round
without a context has it; `build_with` alone (`mix build`; with pair scores `mix build by pairs`); `build_with` and
`note`, as a round with a context has them; and how much longer than `build` that is (`more`). Without CUDA the checks
run in Triton's interpreter (TRITON_INTERPRET=1; choose small --lengths). The last line has it all.
"""

import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import torch

from common import finish, machine, parser
from ddtree.config import Speculation
from ddtree.engine.context import SequenceContext
from ddtree.engine.modes import MODES, Layout, lay_out
from ddtree.kernels import PairedProposal, Plan, PlanRow, build, lines_of
from ddtree.kernels.context import KINDS, Said, TextStore, build_with
from ddtree.tree import Nodes, Proposal, RoundState
from ddtree.tree.matches import Confidence
from kernels_round_checks import draw_pair

CALLS = 24  # in one graph
DEPTH, RANKS, VOCAB = 15, 16, 49_152
SPARE = 8192  # tokens that the calls of a timing may append
HOST = torch.device("meta")  # a device without kernels, whatever there is


@lru_cache
def words() -> list[int]:
    """The project's own pages as numbers of their words: a text that repeats itself as texts do."""
    numbers: dict[str, int] = {}
    pages = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
    text = " ".join(page.read_text(encoding="utf-8") for page in pages)
    return [numbers.setdefault(word, len(numbers)) for word in re.findall(r"\w+|\W", text)]


def draw_text(kind: str, length: int, seed: int) -> list[int]:
    """`random`: hardly any match; `few`: of four tokens; `period`: goes round; `words`."""
    rng = Random(seed)
    if kind == "words":
        found = words()
        start = rng.randrange(len(found))
        return (found[start:] + found * (length // len(found) + 1))[:length]
    if kind == "period":
        part = [rng.randrange(VOCAB) for _ in range(37)]
        return (part * (length // 37 + 1))[:length]
    return [rng.randrange(4 if kind == "few" else VOCAB) for _ in range(length)]


class Scene:
    """A batch of sequences with texts, on the device and, where asked, on the host."""

    def __init__(self, speculation: Speculation, texts: Sequence[Sequence[int]], device: str, spare: int) -> None:
        self.speculation, self.device, batch = speculation, device, len(texts)
        self.mode, self.capacity = MODES[speculation.mode], max(map(len, texts)) + spare
        self.row = PlanRow(
            tree=self.mode.tree, chain=self.mode.chain, budget=speculation.tree_budget if self.mode.tree else 0,
            spine=speculation.tree_spine, ranks=RANKS if self.mode.tree else 1, depth=DEPTH,
            context=KINDS[speculation.tree_context],
        )  # fmt: skip
        self.store = TextStore.allocate(batch + 1, self.capacity, device)
        for slot, text in enumerate(texts):
            self.store.write(slot, text, Confidence())
        self.texts = texts
        self.slots = torch.arange(batch, device=device)
        self.plan, self.state = Plan.allocate(batch, device), RoundState.allocate(batch, self.row.rows, DEPTH, device)
        self.plan.write([self.row] * batch, self.row.rows)
        self.said = Said.allocate(batch, self.row.rows, device)

    def propose(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and candidates, of which the text's own tokens are some."""
        generator = torch.Generator().manual_seed(seed)
        shape = (len(self.texts), DEPTH, RANKS)
        log_q = (torch.randn(shape, generator=generator) * 2).sort(-1, descending=True).values.log_softmax(-1)
        step = torch.randint(1, VOCAB // RANKS, (*shape[:2], 1), generator=generator)
        candidates = torch.arange(RANKS) * step
        for index, text in enumerate(self.texts):
            own = torch.tensor(text)[torch.randint(len(text), (DEPTH,), generator=generator)]
            fresh = (candidates[index] != own[:, None]).all(-1)
            candidates[index, :, 3] = torch.where(fresh, own, candidates[index, :, 3])
        return log_q.to(self.device), candidates.to(self.device)

    def lay(self, log_q: torch.Tensor, candidates: torch.Tensor) -> None:
        self.lay_proposal(Proposal(candidates, log_q))

    def lay_proposal(self, proposal: Proposal) -> None:
        build_with(self.store, self.slots, proposal, self.plan, self.state, self.said)

    def note(self) -> None:
        self.store.note(self.plan, self.slots, self.state, self.said)

    def check(self, rounds: int, seed: int) -> None:
        """Raises AssertionError where the device does not do as the host does."""
        hosts = [SequenceContext.of(self.speculation, text[:-1], self.capacity) for text in self.texts]
        for host, text in zip(hosts, self.texts, strict=True):
            assert host is not None
            host.commit(text[-1:])
        rng = Random(seed)
        for number in range(rounds):
            log_q, candidates = self.propose(seed + number)
            self.lay(log_q, candidates)
            layouts = [self._by_host(*args) for args in zip(hosts, candidates.tolist(), log_q.tolist(), strict=True)]
            self._compare(layouts, candidates)
            self._commit(layouts, hosts, rng)
            self._compare_texts(hosts)

    def _by_host(self, host: Any, tokens: list[list[int]], log_q: list[list[float]]) -> Layout:
        tokens, log_q = [row[: self.row.ranks] for row in tokens], [row[: self.row.ranks] for row in log_q]
        return lay_out(self.mode, self.speculation, log_q, host.guesses(tokens, log_q))

    def _compare(self, layouts: Sequence[Layout], candidates: torch.Tensor) -> None:
        n = self.row.rows
        filler = Nodes([-1] + [0] * (n - 1), [0] + [1] * (n - 1), [0] * n)
        wanted = RoundState.allocate(len(layouts) + 1, n, DEPTH)
        wanted.lay([*(layout.nodes for layout in layouts), filler], [*candidates.tolist(), [[0]]])
        for name in ("parents", "depths", "ancestors"):
            assert torch.equal(getattr(self.state, name).cpu(), getattr(wanted, name)[:-1]), name
        assert torch.equal(self.state.tokens[:, 1:].cpu(), wanted.tokens[:-1, 1:]), "tokens"
        for index, layout in enumerate(layouts):
            assert int(self.state.tree[index].sum()) == layout.tree_size, "tree"
            chain = self.state.member[index].nonzero().flatten().tolist()
            assert chain == (sorted(layout.chain) if self.mode.shadows else list(range(n))), "member"

    def _commit(self, layouts: Sequence[Layout], hosts: Sequence[Any], rng: Random) -> None:
        """A row's path and a bonus."""
        self.state.path.fill_(-1)
        tokens = self.state.tokens.tolist()
        for index, (layout, host) in enumerate(zip(layouts, hosts, strict=True)):
            row, path = rng.choice(layout.chain if self.mode.shadows else range(len(layout.nodes))), []
            while row >= 0:
                path.append(row)
                row = layout.nodes.parents[row]
            path.reverse()
            committed = [tokens[index][row] for row in path[1:]] + [rng.choice(self.texts[index])]
            self.state.path[index, : len(path)] = torch.tensor(path)
            self.state.committed[index, : len(committed)] = torch.tensor(committed)
            self.state.n_committed[index] = len(committed)
            host.commit(committed)
        self.note()

    def _compare_texts(self, hosts: Sequence[Any]) -> None:
        for slot, host in enumerate(hosts):
            index = host._index
            assert int(self.store.lengths[slot]) == len(index), "length"
            assert tuple(self.store.matches[slot].tolist()) == index.match, "match"
            tables = torch.stack([torch.frombuffer(table, dtype=torch.int32) for table in index._tables])
            assert torch.equal(self.store.tables[slot].cpu(), tables), "tables"
            found = torch.tensor(self.store.read_confidence(slot).state, dtype=torch.float64)
            wanted = torch.tensor(index.confidence.state, dtype=torch.float64)
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def run_checks(lengths: Sequence[int], rounds: int, device: str) -> dict[str, Any]:
    """How many checks there were, and the first words of each that failed."""
    failed, count = {}, 0
    modes = [("tree", 15), ("tree", 31), ("tree", 63), ("linear", 1), ("shadow-linear", 31)]
    for length, kind, batch in product(lengths, ("random", "few", "period", "words"), (1, 8)):
        texts = [draw_text(kind, length - 7 * seed, seed) for seed in range(batch)]
        mode, budget = modes[count % len(modes)]
        for context in ("branch", "mix"):
            name, count = f"{length} {kind} B={batch} {mode} {budget} {context}", count + 1
            try:
                spine = count % 3
                scene = Scene(Speculation(mode, budget, RANKS, spine, context), texts, device, 64 * (rounds + 1))
                scene.check(rounds, count)
            except Exception:
                failed[name] = traceback.format_exc().strip().splitlines()[-1][:200]
    return {"checks": count, "failed": failed}


def microseconds(call: Callable[[], Any], turns: int) -> float:
    """Median of the graph's replays, over its calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for turn in range(turns + 3):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        graph.replay()
        after.record()
        torch.cuda.synchronize()
        if turn >= 3:
            times.append(1000 * before.elapsed_time(after) / CALLS)
    return round(statistics.median(times), 2)


def timings(lengths: Sequence[int], turns: int) -> dict[str, dict[str, float]]:
    """Every round commits three tokens."""
    found: dict[str, dict[str, float]] = {}
    for length, batch in product(lengths, (1, 8)):
        texts = [draw_text("words", length, seed) for seed in range(batch)]
        for mode, budget in (("tree", 16), ("tree", 32), ("tree", 63), ("linear", 1)):
            line: dict[str, float] = {}
            for context in ("branch", "mix"):
                scene = Scene(Speculation(mode, budget, RANKS, 0, context), texts, "cuda", SPARE)
                log_q, candidates = scene.propose(length)
                scene.state.n_committed.fill_(3)
                scene.state.committed[:, :3] = torch.tensor([text[20:23] for text in texts])
                scene.state.path[:, :3] = torch.tensor([0, 1, 2])
                plain = (log_q, candidates, scene.plan, scene.state, scene.row.rows)
                if not line:
                    line["build"] = microseconds(lambda a=plain: build(*a), turns)
                    line["note"] = microseconds(scene.note, turns)

                def both(scene: Scene = scene, log_q: Any = log_q, candidates: Any = candidates) -> None:
                    scene.lay(log_q, candidates)
                    scene.note()

                scores = draw_pair(batch, DEPTH, RANKS, "normal").cuda()
                known = PairedProposal(candidates, log_q, scores, lines=lines_of(log_q, scores))
                by_pairs = microseconds(lambda s=scene, p=known: s.lay_proposal(p), turns)
                line[f"{context} build by pairs"] = by_pairs
                line[f"{context} build"] = microseconds(lambda s=scene, q=log_q, c=candidates: s.lay(q, c), turns)
                line[context] = microseconds(both, turns)
                line[f"{context} more"] = round(line[context] - line["build"], 2)
            found[f"{length} B={batch} {mode} {budget if mode == 'tree' else ''}".strip()] = line
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--lengths", default="512,4096,16384,32768")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--turns", type=int, default=9)
    args = options.parse_args()
    lengths = [int(value) for value in args.lengths.split(",")]
    started, cuda = time.perf_counter(), torch.cuda.is_available()
    report = machine() | {"checked": run_checks(lengths, args.rounds, "cuda" if cuda else "cpu")}
    report["check_seconds"] = round(time.perf_counter() - started, 1)
    if cuda:
        report["microseconds"] = timings(lengths, args.turns)
    report["seconds"] = round(time.perf_counter() - started, 1)
    finish(report, args.output)
    if report["checked"]["failed"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
