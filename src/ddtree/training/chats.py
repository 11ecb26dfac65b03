"""Chats of given numbers: their prompts, and what the target answers."""

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ddtree.config import SamplingParams
from ddtree.training.answers import Answered, Answers
from ddtree.training.config import TrainConfig
from ddtree.training.prompts import Source
from ddtree.training.shards import Chat

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


class ChatMaker:
    """Makes the chats of given numbers; each is a function of its number, the seed and the target."""

    def __init__(self, config: TrainConfig, answers: Answers, source: Source) -> None:
        self._config, self._answers, self._source = config.data, answers, source
        self._empty: list[int] | None = None  # where the user's first words begin
        self.refused = 0  # prompts that are evaluation prompts, empty or too long

    def chats(self, numbers: Sequence[int]) -> list[Chat]:
        """Every turn of every chat is one sequence; the turns before its own are part of its prompt."""
        c, out = self._config, []
        drafts = self._begin(numbers)
        for turn in range(c.turns):
            if turn:
                drafts = self._ask_on([d for d in drafts if self._goes_on(d.number, turn)], turn)
            prompts = {d.number: self._answers.text.chat(d.messages) for d in drafts}
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

    def _goes_on(self, number: int, turn: int) -> bool:
        return random.Random(f"{self._config.seed}:{number}:{turn}:more").random() < self._config.more_turns

    def _ask_on(self, drafts: list[Draft], turn: int) -> list[Draft]:
        """The next user message of each: a template's, or the target writes it."""
        open_ = []
        for draft in drafts:
            text = self._source.followup(draft.number, turn)
            if text is None:
                open_.append(draft)
            else:
                draft.messages.append({"role": "user", "content": text})
        closed = [draft for draft in drafts if draft.messages[-1]["role"] == "user"]
        return sorted(closed + self._write_users(open_, turn), key=lambda d: d.number)

    def _write_users(self, drafts: list[Draft], turn: int) -> list[Draft]:
        """The target writes the next user message of each; those that cannot be used are dropped."""
        starts = [self._source.start(d.number) if not turn else "" for d in drafts]
        prefixes = [
            [*self._user_prefix(d.messages), *(self._encoded(start) if start else ())]
            for d, start in zip(drafts, starts, strict=True)
        ]
        room = [
            (d, p, start)
            for d, p, start in zip(drafts, prefixes, starts, strict=True)
            if p and len(p) + LEAST_ROOM <= self._config.max_length
        ]
        ids = [p for _, p, _ in room]
        params = [self._params(d, self._config.own_temperature, OWN_TOKENS, 1000 + turn, p) for d, p, _ in room]
        kept = []
        for (draft, _, start), (_, said) in zip(room, self._generate(ids, params), strict=True):
            text = (start + said).strip()
            if SHORTEST <= len(text) <= LONGEST and self._source.allows(text):
                draft.messages.append({"role": "user", "content": text})
                kept.append(draft)
        self.refused += len(drafts) - len(kept)
        return kept

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self._answers.text.backend.encode(text, add_special_tokens=False).ids
        return ids

    def _user_prefix(self, messages: list[dict[str, str]]) -> list[int]:
        """The chat up to where the user's words begin: what two different words have in common."""
        if not messages and self._empty is not None:
            return self._empty
        one, other = (
            self._answers.text.chat([*messages, {"role": "user", "content": word}], add_generation_prompt=False)
            for word in ("A", "7")
        )
        same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
        if not messages:
            self._empty = one[:same]
        return one[:same]

    def _params(self, draft: Draft, temperature: float, tokens: int, turn: int, prompt: list[int]) -> SamplingParams:
        seed = zlib.crc32(f"{self._config.seed}:{draft.number}:{turn}".encode())
        return SamplingParams(min(tokens, self._config.max_length - len(prompt)), temperature, seed=seed)

    def _generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> Answered:
        return self._answers(prompts, params)

    def _held(self, text: str) -> bool:
        """By the text, so that the same prompt is never on both sides."""
        return random.Random(f"{self._config.seed}:heldout:{text}").random() < self._config.heldout
