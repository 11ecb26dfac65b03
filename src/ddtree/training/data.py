"""`ddtree train data`: the target answers prompts of many kinds, and the token ids are kept in shards."""

import random
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from ddtree.config import EngineConfig, SamplingParams, Speculation
from ddtree.engine import Engine
from ddtree.engine.device import choose_device, choose_dtype
from ddtree.engine.loading import HALVES
from ddtree.errors import InvalidOption
from ddtree.kernels.backend import usable
from ddtree.training.config import TargetPart, TrainConfig, as_dict
from ddtree.training.prompts import Source
from ddtree.training.shards import Chat, shard_path, write_manifest, write_shard

LEAST_ROOM = 8  # tokens that an answer must have room for
OWN_TOKENS = 128  # of a user message that the target writes
SHORTEST, LONGEST = 8, 2000  # characters of one


@dataclass
class Draft:
    """A chat on its way."""

    number: int
    kind: str
    greedy: bool
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def key(self) -> str:
        """Its first message: chats that share it are held out together."""
        return self.messages[0]["content"]


def load_engine(target: TargetPart, max_length: int, batch: int) -> Engine:
    """The target alone, decoding plainly; for many rows at once, so what is fastest for them is taken on a GPU.

    Raises as Engine.load.
    """
    device = choose_device(target.device)
    free = usable(device) and choose_dtype(target.dtype, device) in HALVES  # whether there is a choice of numerics
    config = EngineConfig(
        target.model, "none", Speculation("ar"), target.device, target.dtype, max_length,
        max_running_requests=batch,
        max_tree_budget=1,  # no trees are laid: no memory for them
        prefix_caching=False,
        numerics="fast" if free else "auto",
    )  # fmt: skip
    return Engine.load(config)


def generate_data(
    config: TrainConfig, engine: Engine | None = None, max_minutes: float | None = None, quiet: bool = False
) -> dict[str, Any]:
    """Write the shards that are missing. engine: instead of the one that the configuration names.

    Returns what is there now: shards, chats, tokens. Raises InvalidOption where the folder holds other data.
    """
    c, began = config.data, time.monotonic()
    source = Source(c)
    engine = engine or load_engine(config.target, c.max_length, c.batch)
    maker = ChatMaker(config, engine, source)
    write_manifest(config.data_folder, _facts(config, engine, source))
    shards = -(-c.chats // c.shard_chats)
    written, tokens = 0, 0
    with tqdm(total=shards * c.shard_chats, unit="chat", disable=quiet) as bar:
        for shard in range(shards):  # whole ones, so that more chats are more shards
            numbers = range(shard * c.shard_chats, (shard + 1) * c.shard_chats)
            path = shard_path(config.data_folder, shard)
            if not path.exists():
                if max_minutes is not None and time.monotonic() - began > max_minutes * 60:
                    break
                chats = maker.chats(numbers)
                write_shard(path, chats, source.kinds)
                written, tokens = written + 1, tokens + sum(chat.answer for chat in chats)
            bar.update(len(numbers))
            bar.set_postfix(answer_tokens=tokens, tokens_s=int(tokens / (time.monotonic() - began)))
    left = sum(not shard_path(config.data_folder, shard).exists() for shard in range(shards))
    return {"folder": str(config.data_folder), "shards": shards - left, "left": left, "written": written,
            "answer_tokens_written": tokens, "refused": maker.refused}  # fmt: skip


def _facts(config: TrainConfig, engine: Engine, source: Source) -> dict[str, Any]:
    """What must not change while a folder grows; the number of chats may."""
    spec = engine.target.spec
    settings = {k: v for k, v in as_dict(config.data).items() if k not in ("chats", "batch")}
    special = sorted(i for i, token in engine.text.backend.get_added_tokens_decoder().items() if token.special)
    return {"model": config.target.model, "vocab_size": spec.vocab_size, "end_ids": list(spec.end_ids),
            "special_ids": special, "kinds": source.kinds, "settings": settings}  # fmt: skip


class ChatMaker:
    """Makes the chats of given numbers; each is a function of its number, the seed and the target."""

    def __init__(self, config: TrainConfig, engine: Engine, source: Source) -> None:
        self._config, self._engine, self._source = config.data, engine, source
        self.refused = 0  # prompts that are evaluation prompts, empty or too long

    def chats(self, numbers: Sequence[int]) -> list[Chat]:
        """Every turn of every chat is one sequence; the turns before its own are part of its prompt."""
        c, out = self._config, []
        drafts = self._begin(numbers)
        for turn in range(c.turns):
            if turn:
                drafts = self._write_users(drafts, turn)
            prompts = {d.number: self._engine.text.chat(d.messages) for d in drafts}
            fits = [d for d in drafts if len(prompts[d.number]) + LEAST_ROOM <= c.max_length]
            self.refused += len(drafts) - len(fits)
            ids = [prompts[d.number] for d in fits]
            params = [
                self._params(d, 0.0 if d.greedy else c.temperature, c.max_tokens, turn, p)
                for d, p in zip(fits, ids, strict=True)
            ]
            for draft, prompt, (tokens, text) in zip(fits, ids, self._generate(ids, params), strict=True):
                whole = np.array([*prompt, *tokens], np.int32)
                out.append(Chat(whole, len(prompt), draft.kind, draft.greedy, self._held(draft.key)))
                draft.messages.append({"role": "assistant", "content": text})
            drafts = fits
        return out

    def _begin(self, numbers: Sequence[int]) -> list[Draft]:
        found, open_ = [], []
        for number in numbers:
            prompt = self._source(number)
            if prompt is None:
                self.refused += 1
                continue
            draw = random.Random(f"{self._config.seed}:{number}:greedy")
            draft = Draft(number, prompt.kind, draw.random() >= self._config.sampled)
            if prompt.text is None:
                open_.append(draft)
            else:
                draft.messages.append({"role": "user", "content": prompt.text})
                found.append(draft)
        return sorted(found + self._write_users(open_, 0), key=lambda d: d.number)

    def _write_users(self, drafts: list[Draft], turn: int) -> list[Draft]:
        """The target writes the next user message of each; those that cannot be used are dropped."""
        prefixes = [self._user_prefix(d.messages) for d in drafts]
        room = [
            (d, p)
            for d, p in zip(drafts, prefixes, strict=True)
            if p and len(p) + LEAST_ROOM <= self._config.max_length
        ]
        ids = [p for _, p in room]
        params = [self._params(d, self._config.own_temperature, OWN_TOKENS, 1000 + turn, p) for d, p in room]
        kept = []
        for (draft, _), (_, said) in zip(room, self._generate(ids, params), strict=True):
            text = said.strip()
            if SHORTEST <= len(text) <= LONGEST and self._source.allows(text):
                draft.messages.append({"role": "user", "content": text})
                kept.append(draft)
        self.refused += len(drafts) - len(kept)
        return kept

    def _user_prefix(self, messages: list[dict[str, str]]) -> list[int]:
        """The chat up to where the user's words begin: what two different words have in common."""
        one, other = (
            self._engine.text.chat([*messages, {"role": "user", "content": word}], add_generation_prompt=False)
            for word in ("A", "7")
        )
        same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
        return one[:same]

    def _params(self, draft: Draft, temperature: float, tokens: int, turn: int, prompt: list[int]) -> SamplingParams:
        seed = zlib.crc32(f"{self._config.seed}:{draft.number}:{turn}".encode())
        return SamplingParams(min(tokens, self._config.max_length - len(prompt)), temperature, seed=seed)

    def _generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[tuple[list[int], str]]:
        if not prompts:
            return []
        return [(g.token_ids, g.text) for g in self._engine.generate(prompts, params)]

    def _held(self, text: str) -> bool:
        """By the text, so that the same prompt is never on both sides."""
        return random.Random(f"{self._config.seed}:heldout:{text}").random() < self._config.heldout


def need_any(chats: Sequence[Chat], what: str) -> None:
    """Raises InvalidOption where there are none."""
    if not chats:
        raise InvalidOption(f"the data hold no {what}: raise data.chats or data.heldout, and run `ddtree train data`")
