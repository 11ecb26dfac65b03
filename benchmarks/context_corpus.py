"""What earlier requests would add to `tree_context mix`, by replay (context_replay.py): acceptance lengths.

    OMP_NUM_THREADS=1 python benchmarks/context_corpus.py --keep proposals.pt --output FILE

A second index, of the same kind as the sequence's own, over other requests: their prompts and answers. Behind a node
the longer match of the two speaks, the own text's where they are equal, and each has confidences of its own, learned
from the table on. Who asked before:

    category   the suite's other prompts of the same category
    others     all of the suite's other prompts
    edited     the answers are of the suite's prompts with some words changed (context_edits.jsonl); asked before were
               the suite's own, all 28, the near-identical one among them
    again      the same prompts (temperature 0.7 alone), all 28: an answer that is asked for once more

At a temperature each of these has seeds of its own: with the same seed even another prompt's answer is alike.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from common import finish, machine, parser
from context_intervals import gain, rate
from context_replay import BATCH, CPU, Record, collect, rounds
from ddtree.bench.suite import CATEGORIES, Prompt, load_prompts
from ddtree.config import EngineConfig, Speculation
from ddtree.engine import Engine
from ddtree.engine.context import SequenceContext
from ddtree.tree import Guesses, Matches, Pair, TextIndex
from ddtree.tree.context import Match
from ddtree.tree.matches import LONGEST, ORDERS, Confidence

Kept = dict[str, dict[float, list[Record]]]  # by who is asked and temperature
EDITS = Path(__file__).with_name("context_edits.jsonl")


class Both:
    """A context: the longer match of a sequence's own text and of a corpus."""

    def __init__(self, own: TextIndex, corpus: TextIndex, text: Sequence[int], trust: Confidence, least: int) -> None:
        self._own, self._matches, self._corpus, self._trust = own, Matches(own), corpus, trust
        self._text, self._least = text[-LONGEST:], least
        self._found: dict[tuple[int, ...], tuple[int, int]] = {}
        self.from_corpus: set[tuple[int, ...]] = set()  # the paths behind which the corpus spoke

    def behind(self, path: tuple[int, ...]) -> Match | None:
        """See Context."""
        own, (position, length) = self._matches.behind(path), self._look(path)
        if position < 1 or length < self._least or (own is not None and own.length >= length):
            return own
        self.from_corpus.add(path)
        return Match(self._corpus.token(position, ()), self._trust(length), length)

    def _look(self, path: tuple[int, ...]) -> tuple[int, int]:
        """As Matches._look, in the corpus; a match of the root is followed back up to LONGEST tokens."""
        if path in self._found:
            return self._found[path]
        position, length = self._found.get(path[:-1], (0, 0)) if path else (0, 0)
        if position and position + 1 < len(self._corpus) and self._corpus.token(position, ()) == path[-1]:
            found = position + 1, length + 1
        else:
            tail = [*self._text, *path][-LONGEST:]
            position, length = self._corpus.find(tail) if len(tail) >= ORDERS else (0, 0)
            while 0 < length < min(len(tail), position):
                if self._corpus.token(position - 1 - length, ()) != tail[-1 - length]:
                    break
                length += 1
            found = position, length
        self._found[path] = found
        return found


class WithCorpus(SequenceContext):
    """A sequence's context that knows other texts too."""

    def __init__(self, prompt: Sequence[int], corpus: TextIndex, least: int) -> None:
        super().__init__("mix", prompt)
        self._corpus, self._least, self._trust = corpus, least, Confidence()

    def guesses(
        self, tokens: Sequence[Sequence[int]], log_q: Sequence[Sequence[float]], pair: Pair | None = None
    ) -> Guesses | None:
        if self._index is None:
            self._index = TextIndex(self._tokens)
        both = Both(self._index, self._corpus, self._tokens, self._trust, self._least)
        self._said = Guesses(both, tokens, log_q, pair)
        return self._said

    def _learn(self, index: TextIndex, said: Guesses, tokens: tuple[int, ...]) -> None:  # type: ignore[override]
        for depth, token in enumerate(tokens[: len(said.tokens)]):
            match = said.context.behind(tokens[:depth])
            if match is not None:
                row = said.tokens[depth]
                share = said.share(tokens[:depth], row.index(match.token)) if match.token in row else 0.0
                theirs = tokens[:depth] in said.context.from_corpus  # type: ignore[attr-defined]
                (self._trust if theirs else index.confidence).learn(match.length, match.token == token, share)


def texts(records: Sequence[Record]) -> TextIndex:
    """One index over requests and their answers."""
    return TextIndex([token for record in records for token in (*record.prompt, *record.answer)])


def traffic(
    kept: dict[str, dict[float, list[Record]]], temperature: float
) -> dict[str, tuple[list[Record], list[Any]]]:
    """By name: the answers that are replayed, and whose requests came before each of them."""
    suite, edited = kept["suite"][temperature], kept["edited"][temperature]
    found = {
        "category": (suite, [[o for o in suite if o.category == r.category and o is not r] for r in suite]),
        "others": (suite, [[o for o in suite if o is not r] for r in suite]),
        "edited": (edited, [suite] * len(edited)),
    }
    if temperature:
        found["again"] = (kept["again"][temperature], [suite] * len(suite))
    return found


def report_of(
    records: Sequence[Record], before: Sequence[Sequence[Record]], way: Speculation, least: int
) -> dict[str, Any]:
    """Off, mix, and mix with the corpus; gains of the corpus over mix."""
    made = [float(len(record.answer) - 1) for record in records]

    def shares(costs: Sequence[int]) -> list[tuple[float, float]]:
        return [(m, float(cost)) for m, cost in zip(made, costs, strict=True)]

    plain = replace(way, tree_context="off")
    off = shares([rounds(record, plain) for record in records])
    mix = shares([rounds(record, way) for record in records])
    both = shares(
        [
            rounds(record, way, WithCorpus(record.prompt, texts(others), least))
            for record, others in zip(records, before, strict=True)
        ]
    )
    who = {c: [i for i, record in enumerate(records) if record.category == c] for c in CATEGORIES}
    return {
        "off": round(rate(off), 3), "mix": round(rate(mix), 3), "with corpus": round(rate(both), 3),
        "gain over mix": gain(both, mix),
        "by category": {c: gain([both[i] for i in own], [mix[i] for i in own]) for c, own in who.items() if own},
    }  # fmt: skip


def decode(args: Any, temperatures: Sequence[float]) -> Kept:
    """The suite, its edited prompts, and the suite with other seeds."""
    engine = Engine.load(EngineConfig(dtype="float32", device=str(CPU), prefix_caching=False, max_model_len=2048))
    suite = load_prompts(args.limit)
    ids = {prompt.id for prompt in suite}
    lines = EDITS.read_text(encoding="utf-8").splitlines()
    edited = [prompt for prompt in (Prompt(**json.loads(line)) for line in lines) if prompt.id in ids]
    asked = {"suite": (suite, 0), "edited": (edited, BATCH * 200), "again": (suite, BATCH * 100)}
    return {
        name: {
            heat: collect(engine, prompts, heat, args.max_tokens, seed=seed)["full"]
            for heat in temperatures
            if heat or name != "again"
        }
        for name, (prompts, seed) in asked.items()
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--keep", type=Path, help="proposals are kept here, and read again where they are there")
    options.add_argument("--limit", type=int, help="only the first prompts of the suite; 14 or more")
    options.add_argument("--max-tokens", type=int, default=128)
    options.add_argument("--budgets", default="5,16")
    options.add_argument("--top-k", type=int, default=Speculation().tree_top_k)
    options.add_argument("--least", default="1,4", help="the shortest matches in the corpus that count")
    options.add_argument("--temperatures", default="0,0.7")
    args = options.parse_args()
    temperatures = [float(value) for value in args.temperatures.split(",")]
    if args.keep is not None and args.keep.exists():
        kept = torch.load(args.keep, weights_only=False)
    else:
        kept = decode(args, temperatures)
        if args.keep is not None:
            torch.save(kept, args.keep)
    report = machine() | {"max_tokens": args.max_tokens, "top_k": args.top_k, "temperatures": {}}
    for heat in temperatures:
        report["temperatures"][f"{heat:g}"] = {
            name: {
                f"{budget} nodes, from {least} on": report_of(
                    *asked, Speculation("tree", int(budget), args.top_k, tree_context="mix"), int(least)
                )
                for budget in args.budgets.split(",")
                for least in args.least.split(",")
            }
            for name, asked in traffic(kept, heat).items()
        }
    finish(report, args.output)


if __name__ == "__main__":
    main()
