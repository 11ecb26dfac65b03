"""Where prompts come from: templates, the target itself, and files the user names. Evaluation prompts stay out."""

import json
import random
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ddtree.bench.suite import load_prompts
from ddtree.errors import DamagedFile, ModelNotFound
from ddtree.training.config import DataPart

OWN = "own"
_SLOT = re.compile(r"\{(\w+)(?::(\d+)-(\d+)|(@))?\}")
_RUN = 12  # words in a row that no prompt may share with an evaluation prompt


@dataclass(frozen=True)
class Prompt:
    """The first user message of a chat; text None: the target writes it."""

    kind: str
    text: str | None
    later: tuple[str, ...] = ()  # user messages after it


@cache
def templates() -> dict[str, Any]:
    """The tables `weights`, `kinds`, `followups`, `starts` and `slots` of templates.toml."""
    return tomllib.loads(files("ddtree.training").joinpath("templates.toml").read_text(encoding="utf-8"))


def a_followup(draw: random.Random) -> str:
    """What a user says after an answer, whatever it was."""
    return _fill(draw.choice(templates()["followups"]["texts"]), draw)


def from_template(draw: random.Random) -> Prompt:
    """A prompt of a kind drawn by the kinds' weights."""
    table = templates()
    kinds = sorted(table["kinds"])
    (kind,) = draw.choices(kinds, [table["weights"].get(name, 1) for name in kinds])
    return Prompt(kind, _fill(draw.choice(table["kinds"][kind]), draw).strip(" "))


def _fill(text: str, draw: random.Random) -> str:
    slots, last = templates()["slots"], dict[str, str]()

    def filled(part: str) -> str:
        return _SLOT.sub(value, part)

    def value(found: re.Match[str]) -> str:
        name, low, high, again = found.groups()
        if low:
            return str(draw.randint(int(low), int(high)))
        if not again:
            last[name] = filled(draw.choice(slots[name]))
        return last[name]

    return filled(text)


def read_prompts(path: str) -> list[Prompt]:
    """A JSONL file: each line an object with `prompt`, or with `turns` or `messages`, whose user texts are taken.

    `kind` or `category` names its kind, else the file does. Raises ModelNotFound or DamagedFile, naming the line.
    """
    if not Path(path).is_file():
        raise ModelNotFound(f"{path} does not exist: name a JSONL file of prompts")
    kind, found = Path(path).stem, []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            text, *later = [raw["prompt"]] if "prompt" in raw else _users(raw)
        except (ValueError, LookupError, TypeError) as error:
            raise DamagedFile(
                f'{path}, line {number}: give an object with "prompt", "turns" or "messages", as text'
            ) from error
        if not all(isinstance(said, str) and said.strip() for said in (text, *later)):
            raise DamagedFile(f"{path}, line {number}: the prompt must be text that is not empty")
        found.append(Prompt(str(raw.get("kind") or raw.get("category") or kind), text, tuple(later)))
    if not found:
        raise DamagedFile(f"{path} holds no prompt: give one JSON object a line")
    return found


def _users(raw: dict[str, Any]) -> list[Any]:
    if "turns" in raw:
        return list(raw["turns"])
    return [m["content"] for m in raw["messages"] if m["role"] == "user"]


class Banned:
    """Evaluation prompts: a prompt that equals one, or shares twelve words in a row with one, is refused."""

    def __init__(self, texts: Iterable[str]) -> None:
        words = [_words(text) for text in texts]
        self._whole = {tuple(w) for w in words}
        self._runs = {run for w in words for run in _runs(w)}

    @classmethod
    def of(cls, config: DataPart) -> "Banned":
        """The bench suite's prompts, and those of the files in `exclude`."""
        others = [text for path in config.exclude for p in read_prompts(path) for text in (p.text or "", *p.later)]
        return cls([p.prompt for p in load_prompts()] + others)

    def __contains__(self, text: str) -> bool:
        words = _words(text)
        return tuple(words) in self._whole or not self._runs.isdisjoint(_runs(words))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _runs(words: list[str]) -> Iterable[tuple[str, ...]]:
    return (tuple(words[i : i + _RUN]) for i in range(len(words) - _RUN + 1))


class Source:
    """The first prompt of every chat, a function of the seed and the chat's number alone."""

    def __init__(self, config: DataPart) -> None:
        self._config, self._banned = config, Banned.of(config)
        self._lines = [prompt for path in config.paths for prompt in read_prompts(path)]
        random.Random(f"{config.seed}:lines").shuffle(self._lines)

    @property
    def kinds(self) -> list[str]:
        """All that may come, in a fixed order."""
        return sorted({*templates()["kinds"], OWN, *(prompt.kind for prompt in self._lines)})

    def __call__(self, number: int) -> Prompt | None:
        """None where the prompt is one of the banned."""
        c, draw = self._config, random.Random(f"{self._config.seed}:{number}")
        (source,) = draw.choices(("templates", "own", "files"), (c.templates, c.own, c.files))
        if source == "own":
            return Prompt(OWN, None)
        prompt = from_template(draw) if source == "templates" else self._lines[number % len(self._lines)]
        return prompt if self.allows(prompt.text or "") else None

    def start(self, number: int) -> str:
        """How the target's own first message of a chat begins: often not at all."""
        return random.Random(f"{self._config.seed}:{number}:start").choice(templates()["starts"]["texts"])

    def followup(self, number: int, turn: int) -> str | None:
        """The user's message of a later turn; None: the target writes it."""
        c, draw = self._config, random.Random(f"{self._config.seed}:{number}:{turn}:followup")
        if not draw.random() * (c.templates + c.own) < c.templates:
            return None
        text = a_followup(draw)
        return text if self.allows(text) else None

    def allows(self, text: str) -> bool:
        """Whether it may be trained on."""
        return text not in self._banned
