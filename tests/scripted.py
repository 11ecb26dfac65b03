"""A target and a drafter that follow a script: exact tests of the loop, with acceptance inside a block forced at will.

The caches hold token ids, written, read and committed by the same KVCache as a real model's; so a slot that is wrong
shows as a wrong history.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddtree.config import EngineConfig, Speculation
from ddtree.drafter import DrafterConfig
from ddtree.engine.engine import Engine
from ddtree.layers import KVCache
from ddtree.target import TargetSpec
from ddtree.tree import Rows, unpack

CPU = torch.device("cpu")
Script = Callable[[tuple[int, ...]], Sequence[float]]  # history -> logits of the next token


def token_cache(slots: int, length: int) -> KVCache:
    """A cache whose one key is the token id plus one (0: never written)."""
    return KVCache.allocate(1, slots, length, 1, 1, torch.float64, CPU)


def write(cache: KVCache, ids: Sequence[Tensor], starts: Sequence[int]) -> None:
    """ids: one [n] tensor per sequence."""
    heads = (torch.cat(list(ids)) + 1).to(torch.float64)[:, None, None].expand(-1, 2, 1)
    cache.write(0, cache.segments(starts, [len(i) for i in ids]), heads)


def history(cache: KVCache, index: int, places: Sequence[int]) -> tuple[int, ...]:
    """What sequence `index` of a view holds at these positions."""
    lane = cache.data[0, cache.slots[index], 0, : max(places, default=-1) + 1, 0].long().tolist()
    tokens = [lane[place] - 1 for place in places]
    assert all(t >= 0 for t in tokens), "a position that was never written is read"
    return tuple(tokens)


class ScriptedTarget:
    """Logits are a function of the whole history, as the cache holds it."""

    def __init__(self, script: Script, vocab: int, end_ids: tuple[int, ...] = (), max_position: int = 512) -> None:
        self.script = script
        self.spec = TargetSpec(vocab, 1, 1, max_position, end_ids, torch.float64, CPU)
        self.feature_layers: tuple[int, ...] = ()
        self.forwards: list[int] = []  # rows of every verify

    def tap(self, layers: tuple[int, ...]) -> None:
        self.feature_layers = layers

    def allocate(self, slots: int, length: int) -> KVCache:
        return token_cache(slots, length)

    def prefill(self, cache: KVCache, ids: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        write(cache, [ids[0]], position.tolist())
        seen = history(cache, 0, range(int(position[0]) + ids.shape[1]))
        return ids.unsqueeze(-1).double(), self._logits(seen).unsqueeze(0)

    def verify(self, cache: KVCache, rows: Rows, position: Tensor) -> tuple[Tensor, Tensor]:
        batch, n = rows.tokens.shape
        self.forwards.append(n)
        sizes = [int((rows.parents[b] >= 0).sum()) + 1 for b in range(batch)]
        write(cache, [rows.tokens[b, :size] for b, size in enumerate(sizes)], position.tolist())
        visible = unpack(rows.ancestors, n)
        logits = torch.zeros(batch, n, self.spec.vocab_size, dtype=torch.float64)
        for b in range(batch):
            base = int(position[b])
            for row in range(sizes[b]):
                path = [base + j for j in range(n) if visible[b, row, j]]
                logits[b, row] = self._logits(history(cache, b, [*range(base), *path]))
        return logits, rows.tokens.unsqueeze(-1).double()

    def commit(self, cache: KVCache, path: Tensor, position: Tensor) -> None:
        cache.commit(path, position)

    def embed(self, ids: Tensor) -> Tensor:
        return ids.unsqueeze(-1).double()

    def head(self, hidden: Tensor) -> Tensor:
        return hidden.expand(-1, self.spec.vocab_size)

    def _logits(self, seen: tuple[int, ...]) -> Tensor:
        return torch.tensor(list(self.script(seen)), dtype=torch.float64)


def drafter_config(block_size: int, max_position: int = 4096) -> DrafterConfig:
    return DrafterConfig.read(
        {
            "architectures": ["DFlashDraftModel"], "hidden_size": 1, "intermediate_size": 1, "num_hidden_layers": 1,
            "num_attention_heads": 1, "head_dim": 2, "vocab_size": 4, "max_position_embeddings": max_position,
            "block_size": block_size, "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0]},
        }
    )  # fmt: skip


class ScriptedDrafter:
    """Proposes by a function of the history that its own context holds: history -> [D][V] logits."""

    def __init__(
        self, script: Callable[[tuple[int, ...]], Sequence[Sequence[float]]], block_size: int, max_position: int = 4096
    ) -> None:
        self.script = script
        self.config = drafter_config(block_size, max_position)
        self.vocabulary: Tensor | None = None  # of the columns that the script gives
        self.pairwise = None

    def allocate(self, slots: int, length: int) -> KVCache:
        return token_cache(slots, length)

    def append(self, cache: KVCache, features: Tensor, position: Tensor, counts: Sequence[int] | None = None) -> None:
        ids = features[..., 0].long()
        counts = counts or [ids.shape[1]] * len(ids)
        write(cache, [ids[b, :count] for b, count in enumerate(counts)], position.tolist())

    def propose(self, cache: KVCache, root: Tensor, position: Tensor, depths: int) -> Tensor:
        proposals = []
        for b in range(len(root)):
            seen = (*history(cache, b, range(int(position[b]))), int(root[b]))
            proposals.append(torch.tensor([list(row) for row in self.script(seen)], dtype=torch.float64)[:depths])
        return torch.stack(proposals)


class CharText:
    """Token i is the i-th of `pieces`; ids outside are special and have no text."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = list(pieces)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[i] for i in ids if i < len(self.pieces))

    def encode(self, text: str) -> list[int]:
        return [self.pieces.index(c) for c in text]

    def stream(self) -> Any:
        return CharStream(self)


class CharStream:
    def __init__(self, text: CharText) -> None:
        self.text = text

    def push(self, token: int) -> str:
        return self.text.decode([token])

    def flush(self) -> str:
        return ""


def scripted_engine(
    target: ScriptedTarget,
    drafter: ScriptedDrafter | None,
    pieces: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    **speculation: Any,
) -> Engine:
    """An engine on scripted parts; with no drafter, mode ar; without a tree_context. config: fields of EngineConfig."""
    asked = speculation if speculation or drafter else {"mode": "ar"}
    chosen = Speculation(**{"tree_context": "off", **asked})
    return Engine(target, drafter, CharText(pieces), EngineConfig(speculation=chosen, **(config or {})))  # type: ignore[arg-type]


HASHED_VOCAB = 4


def hashed(history: tuple[int, ...], salt: int, step: int = 0) -> list[float]:
    """Logits that look random and depend on the whole history."""
    x = salt + 1
    for token in history:
        x = (x * 31 + token * 7 + step + 3) % 10007
    return [((x * (t + 2) * (t + 3)) % 97) / 20 for t in range(HASHED_VOCAB)]


def engine_for(
    salt: int,
    block: int = 5,
    noise: float = 0.3,
    limit: int = 4096,
    config: Mapping[str, Any] | None = None,
    **speculation: Any,
) -> Engine:
    """A drafter that follows the target's own greedy path, blurred, so that some of it is accepted."""

    def propose(history: tuple[int, ...]) -> list[list[float]]:
        rows = []
        for depth in range(block - 1):
            logits = hashed(history, salt)
            rows.append([v + noise * ((depth * 5 + t * 3 + salt) % 7) for t, v in enumerate(logits)])
            history = (*history, max(range(HASHED_VOCAB), key=lambda t, now=logits: now[t]))
        return rows

    target = ScriptedTarget(lambda history: hashed(history, salt), HASHED_VOCAB, end_ids=(3,))
    return scripted_engine(target, ScriptedDrafter(propose, block, limit), "abc", config, **speculation)
