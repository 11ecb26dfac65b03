"""An engine that answers from a script, so that the command line is tested without weights."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ddtree.config import EngineConfig, SamplingParams, Speculation
from ddtree.engine import Chunk, Generation, Shadow
from ddtree.errors import ContextLengthExceeded

RUN_LENGTH = {"ar": 1, "linear": 2, "shadow-linear": 2, "tree": 3}  # tokens that a scripted round commits
SECONDS_A_ROUND = {"ar": 0.01, "linear": 0.012, "shadow-linear": 0.015, "tree": 0.015}
ANSWER = "ddtree says: grüße, 世界! Here are some more words so that a limit can cut them off."


class FakeText:
    """A token is a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode("".join(f"<{message['role']}>{message['content']}" for message in messages))

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


class FakeEngine:
    """Says `ANSWER`, or what `answers` holds for a mode; `calls` holds (prompt, params, speculation, observer)."""

    answers: ClassVar[dict[str, str]] = {}
    agree: ClassVar[bool | None] = True
    device: ClassVar[str] = "cpu"

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.loaded_by = threading.current_thread()
        self.speculation = config.speculation
        self.max_model_len = config.max_model_len or 8192
        self.text = FakeText()
        self.dtype = "float32" if config.dtype == "auto" else config.dtype
        self.warmed_by: threading.Thread | None = None
        self.calls: list[tuple[list[int], SamplingParams, Speculation, Any]] = []

    def warm_up(self) -> None:
        self.warmed_by = threading.current_thread()

    def info(self) -> dict[str, Any]:
        return {
            "model": self.config.model,
            "drafter": self.config.drafter,
            "device": self.device,
            "dtype": self.dtype,
            "threads": 2,
            "versions": {"torch": "0"},
            "linear": "plain",
            "speculation": {"mode": self.speculation.mode},
        }

    def settled(self, speculation: Speculation) -> Speculation:
        return speculation.settled(self.device)

    def stream(
        self, prompt: list[int], params: SamplingParams, speculation: Speculation | None = None, observer: Any = None
    ) -> Iterator[Chunk]:
        chosen = speculation or self.speculation
        self.calls.append((prompt, params, chosen, observer))
        if len(prompt) >= self.max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt)} tokens,\nthe context {self.max_model_len}: raise max_model_len"
            )
        whole = self.text.encode(self.answers.get(chosen.mode, ANSWER))
        ids = whole[: params.max_tokens]
        step = RUN_LENGTH[chosen.mode]
        for start in range(0, len(ids), step):
            piece = ids[start : start + step]
            last = start + step >= len(ids)
            if observer is not None:
                with observer.stage("verify"):
                    pass
            reason = ("stop" if ids == whole else "length") if last else None
            generation = self._generation(prompt, ids, reason, chosen.mode, observer) if reason else None
            yield Chunk(self.text.decode(piece), piece, reason, generation)

    def without_drafter(self) -> "FakeEngine":
        return self

    def generate(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        speculation: Speculation | None = None,
        observer: Any = None,
    ) -> list[Generation]:
        answers = []
        for prompt, own in zip(prompts, params, strict=True):
            *_, last = self.stream(prompt, own, speculation, observer)
            assert last.generation is not None
            answers.append(last.generation)
        return answers

    def _generation(self, prompt: list[int], ids: list[int], reason: str, mode: str, observer: Any) -> Generation:
        rounds = -(-(len(ids) - 1) // RUN_LENGTH[mode])
        seconds = rounds * SECONDS_A_ROUND[mode]
        return Generation(
            text=self.text.decode(ids), token_ids=ids, finish_reason=reason, mode=mode, rounds=rounds,
            acceptance_length=float(RUN_LENGTH[mode]), prompt_tokens=len(prompt), seconds=seconds + 0.1,
            prefill_seconds=0.1, decode_seconds=seconds, stages=dict(observer.seconds) if observer is not None else {},
            shadow=Shadow(2.0, 2.5, self.agree, None) if mode == "shadow-linear" else None,
        )  # fmt: skip


@dataclass
class Ran:
    """What a command came to."""

    code: int
    out: str
    err: str


Command = Callable[..., Ran]
