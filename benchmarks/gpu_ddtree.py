"""A plain DDTree over transformers: what a straightforward implementation does, eagerly, one sequence at a time.

The tree is built on the host, the target is transformers' own forward with an additive mask for the tree's rows, and
the accepted path is gathered out of its cache. The drafter is this package's, launched kernel by kernel: that is to the
advantage of this loop, since one written in plain PyTorch launches more kernels.
Source: DDTree (arXiv 2604.12989).
"""

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from ddtree.drafter import DFlashDrafter
from ddtree.tree import Nodes, best_first, top_k


class EagerDDTree:
    """One sequence: `start` with a prompt, then rounds."""

    def __init__(self, model: LlamaForCausalLM, drafter: DFlashDrafter, budget: int, ranks: int, length: int) -> None:
        """budget: nodes without the root; ranks: candidates per depth; length: positions, scratch not included.

        Raises ValueError where the drafter taps the last layer, whose state transformers gives after the final norm.
        """
        if max(drafter.config.target_layer_ids) >= model.config.num_hidden_layers - 1:
            raise ValueError(f"taps {drafter.config.target_layer_ids}: the last layer's state is not to be had")
        self.model, self.drafter, self.budget, self.ranks = model, drafter, budget, ranks
        self.depths = min(drafter.config.depths, budget)
        self.context = drafter.allocate(1, length + drafter.config.block_size)
        self.position, self.root = 0, -1
        self.rounds = self.accepted = 0
        # transformers 5.24 calls the argument `cache`, earlier versions `past_key_values`.
        named = inspect.signature(type(model).forward).parameters
        self._cache_name = "cache" if "cache" in named else "past_key_values"

    def start(self, prompt: Sequence[int]) -> int:
        """Read a prompt in one forward. Returns: the first token, which is the first root."""
        self.cache = DynamicCache(config=self.model.config)
        self.position = self.rounds = self.accepted = 0
        logits, features = self._forward(prompt, None, None, keep=1)
        self._append(features)
        self.position, self.root = len(prompt), int(logits[-1].argmax())
        return self.root

    def round(self) -> list[int]:
        """Draft, build, verify, accept, commit. Returns: the accepted tokens and the bonus."""
        nodes, tokens = self._tree()
        depths = torch.tensor(nodes.depths, device=self.model.device)
        logits, features = self._forward(tokens, self.position + depths, self._mask(nodes), keep=0)
        own = logits.argmax(-1).tolist()
        path = accepted_path(nodes, tokens, own)
        self._keep(path)
        self._append(features[path])
        committed = [own[row] for row in path]
        self.position, self.root = self.position + len(path), committed[-1]
        self.rounds, self.accepted = self.rounds + 1, self.accepted + len(path) - 1
        return committed

    def generate(self, prompt: Sequence[int], max_tokens: int, ends: Sequence[int] = ()) -> list[int]:
        """A whole answer, up to an end token (included) or so many tokens."""
        answer = [self.start(prompt)]
        while len(answer) < max_tokens and answer[-1] not in ends:
            committed = self.round()
            cut = next((i + 1 for i, token in enumerate(committed) if token in ends), len(committed))
            answer += committed[:cut]
        return answer[:max_tokens]

    def rewind(self, position: int, root: int) -> None:
        """Forget what lies from `position` on: a block of timed rounds begins where the one before it did."""
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[:, :, :position], layer.values[:, :, :position]
        self.position, self.root = position, root

    @property
    def acceptance_length(self) -> float:
        """(accepted + 1) per round."""
        return (self.accepted + self.rounds) / self.rounds

    def _tree(self) -> tuple[Nodes, list[int]]:
        root, position = (torch.tensor([n], device=self.model.device) for n in (self.root, self.position))
        proposal = top_k(self.drafter.propose(self.context, root, position, self.depths), self.ranks)
        nodes = best_first(proposal.log_q[0].tolist(), self.budget)
        candidates = proposal.tokens[0].tolist()
        drafted = [candidates[d - 1][rank] for d, rank in zip(nodes.depths[1:], nodes.ranks[1:], strict=True)]
        return nodes, [self.root, *drafted]

    def _mask(self, nodes: Nodes) -> Tensor:
        """[1, 1, N, position + N]: a row sees the committed context, its ancestors and itself."""
        visible = torch.eye(len(nodes), dtype=torch.bool)
        for row, parent in enumerate(nodes.parents):
            if parent >= 0:
                visible[row] |= visible[parent]
        mask = torch.zeros(len(nodes), self.position + len(nodes), dtype=self.model.dtype, device=self.model.device)
        hidden = ~visible.to(mask.device)
        mask[:, self.position :].masked_fill_(hidden, torch.finfo(mask.dtype).min)
        return mask[None, None]

    def _forward(
        self, tokens: Sequence[int], positions: Tensor | None, mask: Tensor | None, keep: int
    ) -> tuple[Tensor, Tensor]:
        """Logits [keep or N, V] and the tapped layers' states [N, taps * H]; keep: only the last rows' logits."""
        out = self.model(
            input_ids=torch.tensor([list(tokens)], device=self.model.device),
            attention_mask=mask,
            position_ids=None if positions is None else positions[None],
            use_cache=True,
            output_hidden_states=True,
            logits_to_keep=keep,
            **{self._cache_name: self.cache},
        )
        taps = self.drafter.config.target_layer_ids
        return out.logits[0], torch.cat([out.hidden_states[layer + 1][0] for layer in taps], -1)

    def _keep(self, path: Sequence[int]) -> None:
        """Of the rows behind the context the cache keeps those on the path, in place."""
        rows = self.position + torch.tensor(path, device=self.model.device)
        end = self.position + len(path)
        for layer in self.cache.layers:
            for states in (layer.keys, layer.values):
                states[:, :, self.position : end] = states[:, :, rows]
            layer.keys, layer.values = layer.keys[:, :, :end], layer.values[:, :, :end]

    def _append(self, features: Tensor) -> None:
        position = torch.tensor([self.position], device=self.model.device)
        self.drafter.append(self.context, features[None], position)


def accepted_path(nodes: Nodes, tokens: Sequence[int], own: Sequence[int]) -> list[int]:
    """Rows from the root on whose token is what the row before them chose."""
    path = [0]
    while True:
        here = path[-1]
        found = [row for row in range(here + 1, len(nodes)) if nodes.parents[row] == here and tokens[row] == own[here]]
        if not found:
            return path
        path.append(found[0])
