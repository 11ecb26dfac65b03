"""The parts of a round that run inside SGLang's own CUDA graphs, behind the drafter's and behind the target's forward.

A round without them spends most of its time on the host, which launches some twenty small kernels one by one. Both
tails do what the round does otherwise, by the same kernels; what a captured graph reads and writes lies in the room.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ddtree import kernels
from ddtree.errors import InvalidOption
from ddtree.sglang import rows as lay
from ddtree.sglang.head import Drafted, TopKHead
from ddtree.sglang.pairwise import Pairs
from ddtree.sglang.room import Room
from ddtree.sglang.rows import Kept

VARIABLE = "DDTREE_SGLANG_TAILS"


def wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether graphs are captured with their tails: 1, the default, or 0 in the environment. Raises InvalidOption."""
    text = environment.get(VARIABLE) or "1"
    if text not in ("0", "1"):
        raise InvalidOption(f"{VARIABLE} must be 1 or 0, not {text!r}")
    return text == "1"


def grow(drafted: Drafted, pairs: Pairs | None, room: Room) -> None:
    """Lay the rows of every request. pairs: what trees go by beside the candidates' own scores, where there is a head.

    Chains are stock DFLASH's, the best token of every depth, whatever pairs say, and its first rows, also where a tree
    is verified beside it: SGLang's attention adds up in the order of the rows.
    """
    lines = None if pairs is None else pairs.lines(drafted, room.plan)
    order = {"chained": False, "chain_first": True}
    kernels.build(drafted.log_q, drafted.tokens, room.plan, room.state, room.width, lines, **order)


@dataclass
class Growth:
    """Behind the drafter: its heads, the rows, their links and their mask. Stands in for SGLang's greedy sampler."""

    head: TopKHead
    room: Room
    pairs: Pairs | None = None
    laid: dict[int, Tensor] = field(default_factory=dict)  # by a graph's requests: the mask that it writes, if it does

    def __call__(self, hidden: Tensor, input_ids: Tensor | None = None) -> None:
        """hidden: [B * block, H]. input_ids: SGLang's, unused."""
        self.head(hidden)
        self.grow(len(hidden) // self.head.block)

    def grow(self, size: int) -> None:
        """From the head's candidates of `size` requests; those behind the running ones have rows that nobody reads."""
        room = self.room
        grow(self.head.read(size), self.pairs, room)
        mask = room.mask.graphs(size)
        if mask is not None:
            now = room.view(size)
            lay.lay(now.rows, now.block.lengths, mask, now.links, prefix=room.mask.prefix)
            self.laid[size] = mask

    def has_laid(self, size: int, mask: Tensor) -> bool:
        """Whether the graph of `size` requests laid links and this very mask."""
        found = self.laid.get(size)
        return found is not None and found.data_ptr() == mask.data_ptr()


@dataclass
class Keeping:
    """Behind the target: every row's best token, the path that follows them, and what is kept of it.

    For rounds whose tokens are the logits' argmax and nothing else. In others (`stage` was told so by `committed=0`) it
    keeps nothing, and the round does so itself.
    """

    worker: Any
    shadows: bool  # whether a round's tree may be verified beside the chain that it commits
    kept: dict[int, Kept] = field(default_factory=dict)  # by the number of requests that a graph was captured for
    held: list[list[Tensor]] = field(default_factory=list)  # what graphs use and nobody else may hold any longer

    def capture(self, runner: Any, out: Any, forward: Any, tokens: int) -> None:
        """SGLang's hook: at the end of a forward that is captured, or of one that warms up before it."""
        room, size = self.worker.graph_room(), forward.batch_size
        if size not in self.kept:  # in a warm-up: what is allocated in the capture itself belongs to the graph
            self.kept[size] = Kept.allocate(size, room.block.ids.shape[1], room.commits.device)
        if not (room.commits.is_cuda and torch.cuda.is_current_stream_capturing()):
            room.commits.zero_()  # a graph captured anew, between rounds, finds the slots of the last one
        self.keep(room, out.next_token_logits, out.hidden_states, forward.seq_lens, size)
        helper = self.worker._fused_kv_helper
        if helper is not None:  # it replaces its workspaces when a prefill wants larger ones; a graph keeps to its own
            self.held.append([one for one in vars(helper).values() if torch.is_tensor(one)])

    def keep(self, room: Room, logits: Tensor, hidden: Tensor, lengths: Tensor, size: int) -> None:
        """logits: [B * N, V]; hidden: [B * N, features]; lengths: [B] integers, tokens in the cache."""
        now, kept = room.view(size), self.kept[size]
        depth, tree = now.block.ids.shape[1] - 1, None
        own = logits.argmax(-1).view(size, room.width)
        if self.shadows:
            accepted = kernels.accept(now.rows, own, depth, now.member)
            tree = kernels.accept(now.rows, own, depth, now.tree).count, now.shadows
        else:
            accepted = kernels.accept(now.rows, own, depth)
        lay.commit(accepted, lengths, now.block.row_slots, kept, tree, room.commits)
        self.worker.move(kept, now.block, hidden)

    def ends(self, shadowed: bool) -> bool:
        """Whether a round of these requests may end in a graph: one that is shadowed commits the chain's rows alone."""
        return self.shadows or not shadowed

    def read(self, captured: int, size: int) -> Kept:
        """What the last replay of the graph of `captured` requests kept of the `size` that run."""
        return self.kept[captured].taken(size)
