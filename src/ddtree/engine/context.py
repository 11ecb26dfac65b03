"""What a sequence's own text adds to its drafts: `tree_context`, and the index it needs."""

from collections.abc import Sequence

import torch

from ddtree.config import Speculation
from ddtree.kernels.context import KINDS, TextStore
from ddtree.tree import Context, Guesses, Matches, Pair, TextIndex
from ddtree.tree.matches import Confidence


class SequenceContext:
    """One sequence's text and what it is asked for. The index is made with the first round that the host lays.

    off: the drafter's scores alone. branch: what followed the last tokens where they stood before, from the root on.
    mix: the same behind every node, by the node's own path. While the device lays the rows, the text's index and its
    confidences are there: see `DeviceTexts`.
    """

    def __init__(self, kind: str, prompt: Sequence[int], room: int = 0) -> None:
        """kind: branch or mix. room: the most tokens the text may come to have (0: its tables grow with it)."""
        self._mix, self._tokens, self._room = kind == "mix", list(prompt), room
        self._committed = 0
        self._index: TextIndex | None = None
        self._confidence: Confidence | None = None  # what was learned on a device
        self._said: Guesses | None = None  # for the round that is under way
        self.plan = KINDS[kind]  # as PlanRow.context has it

    @classmethod
    def of(cls, speculation: Speculation, prompt: Sequence[int], room: int = 0) -> "SequenceContext | None":
        """None where the mode drafts nothing, or the context is off. The speculation is settled: it has no "auto"."""
        kind = speculation.tree_context
        return None if speculation.mode == "ar" or kind == "off" else cls(kind, prompt, room)

    def guesses(
        self, tokens: Sequence[Sequence[int]], log_q: Sequence[Sequence[float]], pair: Pair | None = None
    ) -> Guesses | None:
        """What the text so far says of a round's proposal, [D][K]; None where it says nothing."""
        if not self._committed:
            return None
        if self._index is None:
            self._index = TextIndex(self._tokens, self._room, self._confidence)
        context: Context | None = Matches(self._index) if self._mix else self._index.branch(len(tokens))
        self._said = None if context is None else Guesses(context, tokens, log_q, pair)
        return self._said

    def commit(self, tokens: Sequence[int]) -> None:
        """The text has grown; what was said of these tokens is compared with them."""
        self._committed += len(tokens)
        self._tokens += tokens
        if self._index is None:
            return
        if self._said is not None:
            self._learn(self._index, self._said, tuple(tokens))
            self._said = None
        self._index.append(tokens)

    def send(self, texts: TextStore, slot: int) -> None:
        """To the device, which is told of nothing that it commits itself; the host's index is given up."""
        confidence = self._index.confidence if self._index is not None else self._confidence or Confidence()
        texts.write(slot, self._tokens, confidence)
        self._index = self._said = None

    def fetch(self, texts: TextStore, slot: int) -> None:
        """From the device: from now on the host lays this sequence's rows, with what was learned there."""
        self._confidence = texts.read_confidence(slot)

    @staticmethod
    def _learn(index: TextIndex, said: Guesses, tokens: tuple[int, ...]) -> None:
        for depth, token in enumerate(tokens[: len(said.tokens)]):
            match = said.context.behind(tokens[:depth])
            if match is not None:
                row = said.tokens[depth]
                share = said.share(tokens[:depth], row.index(match.token)) if match.token in row else 0.0
                index.confidence.learn(match.length, match.token == token, share)


class DeviceTexts:
    """Whose text lies in which slot of a device. Made with the first sequence that has one."""

    def __init__(self, slots: int, capacity: int, device: torch.device) -> None:
        """capacity: the most tokens of a text."""
        self.store = TextStore.allocate(slots, capacity, device)
        self._there: dict[int, SequenceContext] = {}

    def bring(self, contexts: Sequence[SequenceContext | None], slots: Sequence[int]) -> None:
        """Before rounds of these sequences on the device. None: one without a context."""
        for context, slot in zip(contexts, slots, strict=True):
            if context is not None and self._there.get(slot) is not context:
                context.send(self.store, slot)
                self._there[slot] = context

    def give_back(self, contexts: Sequence[SequenceContext | None], slots: Sequence[int]) -> None:
        """Before rounds that the host lays. Waits for the device."""
        for context, slot in zip(contexts, slots, strict=True):
            if context is not None and self._there.get(slot) is context:
                context.fetch(self.store, slot)
                del self._there[slot]
