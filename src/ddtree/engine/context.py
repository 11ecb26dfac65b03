"""What a sequence's own text adds to its drafts: `tree_context`, and the index it needs."""

from collections.abc import Sequence

import torch

from ddtree.config import Speculation
from ddtree.errors import InvalidOption
from ddtree.kernels.backend import usable
from ddtree.tree import Context, Guesses, Matches, TextIndex

# off: the drafter's scores alone. branch: what followed the last tokens where they stood before, from the root on.
# mix: the same behind every node, by the node's own path.
AUTO = "mix"  # what "auto" is where the host lays the rows


def settle(tree_context: str, device: torch.device) -> str:
    """off, branch or mix: what a `tree_context` means on a device; "auto" is off where the device lays the rows itself.

    Raises InvalidOption for what cannot be done there.
    """
    if not usable(device):
        return AUTO if tree_context == "auto" else tree_context
    if tree_context in ("branch", "mix"):
        raise InvalidOption(
            f"tree_context {tree_context} needs rows that the host lays, and on {device} the device lays them:"
            " use off, or auto, which is off there",
            param="tree_context",
        )
    return "off"


def describe(tree_context: str, device: torch.device) -> str:
    """`settle` for people: says so where "auto" is off for want of the means."""
    settled = settle(tree_context, device)
    return f"off (auto: not on {device} yet)" if (tree_context, settled) == ("auto", "off") else settled


class SequenceContext:
    """One sequence's text and what it is asked for. The index is made with the first committed token, after prefill."""

    def __init__(self, kind: str, prompt: Sequence[int]) -> None:
        """kind: branch or mix."""
        self._mix, self._prompt = kind == "mix", prompt
        self._index: TextIndex | None = None
        self._said: Guesses | None = None  # for the round that is under way

    @classmethod
    def of(cls, speculation: Speculation, prompt: Sequence[int], device: torch.device) -> "SequenceContext | None":
        """None where the mode drafts nothing, or the context is off."""
        kind = settle(speculation.tree_context, device)
        return None if speculation.mode == "ar" or kind == "off" else cls(kind, prompt)

    def guesses(self, tokens: Sequence[Sequence[int]], log_q: Sequence[Sequence[float]]) -> Guesses | None:
        """What the text so far says of a round's proposal, [D][K]; None where it says nothing."""
        context: Context | None = None
        if self._index is not None:
            context = Matches(self._index) if self._mix else self._index.branch(len(tokens))
        self._said = None if context is None else Guesses(context, tokens, log_q)
        return self._said

    def commit(self, tokens: Sequence[int]) -> None:
        """The text has grown; what was said of these tokens is compared with them."""
        if self._index is None:
            self._index = TextIndex(self._prompt)
        if self._said is not None:
            self._learn(self._index, self._said, tuple(tokens))
            self._said = None
        self._index.append(tokens)

    @staticmethod
    def _learn(index: TextIndex, said: Guesses, tokens: tuple[int, ...]) -> None:
        for depth, token in enumerate(tokens[: len(said.tokens)]):
            match = said.context.behind(tokens[:depth])
            if match is not None:
                row = said.tokens[depth]
                share = said.share(depth, row.index(match.token)) if match.token in row else 0.0
                index.confidence.learn(match.length, match.token == token, share)
